"""Knows the library's modules of experts, and runs idle ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from dhp.core.errors import ModelError
from dhp.core.transformers_private import set_experts
from dhp.core.wrapping import wrap_forward


@dataclass(frozen=True)
class Groups:
    """The rows of each expert, of rows sorted by expert. counts: rows of each expert. ends: where its rows end, int32
    [experts], on the device, so that nothing has to be copied there."""

    counts: list[int]
    ends: Tensor


def run_experts(experts: Any, rows: Tensor, groups: Groups) -> Tensor:
    """The outputs of the module `experts` for rows [n, hidden], sorted by its experts, of which there are as many as
    `groups`. Every parameter gets a gradient, zero without rows, so that sums over ranks begin in one order on
    all of them."""
    gated = experts._apply_gate(_multiply(rows, getattr(experts, GATE_UP), groups))
    return _multiply(gated, getattr(experts, DOWN), groups)


def _multiply(rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """rows [n, in] by the weights [experts, out, in] of each one's expert."""
    if not len(rows) or not takes_groups(weights, rows.dtype):
        parts = zip(rows.split(groups.counts), weights.unbind(0), strict=True)
        return torch.cat([torch.nn.functional.linear(own, weight) for own, weight in parts])
    return moe._grouped_linear(rows, weights, groups.ends)


GATE_UP, DOWN = "gate_up_proj", "down_proj"
_ALIGNED_BYTES = 16
_MARK = "_is_expert_parallel"  # what the library's decorator of such classes sets
_KNOWN = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
_KNOWN |= {"has_post_expert_norm": False}


def is_experts(module: nn.Module) -> bool:
    """Whether the module is all experts of a layer."""
    return hasattr(module, _MARK)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of experts by its name. Raises ModelError for one whose parameters are laid out otherwise than known
    here."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    for name, module in found.items():
        require_known(name, module)
    return found


def is_known(module: nn.Module) -> bool:
    """Whether the experts have the parameters that are known here, laid out as known here."""
    return not _unlike(module) and _parameters(module) == sorted((GATE_UP, DOWN))


def require_known(name: str, module: nn.Module) -> None:
    """Raises ModelError where the experts are none that `is_known`."""
    if not is_known(module):
        parameters, other = _parameters(module), _unlike(module)
        others = ", ".join(f"{key}={value}" for key, value in other.items()) or "all else as known"
        raise ModelError(
            f"{name} ({type(module).__name__}) has parameters {parameters} ({others}): experts are cut here where each "
            f"has {GATE_UP} [experts, 2 × width, hidden] with the gate first and {DOWN} [experts, hidden, width], and "
            "no bias. Set text.parallelism=data with text.expert=1 and text.tensor=1"
        )


def _parameters(module: nn.Module) -> list[str]:
    return sorted(own for own, _ in module.named_parameters())


def _unlike(module: nn.Module) -> dict[str, Any]:
    return {key: getattr(module, key, None) for key, value in _KNOWN.items() if getattr(module, key, None) != value}


def choose_product(model: nn.Module, dtype: torch.dtype) -> None:
    """Let experts multiply in groups, a layer's in one call, where their shapes in `dtype` allow it; or one by one."""
    for module in model.modules():
        if is_experts(module):
            matrices = [parameter for parameter in module.parameters() if parameter.ndim == 3]  # beside norms
            grouped = all(takes_groups(weights, dtype) for weights in matrices)
            set_experts(module.config, "grouped_mm" if grouped else "eager")


