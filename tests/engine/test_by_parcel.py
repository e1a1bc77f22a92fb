"""The parts of a layout hand over through shared memory, as actors do, down to the smallest tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dhp.cluster.transport import shared_memory
from dhp.cluster.worker import GIVEN, GroupSettings, Worker
from dhp.core.axes import Degrees
from dhp.engine.stage_settings import StageSettings
from tests.engine.test_parity import assert_exact
from tests.helpers.batches import mixed_step, step_with_one_window
from tests.helpers.layouts import Case, Fault, InspectedText, InspectedVision, compare
from tests.helpers.rows import slow

VERBS = ("forward_step", "backward_step", "grad_norm_sq", "optimizer_step")


class ByParcel:
    """A trainer whose verbs run in a worker, and whose tensors all travel as parcels."""

    trainer: type

    def __init__(self, settings: StageSettings):
        shared_memory.SMALLEST_BYTES = 1
        self._worker = Worker(GroupSettings(settings.spec.name, dist.get_world_size(), "gloo", 1, 60.0, None, True), 0)
        self._worker.build(self.trainer, (settings,))

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            return getattr(self._worker._trainer, name)
        return lambda *arguments: (self._worker.call(((name, (GIVEN,) * len(arguments)),), *arguments) or (None,))[1:]


class Vision(ByParcel):
    trainer = InspectedVision


class Text(ByParcel):
    trainer = InspectedText


CASES = [
    slow(Case(Degrees(), Degrees(data=2), micro_batches=4, schedule="vision_ahead")),
    Case(Degrees(data=2), Degrees(data=2), micro_batches=2, packing=True),
    Case(Degrees(data=2), Degrees(), micro_batches=4, packing=True, stages=2, schedule="1f1b"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_that_hand_over_in_shared_memory_equal_the_plain_model(case: Case, made_model: str) -> None:
    """Two steps of many tensors each: rows out of order, or memory that is written again too early, would show."""
    steps = [[*mixed_step(), *mixed_step()[::-1]], [*step_with_one_window(), *mixed_step()]]
    assert_exact(compare(made_model, case, steps, Fault(Vision, Text)))
