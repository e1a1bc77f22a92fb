"""Measures seconds of single layers, with random weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from dhp.core.errors import DhpError, ModelError
from dhp.core.torch_private import tree_leaves, tree_map
from dhp.models.family import Family
from dhp.models.tower import Tower
from dhp.parallel.attention.attention_kernels import has_varlen
from dhp.parallel.attention.segment_plan import SegmentPlan, plan_segments
from dhp.parallel.attention.segments import packed_attention, segment_attention
from dhp.parallel.expert.expert_modules import choose_product
from dhp.parallel.kernels.replace import replace_kernels
from dhp.plan.bench.stopwatch import Stopwatch, TimedPasses
from dhp.plan.count.row_bytes import TracedRows
from dhp.plan.count.traced import TraceSettings, empty_part, empty_run

_FEWEST = 4  # tokens
_ATTENTION = "flash_dhp_measured"  # a tower calls what has "flash" in its name once a layer


@dataclass
class RecordedCall:
    """What a layer, and the attention in it, were called with, on the meta device."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    attention: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def rows(self) -> int:
        """Of the layer's states."""
        states = next(leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor))
        return states.shape[:-1].numel()


class Bench:
    """A part on the meta device, some of whose layers get memory and are run by themselves."""

    def __init__(self, source: str, family: Family, name: str, dtype: str, watch: Stopwatch):
        """Of the part `name` of the model of `source`, which computes in `dtype` on the device of `watch`."""
        self._family, self._name, self._watch = family, name, watch
        self._part, self._settings = family.parts[name], TraceSettings(dtype, 1, ())
        self._model = model = empty_part(source, family, name, self._settings)
        self._dtype, self._device = getattr(torch, dtype), watch.device
        self._attend = segment_attention if isinstance(self._part, Tower) else packed_attention
        self._open: RecordedCall | None = None  # of the layer that runs on the meta device now
        AttentionInterface.register(_ATTENTION, self._attention)
        self._part.use_attention(model, _ATTENTION)  # type: ignore[attr-defined]  # both kinds of part have it
        self._values = torch.Generator(self._device).manual_seed(0)
        self._calls: dict[TracedRows, dict[int, RecordedCall]] = {}

    def fill(self, at: int) -> nn.Module:
        """A copy of a layer with memory and random weights, and a rank's kernels."""
        layer = deepcopy(self._layer(at)).to_empty(device=self._device)
        for parameter in layer.parameters():
            spread = 0.02 if parameter.ndim > 1 else 0.0
            parameter.data.normal_(1.0 - bool(spread), spread or 0.01, generator=self._values)
        for buffer in layer.buffers():
            buffer.fill_(1)
        choose_product(layer, self._dtype)
        replace_kernels(layer, self._device, self._dtype, None)
        return layer.train()

    def fewest_rows(self) -> TracedRows:
        """Tokens, or patches that become one token."""
        tower = isinstance(self._part, Tower)
        return TracedRows(0, patches=self._family.tower.merge_unit) if tower else TracedRows(_FEWEST)

    def passes(self, at: int, layer: nn.Module, rows: TracedRows) -> Callable[[], TimedPasses]:
        """A forward and backward of a layer that `fill` made."""
        args, named = self._made(self._called(at, rows).arguments)
        parameters = list(layer.parameters())
        return self._there_and_back(lambda: _first(layer(*args, **named)), tree_leaves((args, named)), parameters)

    def attends(self, at: int, rows: TracedRows) -> bool:
        """Whether the layer calls an attention of dhp's."""
        return bool(self._called(at, rows).attention)

    def attention(self, at: int, rows: TracedRows) -> Callable[[], TimedPasses]:
        """A forward and backward of the layer's attention alone."""
        made = [(module, *self._made((args, named))) for module, args, named in self._called(at, rows).attention]

        def attend() -> Tensor:
            outputs = [_first(self._attend(module, *args, **named)) for module, args, named in made]
            return outputs[0] if len(outputs) == 1 else torch.cat([one.flatten() for one in outputs])

        return self._there_and_back(attend, tree_leaves([rest for _, *rest in made]), ())

    def operations(self, at: int, layer: nn.Module, rows: TracedRows) -> float:
        """Of a forward of the layer's linear modules."""
        return 2.0 * self._called(at, rows).rows() * sum(one.weight.numel() for one in _linear(layer))

    def matrices(self, at: int, layer: nn.Module, rows: TracedRows) -> Callable[[], TimedPasses]:
        """A forward and backward of the layer's linear modules alone."""
        count, linear = self._called(at, rows).rows(), _linear(layer)

        def states(width: int) -> Tensor:
            return torch.empty(count, width, dtype=self._dtype, device=self._device).normal_(generator=self._values)

        by_width = {width: states(width) for one in linear for width in (one.in_features, one.out_features)}
        pairs = [(by_width[one.in_features], one.weight.detach(), by_width[one.out_features]) for one in linear]

        def forward() -> None:
            for rows, weight, _ in pairs:
                nn.functional.linear(rows, weight)

        def backward() -> None:
            for rows, weight, gradient in pairs:
                gradient @ weight
                gradient.T @ rows

        return lambda: self._watch.both(forward, lambda _: backward())

    def _there_and_back(
        self, forward: Callable[[], Tensor], leaves: Sequence[Any], parameters: Sequence[nn.Parameter]
    ) -> Callable[[], TimedPasses]:
        gradients: list[Tensor] = []
        learned = [*parameters, *(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)]

        def run() -> TimedPasses:
            for one in learned:
                one.grad = None  # as a rank adds each micro-batch's to its sums
            if not gradients:
                gradients.append(torch.full_like(forward(), 0.01))
            return self._watch.both(forward, lambda output: output.backward(gradients[0]))

        return run

    def _called(self, at: int, rows: TracedRows) -> RecordedCall:
        """What a layer is called with for these rows."""
        if rows not in self._calls:
            self._calls[rows] = self._record(rows)
        return self._calls[rows][at]

    def _record(self, rows: TracedRows) -> dict[int, RecordedCall]:
        calls: dict[int, RecordedCall] = {}

        def begin(at: int) -> Callable[..., None]:
            def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                calls[at] = self._open = RecordedCall((args, named))

            return note

        layers = range(len(self._part.layers.kinds))
        hooks = [self._layer(at).register_forward_pre_hook(begin(at), with_kwargs=True) for at in layers]
        try:
            empty_run(self._model, self._family, self._name, rows, self._settings)()
        finally:
            self._open = None
            for hook in hooks:
                hook.remove()
        return calls

    def _attention(self, module: nn.Module, *args: Any, **named: Any) -> Any:
        """What the layers call: on the meta device it notes with what."""
        if self._open is not None:
            self._open.attention.append((module, args, named))
        return self._attend(module, *args, **named)

    def _layer(self, at: int) -> nn.Module:
        found: nn.Module = self._model.get_submodule(f"{self._part.layers.path}.{at}")
        return found

    def _made(self, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        args, named = tree_map(self._made_one, arguments)
        return args, named

    def _made_one(self, value: Any) -> Any:
        if isinstance(value, SegmentPlan):
            lengths = [length for length, count in value.groups for _ in range(count)]
            return plan_segments(lengths, self._device, value.causal, has_varlen(self._device, self._dtype))
        if not isinstance(value, Tensor):
            return value
        overlaps = any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))
        strides = torch.empty(value.shape, device="meta").stride() if overlaps else value.stride()
        made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=self._device)
        if not value.is_floating_point():
            return made.fill_(1) if value.dtype == torch.bool else made.zero_()
        return made.normal_(generator=self._values).requires_grad_(value.requires_grad)


