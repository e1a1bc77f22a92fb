"""What every rank would load for itself, loaded once: the fork server imports this, and ranks are forks of it.

No tensor is computed here, because threads that the server had would be missing in its forks.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch.utils.cpp_extension  # noqa: F401
import transformers.generation.utils  # noqa: F401
import transformers.models.auto.processing_auto  # noqa: F401
import transformers.models.clip.modeling_clip
import transformers.models.llama.modeling_llama
import transformers.models.llava.modeling_llava
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.optimization  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dhp.batch.build
import dhp.engine.encoder  # noqa: F401
import dhp.engine.text
import dhp.models.families.llava
import dhp.models.families.qwen2_5_vl  # noqa: F401
from dhp.parallel.deepspeed import import_deepspeed

import_deepspeed()
import deepspeed.module_inject.auto_ep_layer  # noqa: E402
import deepspeed.ops.op_builder.all_ops  # noqa: E402
import deepspeed.runtime.superoffload  # noqa: E402, F401

get_checkpoint_conversion_mapping("qwen2_5_vl")  # compiles a thousand patterns
gc.collect()
gc.freeze()  # a rank's own collections pass over all of this
