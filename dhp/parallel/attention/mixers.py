"""Layers that carry state along a row (mixers): each sample by itself, also where ranks share the row.

There ranks exchange tokens for channels, as Ulysses does for attention: a rank computes the convolution and the state
of its own heads over the whole row, with the library's functions, and hands the outputs back. All other work of the
layer is done where its tokens are. Tensor ranks, which all have the row's states, take a part of its tokens each, do
the same, and gather what comes of them. Names of transformers' own stand here alone; a test holds them against it."""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.core.draws import current_keys, drawing
from dhp.core.errors import ModelError
from dhp.core.wrapping import wrap_forward
from dhp.parallel.attention.segment_plan import SegmentPlan, Ulysses
from dhp.parallel.tensor.sequence_norms import TensorRanks, gather, scatter
from dhp.parallel.tensor.styles import PARTIAL_OVER

_CACHES = ("cache_params", "past_key_values", "past_key_value")


def run_by_segment(model: nn.Module, class_names: Collection[str], ranks: TensorRanks | None = None) -> int:
    """Make all modules of these classes, by name, run each sample of a packed row by itself; how many there are. ranks:
    that are given the same states, and take a part of the tokens each; each has a part of the modules' gradients then.

    The model's forward gets the plan of the row as the keyword `segments`, as for `packed_attention`; its layers hand
    it on. Before recomputing or sharding wraps the layers, so that this is inside. Raises ModelError for a class that
    no module is of."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in class_names]
    missing = sorted(set(class_names) - {type(module).__name__ for _, module in found})
    if missing:
        raise ModelError(
            f"{type(model).__name__} has no module of the class {', '.join(missing)}, whose state must not run from "
            "one sample into the next. Correct the names, or hold them against this version of transformers"
        )
    for name, module in found:
        wrap_forward(module, _by_segment(name, module, ranks), __name__)
        for inner in module.modules() if ranks is not None else ():
            setattr(inner, PARTIAL_OVER, ranks.group)
    return len(found)


def _by_segment(name: str, module: nn.Module, ranks: TensorRanks | None) -> Callable[..., Any]:
    """The module's forward, which takes `hidden_states` [rows, tokens, width] and answers with as many, segment by
    segment."""
    forward, shared = module.forward, SHARED.get(type(module).__name__)

    @wraps(forward)
    def run(hidden_states: Tensor, *args: Any, segments: SegmentPlan | None = None, **named: Any) -> Any:
        _check(name, args, segments, named)
        assert segments is not None
        if segments.row is not None and shared is not None:
            if ranks is None:
                return shared(module, hidden_states.flatten(0, 1), segments.row).view_as(hidden_states)
            states = scatter(hidden_states, ranks, False)[0]
            return gather(shared(module, states, segments.row)[None], hidden_states.shape[:-1], ranks, False)
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
    elif segments.rest is not None and segments.row is None:
        problem = "its row is divided over ranks, and its state would have to travel"
    elif args or named.get("attention_mask") is not None:
        problem = f"it was called with {len(args)} more tensors and a mask, which are not cut into segments"
    elif any(named.get(cache) is not None for cache in _CACHES):
        problem = "it was called with a cache, which training has not"
    else:
        return
    raise ModelError(f"{name}: its state cannot be kept to one sample: {problem}. Use a model without such layers")


def share_delta_net(module: Any, states: Tensor, row: Ulysses) -> Tensor:
    """A gated delta net (Yang et al. 2025) of Qwen3.5. states: [own tokens, width], and so is what comes of them."""
    library, ranks, rank = sys.modules[type(module).__module__], row.exchange.degree, row.exchange.rank
    sizes = (module.key_dim, module.key_dim, module.value_dim)
    own_sizes, heads = [size // ranks for size in sizes], module.num_v_heads // ranks
    of_parts = module.conv1d.weight.squeeze(1).split(sizes)
    weight = torch.cat([part.unflatten(0, (ranks, -1))[rank] for part in of_parts])
    decay, bias = (parameter.unflatten(0, (ranks, -1))[rank] for parameter in (module.A_log, module.dt_bias))

    def compute(rows: Tensor) -> Tensor:
        mixed, b, a = rows.split((sum(own_sizes), heads, heads), dim=2)
        mixed = library.causal_conv1d_fn(mixed.transpose(1, 2), weight, None, activation=module.activation)
        query, key, value = mixed.transpose(1, 2).split(own_sizes, dim=2)
        query, key = (one.unflatten(2, (-1, module.head_k_dim)) for one in (query, key))
        gates = {"beta": b.sigmoid(), "g": -decay.float().exp() * F.softplus(a.float() + bias)}
        value = value.unflatten(2, (-1, module.head_v_dim))
        output, _ = library.torch_chunk_gated_delta_rule(query, key, value, **gates, use_qk_l2norm_in_kernel=True)
        return output.flatten(2)

    columns = (*module.in_proj_qkv(states).split(sizes, dim=1), module.in_proj_b(states), module.in_proj_a(states))
    output = _exchanged(columns, compute, row).reshape(-1, module.head_v_dim)
    gated = module.norm(output, module.in_proj_z(states).reshape(-1, module.head_v_dim))
    return module.out_proj(gated.view(len(states), module.value_dim))


def share_short_conv(module: Any, states: Tensor, row: Ulysses) -> Tensor:
    """A gated short convolution of LFM2. Shapes as in `share_delta_net`."""
    library, ranks, rank = sys.modules[type(module).__module__], row.exchange.degree, row.exchange.rank
    weight = module.conv.weight.squeeze(1).unflatten(0, (ranks, -1))[rank]
    bias = None if module.conv.bias is None else module.conv.bias.unflatten(0, (ranks, -1))[rank]

    def compute(rows: Tensor) -> Tensor:
        return library.causal_conv1d_fn(rows.transpose(1, 2), weight, bias).transpose(1, 2)

    before, after, values = module.in_proj(states).chunk(3, dim=1)
    return module.out_proj(after * _exchanged([before * values], compute, row))


def _exchanged(columns: Sequence[Tensor], compute: Callable[[Tensor], Tensor], row: Ulysses) -> Tensor:
    """`compute` of each segment with this rank's part of each of the columns [own tokens, width]: [own tokens, width of
    all ranks' outputs]."""
    by_rank = [one.unflatten(1, (row.exchange.degree, -1)) for one in columns]
    rows = row.exchange.columns_to_rank(torch.cat(by_rank, dim=2))
    with drawing(None):  # nothing is drawn inside, and keys are those of this rank's tokens
        output = _run_each(compute, rows[None], row.plan)[0]
    return row.exchange.rows_to_rank(output).flatten(1)


# By class, what it does with a row that ranks share.
SHARED: dict[str, Callable[[Any, Tensor, Ulysses], Tensor]] = {
    "Qwen3_5GatedDeltaNet": share_delta_net,
    "Qwen3_5MoeGatedDeltaNet": share_delta_net,
    "Lfm2ShortConv": share_short_conv,
    "Lfm2MoeShortConv": share_short_conv,
}