def _linear(layer: nn.Module) -> list[nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, nn.Linear)]


def _first(output: Any) -> Tensor:
    tensor = output if isinstance(output, Tensor) else output[0]
    assert isinstance(tensor, Tensor)
    return tensor


_RUNS = 7  # of each layer that its runs, and those of its pieces, take as long as
_LEAST_LAUNCH_S = 1e-6
SHORTEST = 64  # tokens or patches of the first run, by whose seconds the others are chosen


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class LayerSeconds:
    """One layer, by its number in the part, with so many `rows` and all its weights trained.

    whole: of the layer. matrices: of its linear modules by themselves, and operations of their forward; None but of
    the first layer with the most rows. attention: of its attention by itself; None where the layer calls none of ours.
    launch_s: for which the host launches a forward."""

    layer: int
    kind: str
    rows: TracedRows
    whole: PassTimes
    matrices: tuple[float, PassTimes] | None
    attention: PassTimes | None
    launch_s: float


def measure_layers(
    source: str, family: Family, name: str, rows: Sequence[TracedRows], dtype: str, watch: Stopwatch, limit_s: float
) -> list[LayerSeconds]:
    """Of the part `name` of the model of `source`: the first layer of each kind, with each of `rows`. On a CPU with a
    share of each, where all of it would take longer than `limit_s`.

    dtype: in which the part computes. Raises ModelError where the part's code asks for more than shapes."""
    kinds = family.parts[name].layers.kinds
    try:
        with _alone():
            bench = Bench(source, family, name, dtype, watch)
            layers = {at: bench.fill(at) for at in map(kinds.index, dict.fromkeys(kinds))}
            chosen = rows if watch.device.type == "cuda" else _affordable(bench, layers, rows, limit_s)
            each_s, most = limit_s / (4 * len(chosen) * len(layers)), max(chosen, key=_count)
            measure = partial(_measure, bench, watch, each_s, kinds)
            return [
                measure(at, layer, own, own == most and at == min(layers))
                for own in chosen
                for at, layer in layers.items()
            ]
    except DhpError:
        raise
    except Exception as error:  # a family's own code may raise anything
        raise ModelError(
            f"the layers of the {name} part of {source} cannot be measured by themselves: their code asks for more "
            f"than shapes ({type(error).__name__}: {str(error)[:150]}). Plan with a known device's rates: device=NAME"
        ) from error


