"""What a run says of itself at its start: planned where that is quick and known, and never the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dhp.core.reports import DeviceInfo
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.plan.count.counted_model import Counted
from dhp.plan.run_plan import attempt, plan_run
from dhp.trainer import ready
from dhp.trainer.ready import expected, look_ahead
from tests.plan.cut.test_partition import config_of

GPU = DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", "GPU 1", "float32", memory_bytes=80 << 30)
CPU = DeviceInfo("cpu", "cpu", "CPUs of here", "float32")


def lengths(text: int = 200) -> np.ndarray:
    columns = np.zeros(16, LENGTH_COLUMNS)
    columns["text"], columns["vision"], columns["patches"] = text, 64, 256
    columns["squares"], columns["pictures"], columns["targets"] = 256**2, 1, 32
    return columns


def session_of(model: str, columns: np.ndarray) -> Any:
    plan = plan_run(config_of(model))
    data = SimpleNamespace(ask=lambda *_, **__: columns)
    return SimpleNamespace(plan=plan, config=plan.config, data=data, node_devices=2, threads=1)


def ahead_of(session: Any, devices: list[DeviceInfo]) -> tuple[Any, list[str]]:
    return expected(look_ahead(session, devices))


def test_a_run_on_known_gpus_is_planned(made_model: str) -> None:
    beside, (line,) = ahead_of(session_of(made_model, lengths()), [GPU, GPU])
    assert beside.planned.step_s and beside.planned.step_s > 0
    assert set(beside.planned.memory_bytes) == {"vision", "text"}
    assert line.startswith("planned ") and line.endswith("(rates by data sheets)")


def test_what_is_not_known_is_not_planned(made_model: str) -> None:
    beside, lines = ahead_of(session_of(made_model, lengths()), [CPU, CPU])  # nothing was measured here
    assert beside.planned.step_s is None and not lines
    beside, lines = ahead_of(session_of(made_model, lengths(0)), [GPU])
    assert beside.planned.step_s is None and lines == ["not planned: no sample's length is known"]


def test_a_model_whose_trace_takes_minutes_is_left_to_the_plan(made_model: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("dhp.plan.count.counted_model.AT_ONCE", 0)
    monkeypatch.setattr(Counted, "is_traced", lambda *_: False)
    monkeypatch.setattr(Counted, "keeps", lambda *_: pytest.fail("it was traced"))
    beside, (line,) = ahead_of(session_of(made_model, lengths()), [GPU])
    assert beside.planned.step_s is None and "python -m dhp plan" in line


def test_a_defect_of_the_forecast_does_not_end_a_run(made_model: str, monkeypatch: Any) -> None:
    def broken(asked: Any) -> Any:
        raise KeyError("layer")

    monkeypatch.setattr(ready, "forecast", broken)
    beside, lines = ahead_of(session_of(made_model, lengths()), [GPU])
    assert beside.planned.step_s is None and lines == ["not planned: KeyError: 'layer'"]
    assert attempt(lambda: 3) == 3
