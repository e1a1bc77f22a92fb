"""Decoders whose layers are of a kind that is not known here: each sample of a row runs through all of them alone.

The library's own attention, masks and states do it, so whatever a layer carries from token to token, or chooses among
them, begins and ends with a sample, as in a plain model that is given one."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.errors import ModelError
from dhp.core.wrapping import wrap_forward
from dhp.parallel.attention.mixers import run_each
from dhp.parallel.attention.segment_plan import SegmentPlan

_IGNORED = ("attention_mask", "use_cache", "return_dict")  # no samples are padded where each is alone


def run_by_sample(decoder: nn.Module) -> None:
    """Make a decoder, which has embeddings [rows, tokens, width] as `inputs_embeds`, run each sample by itself; its
    output has `last_hidden_state` alone.

    Its forward gets the plan of the row as the keyword `segments`. Tensors of other keywords have the rows and tokens
    as two neighbouring dimensions. Raises ModelError, as it runs, for one that has not, and for a decoder that is
    called without a plan."""
    wrap_forward(decoder, _by_sample(type(decoder).__name__, decoder.forward), __name__)


def _by_sample(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, inputs_embeds: Tensor, segments: SegmentPlan | None = None, **named: Any) -> Any:
        if args or segments is None or segments.rest is not None:
            raise ModelError(f"{name}: its samples cannot be kept apart: it was called without all of a row's samples")
        outputs: list[Any] = []
        others = {key: one for key, one in named.items() if key not in _IGNORED and not isinstance(one, Tensor)}
        beside = {key: one for key, one in named.items() if key not in _IGNORED and isinstance(one, Tensor)}
        along = _find_tokens(name, beside, inputs_embeds.shape[:2])

        def alone(part: Tensor, cut: Mapping[str, Tensor]) -> Tensor:
            mask = torch.ones(part.shape[:2], dtype=torch.long, device=part.device)
            outputs.append(
                forward(inputs_embeds=part, attention_mask=mask, use_cache=False, return_dict=True, **cut, **others)
            )
            return outputs[-1].last_hidden_state

        states = run_each(alone, inputs_embeds, segments, beside, along)
        outputs[0].last_hidden_state = states
        return outputs[0]

    return run


def _find_tokens(name: str, beside: Mapping[str, Tensor], shape: torch.Size) -> dict[str, int]:
    """The dimension of each tensor that is its rows; the next one is their tokens."""
    found = {}
    for key, tensor in beside.items():
        places = [at for at in range(tensor.ndim - 1) if tensor.shape[at : at + 2] == shape]
        if not places:
            raise ModelError(
                f"{name}: its samples cannot be kept apart: it was called with {key} of the shape "
                f"{tuple(tensor.shape)}, which has no value for each of {shape[0]} × {shape[1]} tokens. Use a model "
                "without such layers"
            )
        # Of whole numbers, as positions on several axes, tokens are the last dimension; of others a width is behind.
        found[key] = places[0] if tensor.is_floating_point() else places[-1]
    return found
