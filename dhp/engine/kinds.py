"""The engine of a stage, by its part's record."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dhp.core.kinds import KINDS
from dhp.engine.settings import StageSettings

if TYPE_CHECKING:
    from dhp.engine.stage import StageEngine


def make_rank(settings: StageSettings) -> StageEngine:
    """One rank of a stage, in its own process. Engines are imported here: a driver, which makes none, starts seconds
    sooner without them. Raises what the engine's constructor raises."""
    module, name = KINDS[settings.spec.part].engine.split(":")
    engine: StageEngine = getattr(import_module(module), name)(settings)
    return engine
