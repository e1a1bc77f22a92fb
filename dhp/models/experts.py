"""Experts of a decoder, from its configuration: how many, how wide, in which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_VISITS = ("num_experts_per_tok", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True)
class Experts:
    """count: in each layer that has any. visits: how many a token visits. width: of one expert, inside. shared: width
    of the shared experts, which every token visits. sparse: by layer, whether it has experts.

    balance: the coefficient of the load-balancing loss; 0: the configuration asks for none.
    """

    count: int
    visits: int
    width: int
    shared: int
    sparse: tuple[bool, ...]
    balance: float


def find_experts(text: Any) -> Experts | None:
    """The experts of a decoder's configuration; None where it has none, or under keys that are not known here."""
    count, visits = _first(text, _COUNTS), _first(text, _VISITS)
    if not count or not visits or getattr(text, "enable_moe_block", True) is False:
        return None
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    width = width[0] if isinstance(width, list | tuple) else width
    asked = getattr(text, "output_router_logits", False)
    return Experts(
        count=count,
        visits=visits,
        width=width,
        shared=getattr(text, "shared_expert_intermediate_size", None) or width * _first(text, _SHARED),
        sparse=tuple(_is_sparse(text, layer) for layer in range(text.num_hidden_layers)),
        balance=float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if asked else 0.0,
    )


def _first(text: Any, names: tuple[str, ...]) -> int:
    return next((getattr(text, name) for name in names if getattr(text, name, None)), 0)


def _is_sparse(text: Any, layer: int) -> bool:
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds:
        return kinds[layer] == "sparse"
    if layer < (getattr(text, "first_k_dense_replace", None) or 0):
        return False
    if layer in (getattr(text, "mlp_only_layers", None) or ()):
        return False
    return (layer + 1) % (getattr(text, "decoder_sparse_step", None) or 1) == 0
