"""RMS norms, and routers to experts, without their detour through float32, whose rounding jumps by 1e-7 for a
difference of 1e-16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm, Qwen3VLMoeTextTopKRouter

KINDS = (
    Qwen2RMSNorm,
    Qwen2_5_VLRMSNorm,
    Qwen3MoeRMSNorm,
    Qwen3RMSNorm,
    Qwen3VLMoeTextRMSNorm,
    Qwen3VLTextRMSNorm,
)
ROUTERS = (Qwen3MoeTopKRouter, Qwen3VLMoeTextTopKRouter)


@contextmanager
def exact_norms() -> Iterator[None]:
    """All norms and routers of the families compute in the format of their states."""
    with pytest.MonkeyPatch.context() as patch:
        use_exact_norms(patch.setattr)
        yield


def use_exact_norms(put: Callable[[Any, str, Any], None]) -> None:
    """The same for good, by `put`, which sets an attribute."""
    for kind in KINDS:
        put(kind, "forward", _norm)
    for kind in ROUTERS:
        put(kind, "forward", _route)


def _norm(self: Any, states: Tensor) -> Tensor:
    return self.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon))


def _route(self: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
    weights, visited = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, visited
