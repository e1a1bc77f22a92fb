"""Chooses a stage's engine, and imports what ranks need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch.utils.cpp_extension  # noqa: F401
import transformers.generation.utils  # noqa: F401
import transformers.models.auto.processing_auto  # noqa: F401
import transformers.optimization  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dhp.engine.encoder_engine
import dhp.engine.text_engine  # noqa: F401
from dhp.core.kinds import KINDS
from dhp.engine.stage_settings import StageSettings

if TYPE_CHECKING:
    from dhp.engine.stage import StageEngine


def make_rank(settings: StageSettings) -> StageEngine:
    """One rank of a stage, in its own process. Engines are imported here: a driver, which makes none, starts seconds
    sooner without them. Raises what the engine's constructor raises."""
    module, name = KINDS[settings.spec.part].engine.split(":")
    engine: StageEngine = getattr(import_module(module), name)(settings)
    return engine


get_checkpoint_conversion_mapping("qwen2_5_vl")  # compiles a thousand patterns, of all families
