"""What every rank imports, imported by one process of which ranks are forks (`dhp.cluster.forks.server`).

No tensor is computed here, because a fork would lack the threads that were started for it.
"""

from __future__ import annotations

import torch.utils.cpp_extension  # noqa: F401
import transformers.generation.utils  # noqa: F401
import transformers.models.auto.processing_auto  # noqa: F401
import transformers.optimization  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dhp.engine.encoder
import dhp.engine.text  # noqa: F401

get_checkpoint_conversion_mapping("qwen2_5_vl")  # compiles a thousand patterns, of all families
