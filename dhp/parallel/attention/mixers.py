"""Layers that carry state along a row (mixers): each sample by itself, also where ranks share the row.

There ranks exchange tokens for channels, as Ulysses does for attention: a rank computes the convolution and the state
of its own heads over the whole row, with the library's functions, and hands the outputs back. More ranks than heads
pass the state along their pieces of the row (`dhp.parallel.attention.state_ring`). All other work of the layer is done
where its tokens are. Tensor ranks, which all have the row's states, take a part of its tokens each, do
the same, and gather what comes of them. Names of transformers' own stand here alone; a test holds them against it."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.core.draws import TokenKeys, current_keys, drawing
from dhp.core.errors import ModelError
from dhp.core.wrapping import wrap_forward
from dhp.parallel.attention.row_decode import NewToken, ShardedKVCache
from dhp.parallel.attention.segment_plan import SegmentPlan, Ulysses
from dhp.parallel.attention.state_ring import LATER, WHOLE, StateRing
from dhp.parallel.attention.ulysses import UlyssesGroup
from dhp.parallel.comm import gather_alike
from dhp.parallel.tensor.sequence_norms import TensorRanks, gather, scatter
from dhp.parallel.tensor.styles import PARTIAL_OVER

CHUNK = 64  # tokens that the library's recurrences take at once
_CACHES = ("cache", "cache_params", "past_key_values", "past_key_value")  # the latter: of models' own code


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
    forward, kind = module.forward, SHARED.get(type(module).__name__)

    @wraps(forward)
    def run(hidden_states: Tensor, *args: Any, segments: SegmentPlan | NewToken | None = None, **named: Any) -> Any:
        cache = next((named.pop(one) for one in _CACHES if isinstance(named.get(one), ShardedKVCache)), None)
        _check(name, args, segments, named)
        if isinstance(segments, NewToken):
            assert cache is not None and kind is not None and segments.row is not None
            return _run_new(kind(module, segments.row), segments.row, hidden_states, cache.states, name)
        assert segments is not None
        if segments.row is not None and kind is not None:
            states = hidden_states.flatten(0, 1) if ranks is None else scatter(hidden_states, ranks, False)[0]
            layer = kind(module, segments.row.exchange)
            with drawing(_own_keys(hidden_states, ranks)):
                output, state = _run_shared(layer, segments.row, states, keep=cache is not None)
            if cache is not None:
                cache.states[name] = state
            if ranks is None:
                return output.view_as(hidden_states)
            return gather(output[None], hidden_states.shape[:-1], ranks, False)
        return _run_each(partial(forward, **named), hidden_states, segments)

    return run


def _own_keys(hidden_states: Tensor, ranks: TensorRanks | None) -> TokenKeys | None:
    """Of the tokens that this rank takes."""
    keys = current_keys()
    if keys is None or ranks is None:
        return keys
    tokens = torch.arange(hidden_states.shape[:-1].numel(), device=keys.keys.device)
    return keys.chosen(ranks.own(tokens[:, None])[:, 0])


def run_each(
    forward: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    hidden_states: Tensor,
    segments: SegmentPlan,
    beside: Mapping[str, Tensor],
    along: Mapping[str, int],
) -> Tensor:
    """Segments of hidden_states [rows, tokens, width], those of one length together, each call by itself, as often as
    the plan says at least. beside: more of each token, cut as the states are; along: at which of their dimensions the
    rows are."""
    rows, tokens = hidden_states.shape[:2]
    if segments.groups == ((tokens, rows),) and segments.order is None:
        output = forward(hidden_states, beside)
    else:
        output = _run_groups(forward, hidden_states, segments, beside, along)
    keys = current_keys()
    for _ in range(segments.calls - len(segments.groups)):
        # Its backward runs too, so that other ranks' calls do not wait; it has no other effect.
        first = {name: one.narrow(along[name], 0, 1).narrow(along[name] + 1, 0, 1) for name, one in beside.items()}
        with drawing(keys and keys.split([1, len(keys.keys) - 1])[0]):
            output = output + forward(hidden_states[:1, :1], first).sum() * 0.0
    return output


def _run_groups(
    forward: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    hidden_states: Tensor,
    segments: SegmentPlan,
    beside: Mapping[str, Tensor],
    along: Mapping[str, int],
) -> Tensor:
    flat = _in_order(hidden_states, 0, segments)
    more = {name: _in_order(one, along[name], segments) for name, one in beside.items()}
    sizes, keys = [length * count for length, count in segments.groups], current_keys()
    of_parts = [None] * len(sizes) if keys is None else keys.chosen(segments.order).split(sizes)
    parts = {name: one.split(sizes, along[name]) for name, one in more.items()}
    outputs = []
    for at, ((length, count), part) in enumerate(zip(segments.groups, flat.split(sizes), strict=True)):
        cut = {name: cuts[at].unflatten(along[name], (count, length)) for name, cuts in parts.items()}
        with drawing(of_parts[at]):
            outputs.append(forward(part.unflatten(0, (count, length)), cut).flatten(0, 1))
    output = torch.cat(outputs)
    output = output if segments.inverse is None else output[segments.inverse]
    return output.unflatten(0, hidden_states.shape[:2])


def _in_order(tensor: Tensor, along: int, segments: SegmentPlan) -> Tensor:
    flat = tensor.flatten(along, along + 1)
    return flat if segments.order is None else flat[(slice(None),) * along + (segments.order,)]


def _run_each(forward: Callable[[Tensor], Tensor], hidden_states: Tensor, segments: SegmentPlan) -> Tensor:
    return run_each(lambda part, _: forward(part), hidden_states, segments, {}, {})


def _check(name: str, args: tuple[Any, ...], segments: SegmentPlan | NewToken | None, named: dict[str, Any]) -> None:
    """Raises ModelError for what would let state run on, or lose it."""
    if segments is None:
        problem = "it was called without `segments`: its layer keeps the keyword to itself"
    elif isinstance(segments, SegmentPlan) and segments.rest is not None and segments.row is None:
        problem = "its row is divided over ranks, and its state would have to travel"
    elif args or named.get("attention_mask") is not None:
        problem = f"it was called with {len(args)} more tensors and a mask, which are not cut into segments"
    elif any(named.get(cache) is not None for cache in _CACHES):
        problem = "it was called with a cache, which training has not"
    else:
        return
    raise ModelError(f"{name}: its state cannot be kept to one sample: {problem}. Use a model without such layers")


class State(NamedTuple):
    """What a layer carries on behind some tokens. tail: of a convolution, [segments, tokens, channels] before it;
    memory: of a recurrence, [segments, heads, key width, value width]."""

    tail: Tensor
    memory: Tensor | None = None


class SharedMixer(Protocol):
    """A layer of which this rank computes the heads that `exchange` gives it.

    convolved: how many of its columns, the first ones, a convolution takes. memory: heads, and widths of a key and of a
    value, of what a recurrence carries on; None: there is none."""

    convolved: int
    memory: tuple[int, int, int] | None

    def __init__(self, module: Any, exchange: UlyssesGroup):
        """module: whole on every rank."""

    def columns(self, states: Tensor) -> Sequence[Tensor]:
        """[tokens, width] → what is exchanged, all heads of each: [tokens, columns]."""

    def compute(self, rows: Tensor, held: State | None = None, keep: bool = False) -> tuple[Tensor, State | None]:
        """This rank's columns side by side [segments, tokens, columns] → its outputs, and where they are to be kept
        the states behind them. held: those before them; a memory wider than values is of values that zeros widen."""

    def leave(self, output: Tensor, states: Tensor) -> Tensor:
        """Outputs of all heads [tokens, columns] → those of the layer, [tokens, width]."""


class SharedDeltaNet(SharedMixer):
    """A gated delta net (Yang et al. 2025) of Qwen3.5."""

    def __init__(self, module: Any, exchange: UlyssesGroup):
        self._module, self._library = module, sys.modules[type(module).__module__]
        self._sizes = (module.key_dim, module.key_dim, module.value_dim)
        self._own = [size // exchange.degree for size in self._sizes]
        self._heads = module.num_v_heads // exchange.degree
        self._weight = torch.cat([_part(one, exchange) for one in module.conv1d.weight.squeeze(1).split(self._sizes)])
        self._decay, self._bias = _part(module.A_log, exchange), _part(module.dt_bias, exchange)
        self.convolved, self.memory = sum(self._own), (self._heads, module.head_k_dim, module.head_v_dim)

    def columns(self, states: Tensor) -> Sequence[Tensor]:
        of_heads = self._module.in_proj_qkv(states).split(self._sizes, dim=1)
        return *of_heads, self._module.in_proj_b(states), self._module.in_proj_a(states)

    def compute(self, rows: Tensor, held: State | None = None, keep: bool = False) -> tuple[Tensor, State | None]:
        module, library = self._module, self._library
        mixed, b, a = rows.split((sum(self._own), self._heads, self._heads), dim=2)
        mixed, tail = _convolved(library, mixed, self._weight, None, held, module.activation)
        query, key, value = mixed.split(self._own, dim=2)
        query, key = (one.unflatten(2, (-1, module.head_k_dim)) for one in (query, key))
        gates = {"beta": b.sigmoid(), "g": -self._decay.float().exp() * F.softplus(a.float() + self._bias)}
        one_by_one, before = held is not None and rows.shape[1] == 1, None if held is None else held.memory
        rule = library.torch_recurrent_gated_delta_rule if one_by_one else library.torch_chunk_gated_delta_rule
        value = value.unflatten(2, (-1, module.head_v_dim))
        value = value if before is None else F.pad(value, (0, before.shape[3] - module.head_v_dim))
        output, memory = rule(
            query, key, value, **gates, use_qk_l2norm_in_kernel=True, initial_state=before, output_final_state=keep
        )
        return output.flatten(2), State(tail, memory) if keep else None

    def leave(self, output: Tensor, states: Tensor) -> Tensor:
        module, width = self._module, self._module.head_v_dim
        gated = module.norm(output.reshape(-1, width), module.in_proj_z(states).reshape(-1, width))
        return module.out_proj(gated.view(len(states), module.value_dim))


class SharedShortConv(SharedMixer):
    """A gated short convolution of LFM2."""

    def __init__(self, module: Any, exchange: UlyssesGroup):
        self._module, self._library = module, sys.modules[type(module).__module__]
        self._weight = _part(module.conv.weight.squeeze(1), exchange)
        self._bias = None if module.conv.bias is None else _part(module.conv.bias, exchange)
        self.convolved, self.memory = len(self._weight), None

    def columns(self, states: Tensor) -> Sequence[Tensor]:
        before, self._after, values = self._module.in_proj(states).chunk(3, dim=1)
        return [before * values]

    def compute(self, rows: Tensor, held: State | None = None, keep: bool = False) -> tuple[Tensor, State | None]:
        output, tail = _convolved(self._library, rows, self._weight, self._bias, held)
        return output, State(tail) if keep else None

    def leave(self, output: Tensor, states: Tensor) -> Tensor:
        return self._module.out_proj(self._after * output)


def _part(parameter: Tensor, exchange: UlyssesGroup) -> Tensor:
    """This rank's of equal parts."""
    return parameter.unflatten(0, (exchange.degree, -1))[exchange.rank]


