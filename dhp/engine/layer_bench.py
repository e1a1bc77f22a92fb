"""Layers of a part with memory and random weights, to be run by themselves: no other rank, no other layer.

The part's own code says on the meta device what its layers are called with; a layer runs on random values of those
shapes, with the attention and the kernels that a rank puts in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface

from dhp.engine.stopwatch import Spans, Stopwatch
from dhp.engine.traced import TraceSettings, empty_part, empty_run
from dhp.engine.traced_rows import TracedRows
from dhp.models.family import Family
from dhp.models.tower import Tower
from dhp.parallel.attention.choose import has_varlen
from dhp.parallel.attention.segment_plan import SegmentPlan, plan_segments
from dhp.parallel.attention.segments import packed_attention, segment_attention
from dhp.parallel.expert.modules import choose_product
from dhp.parallel.kernels.replace import replace_kernels

_FEWEST = 4  # tokens
_ATTENTION = "flash_dhp_measured"  # a tower calls what has "flash" in its name once a layer


@dataclass
class Call:
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
        self._open: Call | None = None  # of the layer that runs on the meta device now
        AttentionInterface.register(_ATTENTION, self._attention)
        self._part.use_attention(model, _ATTENTION)  # type: ignore[attr-defined]  # both kinds of part have it
        self._values = torch.Generator(self._device).manual_seed(0)
        self._calls: dict[TracedRows, dict[int, Call]] = {}

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

    def passes(self, at: int, layer: nn.Module, rows: TracedRows) -> Callable[[], Spans]:
        """A forward and backward of a layer that `fill` made."""
        args, named = self._made(self._called(at, rows).arguments)
        parameters = list(layer.parameters())
        return self._there_and_back(lambda: _first(layer(*args, **named)), tree_leaves((args, named)), parameters)

    def attends(self, at: int, rows: TracedRows) -> bool:
        """Whether the layer calls an attention of dhp's."""
        return bool(self._called(at, rows).attention)

    def attention(self, at: int, rows: TracedRows) -> Callable[[], Spans]:
        """A forward and backward of the layer's attention alone."""
        made = [(module, *self._made((args, named))) for module, args, named in self._called(at, rows).attention]

        def attend() -> Tensor:
            outputs = [_first(self._attend(module, *args, **named)) for module, args, named in made]
            return outputs[0] if len(outputs) == 1 else torch.cat([one.flatten() for one in outputs])

        return self._there_and_back(attend, tree_leaves([rest for _, *rest in made]), ())

    def operations(self, at: int, layer: nn.Module, rows: TracedRows) -> float:
        """Of a forward of the layer's linear modules."""
        return 2.0 * self._called(at, rows).rows() * sum(one.weight.numel() for one in _linear(layer))

    def matrices(self, at: int, layer: nn.Module, rows: TracedRows) -> Callable[[], Spans]:
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
    ) -> Callable[[], Spans]:
        gradients: list[Tensor] = []
        learned = [*parameters, *(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)]

        def run() -> Spans:
            for one in learned:
                one.grad = None  # as a rank adds each micro-batch's to its sums
            if not gradients:
                gradients.append(torch.full_like(forward(), 0.01))
            return self._watch.both(forward, lambda output: output.backward(gradients[0]))

        return run

    def _called(self, at: int, rows: TracedRows) -> Call:
        """What a layer is called with for these rows."""
        if rows not in self._calls:
            self._calls[rows] = self._record(rows)
        return self._calls[rows][at]

    def _record(self, rows: TracedRows) -> dict[int, Call]:
        calls: dict[int, Call] = {}

        def begin(at: int) -> Callable[..., None]:
            def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                calls[at] = self._open = Call((args, named))

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
        """The same with memory, and random values."""
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