def takes_groups(weights: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's product in groups takes weights [experts, out, in] in that format: none of 64 bits, and rows of
    whole 16 bytes on both sides."""
    sides = (weights.shape[1], weights.shape[2])
    return dtype != torch.float64 and all(side * dtype.itemsize % _ALIGNED_BYTES == 0 for side in sides)


_RECORDED = "router_logits"  # under this name the library's models say which modules are routers


class Routers:
    """The routers of a model, whose logits can be recorded."""

    def __init__(self, decoder: nn.Module):
        """Raises ModelError where the library does not say which modules of the decoder are routers."""
        recorder: Any = (getattr(decoder, "_can_record_outputs", None) or {}).get(_RECORDED)
        kind = getattr(recorder, "target_class", None)
        found = [module for module in decoder.modules() if kind is not None and isinstance(module, kind)]
        if not found:
            raise ModelError(
                f"{type(decoder).__name__} is to have a load-balancing loss (output_router_logits=true), and "
                "transformers does not say which of its modules are routers. Set output_router_logits to false in "
                "text_config of the model's config.json to train without it"
            )
        self._logits: list[Tensor] | None = None
        for module in found:
            module.register_forward_hook(lambda _, __, output: self._record(output[recorder.index]))

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """The logits, [tokens, experts], of each router that runs inside, in order. Layers that run again in backward
        are not recorded: their logits are those of the first run."""
        self._logits = logits = []
        try:
            yield logits
        finally:
            self._logits = None

    def _record(self, logits: Tensor) -> None:
        if self._logits is not None:
            self._logits.append(logits)


def balance_losses(logits: Sequence[Tensor], samples: Sequence[range], visits: int) -> Tensor:
    """The loss of each sample, [samples], in float32 (float64 for float64 logits).

    logits: of each layer, [tokens, experts]; samples: the tokens of each; visits: how many experts a token visits."""
    exact = torch.float64 if logits[0].dtype == torch.float64 else torch.float32
    probabilities = [of_layer.to(exact).softmax(-1) for of_layer in logits]
    visited = [_visited(of_layer, visits) for of_layer in probabilities]
    return torch.stack([_loss(probabilities, visited, tokens) for tokens in samples])


def sample_ranges(shape: Sequence[int], lengths: Sequence[int]) -> list[range]:
    """Where samples of so many tokens, in one row or each in its own, are among the flattened rows × tokens. shape:
    rows, tokens."""
    rows, width = shape
    starts = [0, *accumulate(lengths)][:-1] if rows == 1 else [row * width for row in range(rows)]
    return [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _visited(probabilities: Tensor, visits: int) -> Tensor:
    """1 for each expert that a token visits, [tokens, experts]."""
    found = probabilities.detach().topk(visits, dim=-1).indices
    return torch.zeros_like(probabilities).scatter_(1, found, 1.0)


def _loss(probabilities: Sequence[Tensor], visited: Sequence[Tensor], tokens: range) -> Tensor:
    count = len(tokens) * len(probabilities)
    share, mean = (
        torch.stack([rows[tokens.start : tokens.stop].sum(0) for rows in of_layers]).sum(0) / count
        for of_layers in (visited, probabilities)
    )
    return len(mean) * (share * mean).sum()


OF_PICTURES = "vision_moe"  # the experts of pictures in a block that has others for text
KINDS = "moe_mm_token_type_ids"  # the argument by which such a block knows a picture's tokens


def let_all_take_part(model: nn.Module) -> None:
    """Give every parameter of experts, and of the router before them, a gradient of zero where no token comes."""
    for module in model.modules():
        if is_experts(module) and is_known(module):
            wrap_forward(module, _without_rows(module, module.forward), __name__)
        elif isinstance(getattr(module, OF_PICTURES, None), nn.Module):
            wrap_forward(module, _without_pictures(module, module.forward), __name__)


def _without_rows(experts: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if len(hidden_states):
            return forward(hidden_states, top_k_index, top_k_weights)
        none = torch.zeros(len(next(experts.parameters())), dtype=torch.int32, device=hidden_states.device)
        output = run_experts(experts, hidden_states, Groups([0] * len(none), none))
        return output + top_k_weights.sum().to(output.dtype)

    return run


def _without_pictures(block: nn.Module, forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    @wraps(forward)
    def run(hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        output, logits = forward(hidden_states, *given, **named)
        kinds = given[0] if given else named.get(KINDS)
        if kinds is None or not kinds.any():
            unvisited, _ = getattr(block, OF_PICTURES)(hidden_states.flatten(0, -2)[:0])
            output = output + unvisited.sum()
        return output, logits

    return run