def _convolved(
    library: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, held: State | None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """[segments, tokens, channels] behind the convolution, and what of them later tokens see. Zeros stand before a
    segment."""
    tokens, sees = rows.shape[1], weight.shape[1] - 1
    rows = rows if held is None else torch.cat([held.tail, rows], dim=1)
    output = library.causal_conv1d_fn(rows.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)
    return output[:, -tokens:], F.pad(rows, (0, 0, sees, 0))[:, -sees:]


def _run_shared(layer: SharedMixer, row: Ulysses, states: Tensor, keep: bool) -> tuple[Tensor, State | None]:
    """[own tokens, width] → as many, and the state behind the first segment where it is to be kept."""
    columns, exchange = layer.columns(states), row.exchange
    if exchange.degree == 1:
        rows = torch.cat(list(columns), dim=1)
    else:
        rows = exchange.columns_to_rank(torch.cat([one.unflatten(1, (exchange.degree, -1)) for one in columns], dim=2))
    with drawing(None):  # nothing is drawn inside, and keys are those of this rank's tokens
        output, state = (_run_pieces if row.passing else _run_segments)(layer, row, rows, keep)
    output = output if exchange.degree == 1 else exchange.rows_to_rank(output).flatten(1)
    return layer.leave(output, states), state


def _run_segments(layer: SharedMixer, row: Ulysses, rows: Tensor, keep: bool) -> tuple[Tensor, State | None]:
    found: list[State | None] = []

    def compute(rows: Tensor) -> Tensor:
        output, state = layer.compute(rows, keep=keep)
        found.append(state)
        return output

    output = _run_each(compute, rows[None], row.plan)[0]
    return output, None if found[0] is None else State(*(None if one is None else one[:1] for one in found[0]))


def _run_pieces(layer: SharedMixer, row: Ulysses, rows: Tensor, keep: bool) -> tuple[Tensor, State | None]:
    """The same of a row along whose pieces state is passed on (`dhp.parallel.attention.state_ring`)."""
    ring, plan = row.passing, row.plan
    assert ring is not None and plan.order is not None and plan.inverse is not None
    source, outputs, states = ring.with_borders(rows), list[Tensor](), list[State]()
    borders = [0 if kind == WHOLE else ring.border for kind in ring.kinds]
    parts = source[plan.order].split([(length + more) * count for (length, count), more in zip(plan.groups, borders)])
    for (length, count), kind, border, part in zip(plan.groups, ring.kinds, borders, parts):
        before, inputs = part.view(count, border + length, -1).split([border, length], dim=1)
        held = None if kind == WHOLE else State(before[..., : layer.convolved], _identity(layer, kind, before))
        output, state = layer.compute(inputs, held, keep=True)
        assert state is not None
        outputs.append(output)
        states.append(state)
    if layer.memory is None:
        outputs.append(source[None, :0])
    else:
        outputs.append(_add_states_before(layer.memory, ring, source, outputs, states))
    output = torch.cat([one.flatten(0, 1) for one in outputs])[plan.inverse]
    return output, _state_behind(layer, ring, states, source) if keep else None


def _identity(layer: SharedMixer, kind: int, before: Tensor) -> Tensor | None:
    """A memory of zeros, and beside it the identity: what becomes of it tells what the rule does to any memory."""
    if kind != LATER or layer.memory is None:
        return None
    heads, keys, values = layer.memory
    identity = torch.eye(keys, dtype=_exact(before), device=before.device)
    return F.pad(identity, (values, 0)).expand(len(before), heads, -1, -1)


def _add_states_before(
    sizes: tuple[int, int, int], ring: StateRing, source: Tensor, outputs: list[Tensor], states: list[State]
) -> Tensor:
    """Make outputs and memories of all pieces, in place of the list, those with the state before each; returns outputs
    of no tokens, through which gradients of all ranks find the exchange."""
    heads, keys, values = sizes
    divided = [call for call, kind in enumerate(ring.kinds) if kind != WHOLE]
    effects = [states[call].memory for call in divided]
    wide = [F.pad(one, (0, values + keys - one.shape[3])).to(_exact(source)) for one in effects if one is not None]
    nothing = source[:0, :1, None, None].expand(0, heads, keys, values + keys).to(_exact(source))
    before = ring.states_before(torch.cat([*wide, nothing]), values)
    for call, part in zip(divided, before.split([len(one) for one in wide])):
        if ring.kinds[call] == LATER:
            output, factors = outputs[call].unflatten(2, (heads, -1)).split([values, keys], dim=3)
            more = torch.einsum("nthk,nhkv->nthv", factors.to(part.dtype), part)
            outputs[call] = (output + more).to(output.dtype).flatten(2)
            added, matrices = wide[divided.index(call)].split([values, keys], dim=3)
            states[call] = states[call]._replace(memory=added + matrices @ part)
    return before[None, :0, :, 0].flatten(2).to(source.dtype)


def _exact(states: Tensor) -> torch.dtype:
    """In which states are passed on."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def _state_behind(layer: SharedMixer, ring: StateRing, states: Sequence[State], source: Tensor) -> State:
    """Behind the first segment, on every rank."""
    rank, call, place = ring.last
    here, at = ring.rank == rank, slice(place, place + 1)
    tail = states[call].tail[at] if here else source.new_zeros(1, ring.border, layer.convolved)
    tail = gather_alike(tail, ring.group)[rank]
    if layer.memory is None:
        return State(tail)
    memory = states[call].memory if here else source.new_zeros(1, *layer.memory, dtype=_exact(source))
    assert memory is not None
    return State(tail, gather_alike((memory[at] if here else memory).to(_exact(source)), ring.group)[rank])


def _run_new(
    layer: SharedMixer, exchange: UlyssesGroup, hidden_states: Tensor, states: dict[str, Any], name: str
) -> Tensor:
    """Of the one new token of a row, [1, 1, width], which all ranks have. states: by layer, behind the tokens before
    it; changed here."""
    token = hidden_states[0]
    own = torch.cat([_part(one[0], exchange) for one in layer.columns(token)])
    output, states[name] = layer.compute(own[None, None], states.get(name), keep=True)
    every = output[0] if exchange.degree == 1 else gather_alike(output[0], exchange.group)[:, 0].reshape(1, -1)
    return layer.leave(every, token)[None]


# By class, what it does with a row that ranks compute together.
SHARED: dict[str, type[SharedMixer]] = {
    "Qwen3_5GatedDeltaNet": SharedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": SharedDeltaNet,
    "Lfm2ShortConv": SharedShortConv,
    "Lfm2MoeShortConv": SharedShortConv,
}
