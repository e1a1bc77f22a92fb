"""What is live at each operation of a trace, layer by layer, beyond what layers keep: their insides come and go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dhp.core.reports import StageUsage
from dhp.parallel.recompute.live_storages import LiveStorages
from dhp.parallel.recompute.meter import ActivationMeter

Pass = Literal["forward", "backward", "growing"]
FORWARD: Pass = "forward"
BACKWARD: Pass = "backward"
GROWING: Pass = "growing"  # backward, where gradients of parameters stay
BEFORE = -1  # the place of what precedes the layers; what follows them has their number
Moments = Mapping[tuple[Pass, int], tuple[int, ...]]


@dataclass(frozen=True)
class Traced:
    """A trace. usage: what is kept. moments: by pass and layer, bytes that are live behind each operation: forward,
    beyond what was kept up to the layer; backward, beyond what the layers up to it, and itself, keep. Gradients of
    parameters count in the operation that makes them, and not in those behind it; growing: the layer's own count in all
    behind it."""

    usage: StageUsage
    moments: Moments


class MomentsOfTrace(LiveStorages):
    """Records a trace. To be entered around it, with the model's layers."""

    of_meta = True

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], meter: ActivationMeter):
        super().__init__(shares=False)
        self._meter = meter
        self._saved: dict[int, int] = defaultdict(int)  # the most that was kept in each layer's backward
        self._count = len(layers)
        self._now: tuple[Pass, int] = (FORWARD, BEFORE)
        self._found: dict[tuple[Pass, int], list[int]] = defaultdict(list)
        self._gradients = self._earlier = 0  # bytes of gradients, and of those, what came before this layer's
        for tensor in (*model.parameters(), *model.buffers()):
            self.leave_out(tensor)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize > 2:  # others are dropped at once
                parameter.register_post_accumulate_grad_hook(self._take)
        for at, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entering(at), with_kwargs=True)
            layer.register_forward_hook(self._leaving(at))

    def after_operation(self) -> None:
        own, at = self._now
        self._found[own, at].append(self.bytes - self._gradients)
        if own == BACKWARD:
            self._found[GROWING, at].append(self.bytes - self._earlier)
            self._saved[at] = max(self._saved[at], self._meter.now())

    def taken(self, usage: StageUsage, replays_parts: bool) -> Traced:
        """What was recorded. usage: of the same trace. replays_parts: backward runs parts of layers again, of which the
        meter does not know where they begin."""
        kept = usage.before_bytes
        before = {BEFORE: 0.0}
        for at, layer in enumerate(usage.layers):
            before[at] = kept
            kept += layer.held_bytes
        before[self._count] = kept
        behind = {at: before[at + 1] for at in range(BEFORE, self._count)} | {self._count: kept + usage.after_bytes}
        kept_by = {FORWARD: before, BACKWARD: behind, GROWING: behind}
        if replays_parts:
            again = (max(0, self._saved[at] - int(behind[at])) for at in range(self._count))
            layers = (
                replace(layer, replay_bytes=max(layer.replay_bytes, more)) for layer, more in zip(usage.layers, again)
            )
            usage = replace(usage, layers=tuple(layers))
        moments = {
            (own, at): tuple(int(n - kept_by[own][at]) for n in found) for (own, at), found in self._found.items()
        }
        return Traced(usage, moments)

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients += parameter.grad.nbytes

    def _entering(self, at: int) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._now = FORWARD, at
            if at == 0:
                _behind(args, kwargs, self._turning(BEFORE))

        return enter

    def _leaving(self, at: int) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            _behind(output, {}, self._turning(at))
            if at == self._count - 1:
                self._now = FORWARD, self._count

        return leave

    def _turning(self, at: int) -> Any:
        def turn(gradient: Tensor) -> None:
            self._now, self._earlier = (BACKWARD, at), self._gradients

        return turn

    def begin_backward(self) -> None:
        """What follows the layers comes first."""
        self._now = BACKWARD, self._count


def _behind(args: Any, kwargs: Any, hook: Any) -> None:
    """Call the hook when the gradient of the first tensor of these that has one is there."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
            return
