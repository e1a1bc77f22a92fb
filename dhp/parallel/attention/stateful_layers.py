"""Runs layers that carry state along a row (convolutions, recurrent attention) on each sample by itself.

A gated delta net or a short convolution knows nothing of segments, so a packed row's state would run from one sample
into the next. They are run from outside: samples of one length as one batch, and padded rows as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.draws import current_keys, drawing
from dhp.core.errors import ModelError
from dhp.parallel.attention.segment_plan import SegmentPlan

_CACHES = ("cache_params", "past_key_values", "past_key_value")


def run_by_segment(model: nn.Module, class_names: Collection[str]) -> int:
    """Make all modules of these classes, by name, run each sample of a packed row by itself; how many there are.

    The model's forward gets the plan of the row as the keyword `segments`, as for `packed_attention`; its layers hand
    it on. Before recomputing or sharding wraps the layers, so that this is inside. Raises ModelError for a class that
    no module is of.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in class_names]
    missing = sorted(set(class_names) - {type(module).__name__ for _, module in found})
    if missing:
        raise ModelError(
            f"{type(model).__name__} has no module of the class {', '.join(missing)}, whose state must not run from "
            "one sample into the next. Correct the names, or hold them against this version of transformers"
        )
    for name, module in found:
        module.forward = _by_segment(name, module.forward)
    return len(found)


def _by_segment(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which takes `hidden_states` [rows, tokens, width] and answers with as many, segment by segment."""

    @wraps(forward)
    def run(hidden_states: Tensor, *args: Any, segments: SegmentPlan | None = None, **named: Any) -> Any:
        _check(name, args, segments, named)
        assert segments is not None
        alone, keys = partial(forward, **named), current_keys()
        output = _run_each(alone, hidden_states, segments)
        for _ in range(segments.calls - len(segments.groups)):
            # Its backward runs too, so that other ranks' calls do not wait; it has no other effect.
            with drawing(keys and keys.split([1, len(keys.keys) - 1])[0]):
                output = output + alone(hidden_states[:1, :1]).sum() * 0.0
        return output

    return run


def _run_each(forward: Callable[[Tensor], Tensor], hidden_states: Tensor, segments: SegmentPlan) -> Tensor:
    rows, tokens = hidden_states.shape[:2]
    if segments.groups == ((tokens, rows),):
        return forward(hidden_states)
    flat = hidden_states.flatten(0, 1)
    flat = flat if segments.order is None else flat[segments.order]
    sizes, keys = [length * count for length, count in segments.groups], current_keys()
    of_parts = [None] * len(sizes) if keys is None else keys.chosen(segments.order).split(sizes)
    outputs = []
    for (length, count), part, own in zip(segments.groups, flat.split(sizes), of_parts, strict=True):
        with drawing(own):
            outputs.append(forward(part.unflatten(0, (count, length))).flatten(0, 1))
    output = torch.cat(outputs)
    output = output if segments.inverse is None else output[segments.inverse]
    return output.unflatten(0, (rows, tokens))


def _check(name: str, args: tuple[Any, ...], segments: SegmentPlan | None, named: dict[str, Any]) -> None:
    """Raises ModelError for what would let state run on, or lose it."""
    if segments is None:
        problem = "it was called without `segments`: its layer keeps the keyword to itself"
    elif segments.rest is not None:
        problem = "its row is divided over ranks, and its state would have to travel"
    elif args or named.get("attention_mask") is not None:
        problem = f"it was called with {len(args)} more tensors and a mask, which are not cut into segments"
    elif any(named.get(cache) is not None for cache in _CACHES):
        problem = "it was called with a cache, which training has not"
    else:
        return
    raise ModelError(f"{name}: its state cannot be kept to one sample: {problem}. Use a model without such layers")
