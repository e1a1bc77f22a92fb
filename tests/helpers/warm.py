"""What every rank would load for itself, loaded once: the fork server imports this, and ranks are forks of it."""

import pytest  # noqa: F401
import transformers.models.clip.modeling_clip
import transformers.models.llama.modeling_llama
import transformers.models.llava.modeling_llava
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

import dhp.batch.reader
import dhp.engine.engines
import dhp.models.families.llava
import dhp.models.families.qwen2_5_vl  # noqa: F401
from dhp.parallel.deepspeed import preload_deepspeed

preload_deepspeed()
