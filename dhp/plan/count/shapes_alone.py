"""Stands in for what looks at values, where a model runs without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from dhp.core.torch_private import CHECKS, COPIES, FUSED_ATTENTION, TorchDispatchMode

_META = torch.device("meta")


@contextmanager
def shapes_alone() -> Iterator[None]:
    """To be entered around a model on the meta device: its checks of values hold, and its attention keeps for backward
    what a fused kernel keeps, which no kernel of that device is."""
    of_library = F.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        fused = query.is_meta and query.shape[-1] == value.shape[-1]
        return (_attend if fused else of_library)(query, key, value, *args, **named)

    # Not by a mode of torch's: backward, which runs layers again, would be outside of it.
    F.scaled_dot_product_attention = attend
    try:
        with _ChecksHold():  # type: ignore[no-untyped-call]
            yield
    finally:
        F.scaled_dot_product_attention = of_library


class _ChecksHold(TorchDispatchMode):
    """Those by which a model makes sure that each placeholder has its feature. What has values keeps them: sizes
    of tiles say into what a tower's states are cut."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is CHECKS and args[0].is_meta:
            return torch.ones((), dtype=torch.bool)
        if func is COPIES and not args[0].is_meta and torch.device(kwargs.get("device", "cpu")) == _META:
            kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's function of that name. A kernel of a GPU keeps the same: its output, and a number a row and head; of
    key and value as many heads as there are."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: torch.Tensor = FUSED_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
