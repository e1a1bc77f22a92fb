"""RMS norms, routers to experts and rotary positions of towers without their detour through float32, whose rounding
jumps by 1e-7 for a difference of 1e-16."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm, Qwen3VLMoeTextTopKRouter

KINDS = (Qwen2RMSNorm, Qwen2_5_VLRMSNorm, Qwen3MoeRMSNorm, Qwen3RMSNorm, Qwen3VLMoeTextRMSNorm, Qwen3VLTextRMSNorm)
ROUTERS = (Qwen3MoeTopKRouter, Qwen3VLMoeTextTopKRouter)


TOWERS = (modeling_qwen2_5_vl, modeling_qwen3_vl, modeling_qwen3_vl_moe)


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


def use_exact_turns(put: Callable[[Any, str, Any], None]) -> None:
    """Rotary positions of towers computed in the format of their states, by `put`."""
    for module in TOWERS:
        put(module, "apply_rotary_pos_emb_vision", _turn)


def rounding() -> tuple[object, ...]:
    """What computes norms, routers and rotary positions now: results of a plain model are the same as long as it is."""
    turns = (module.apply_rotary_pos_emb_vision for module in TOWERS)
    return (*(kind.forward for kind in (*KINDS, *ROUTERS)), *turns)


def _norm(self: Any, states: Tensor) -> Tensor:
    return self.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon))


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb_vision` of the library in the format of the states."""

    def turned(states: Tensor) -> Tensor:
        first, second = states.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
        return states * cos.unsqueeze(-2).to(states) + across * sin.unsqueeze(-2).to(states)

    return turned(query), turned(key)


def _route(self: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
    weights, visited = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, visited
