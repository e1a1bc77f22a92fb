"""A stage's forward passes while it measures what its layers keep, and what it does where one runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from dhp.core.collectives import RECORD
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.parallel.recompute.layers import RecomputedLayers
from dhp.parallel.recompute.meter import ActivationMeter

Output = TypeVar("Output")


class Measuring:
    """Measured passes of one rank. short: whether a pass since the last `take` ran out of memory and was made again."""

    def __init__(self, layers: RecomputedLayers, meter: ActivationMeter, device: torch.device):
        self._layers, self._meter, self._device = layers, meter, device
        self._planned = False  # whether a plan says what is recomputed, and not the user
        self._alone: bool | None = None  # whether passes begin no collective, as far as was seen
        self.short = False

    def choose(self, choices: RecomputePolicies) -> None:
        """A plan's: what each layer recomputes from the next forward on."""
        self._layers.choose(choices)
        self._planned = True

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Output]) -> Output:
        """The result of `compute`, a micro-batch of `rows` patches or tokens.

        Where it runs out of memory under a plan that keeps anything, every layer is recomputed from here on, and the
        pass is made again. But only in a stage whose passes begin no collective: in
        others, ranks may wait inside one already, and would wait in backward for those of layers that are not run
        again. There the error goes on, as it does where everything was recomputed already.
        """
        if not torch.is_grad_enabled():
            return compute()
        last_call = RECORD.last
        try:
            return self._measured(rows, micro_batch, compute)
        except torch.OutOfMemoryError:
            if not (self._alone and RECORD.last is last_call and self._planned and self._keeps_any()):
                raise
        # Behind the handler: its traceback holds what the failed pass had computed.
        self.short = True
        self._recompute_everything()
        return self._measured(rows, micro_batch, compute)

    def _measured(self, rows: int, micro_batch: int, compute: Callable[[], Output]) -> Output:
        last_call = RECORD.last
        with self._meter.forward(rows, micro_batch):
            output = compute()
        self._alone = self._alone is not False and RECORD.last is last_call
        return output

    def take(self, gradient_bytes: int) -> tuple[StageUsage | None, bool]:
        """The step's usage, and `short`; None where no layer or no micro-batch was measured as a whole."""
        usage, short = self._meter.take(self._layers.choices, gradient_bytes), self.short
        self.short = False
        return (None if short else usage), short

    def _keeps_any(self) -> bool:
        return bool(set(self._layers.choices) - {"all", "offload"})

    def _recompute_everything(self) -> None:
        self._layers.choose(("all",) * len(self._layers.choices))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
