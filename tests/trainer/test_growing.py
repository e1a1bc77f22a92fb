"""A run in a smaller layout ends behind a checkpoint for a larger one; what fails in an evaluation names its step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dhp.core.errors import MoreDevices, PartFailed
from dhp.trainer import trainer as module
from dhp.trainer.trainer import Trainer


def trainer_of(there: int = 0) -> Any:
    """A trainer without a run, of a cluster with so many devices."""
    made: Any = Trainer.__new__(Trainer)
    made._may_grow, made.asked = True, 0

    def devices_there() -> int:
        made.asked += 1
        return there

    made.session = SimpleNamespace(devices_there=devices_there)
    return made


def test_it_grows_once_there_are_the_devices_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "larger_layouts", lambda: (8, 4))
    enough, few = trainer_of(4), trainer_of(3)
    with pytest.raises(MoreDevices) as caught:
        enough._grow()
    assert caught.value.there == 4
    few._grow()
    few._grow()  # no checkpoint since
    assert few.asked == 1


def test_a_run_in_its_own_layout_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "larger_layouts", lambda: ())
    own = trainer_of(100)
    own._grow()
    assert own.asked == 0


def test_a_fault_in_an_evaluation_names_the_step_that_it_follows() -> None:
    made = trainer_of()

    def fail(step: int) -> None:
        raise PartFailed(f"text rank 1 died, after {step}")

    made._saver = SimpleNamespace(finish=lambda: None, newest=None)
    made._evaluation = SimpleNamespace(run=fail)
    with pytest.raises(PartFailed) as caught:
        made._evaluate(4)
    assert caught.value.fault.step == 4 and str(caught.value).startswith("step 4: ")