def _affordable(
    bench: Bench, layers: Mapping[int, nn.Module], rows: Sequence[TracedRows], limit_s: float
) -> list[TracedRows]:
    """`rows`, or the largest share of each whose layers and their pieces take no more than the limit."""
    small = _scaled(rows[0], SHORTEST / max(1, _count(rows[0])))
    for at, layer in layers.items():
        bench.passes(at, layer, small)()  # takes memory and wakes threads
    spans = [bench.passes(at, layer, small)() for at, layer in layers.items()]
    seconds = sum(one.forward + one.backward for one in spans) / _count(small)
    share = limit_s / (_RUNS * seconds * sum(map(_count, rows)))
    return list(dict.fromkeys(_scaled(own, share) for own in rows))


def _count(rows: TracedRows) -> int:
    return rows.patches or rows.tokens


def _scaled(rows: TracedRows, share: float) -> TracedRows:
    """A share of the rows; of a tower, in whole windows."""
    if not rows.patches:
        return replace(rows, tokens=max(1, round(rows.tokens * min(1.0, share))))
    windows = max(1, round(rows.windows * min(1.0, share)))
    return replace(rows, windows=windows, patches=rows.patches // rows.windows * windows)


def _measure(
    bench: Bench,
    watch: Stopwatch,
    limit_s: float,
    kinds: Sequence[str],
    at: int,
    layer: nn.Module,
    rows: TracedRows,
    with_matrices: bool,
) -> LayerSeconds:
    """All of a layer."""
    whole = watch.median(bench.passes(at, layer, rows), limit_s)
    matrices = attention = None
    if with_matrices and bench.operations(at, layer, rows):
        alone = watch.median(bench.matrices(at, layer, rows), limit_s)
        matrices = (bench.operations(at, layer, rows), PassTimes(alone.forward, alone.backward))
    if bench.attends(at, rows):
        alone = watch.median(bench.attention(at, rows), limit_s)
        attention = PassTimes(alone.forward, alone.backward)
    launch_s = whole.launch if watch.device.type == "cuda" else _launch(bench, watch, at, layer)
    return LayerSeconds(at, kinds[at], rows, PassTimes(whole.forward, whole.backward), matrices, attention, launch_s)


def _launch(bench: Bench, watch: Stopwatch, at: int, layer: nn.Module) -> float:
    """Of a forward on a CPU, which has no queue and launches a layer while it computes: what the fewest rows take
    beyond their products, which read all weights."""
    rows = bench.fewest_rows()
    whole, products = (watch.median(run(at, layer, rows), 0.0) for run in (bench.passes, bench.matrices))
    return max(whole.forward - products.forward, _LEAST_LAUNCH_S)


@contextmanager
def _alone() -> Iterator[None]:
    """In the block this process is all ranks of a group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
