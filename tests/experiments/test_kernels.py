"""Steps with dhp's kernels and with the library's own code take the same samples to the same losses."""

from __future__ import annotations

import pytest

from experiments.kernels import __main__ as kernels
from tests.helpers.tiny_families import save_family


def test_a_line_has_both_times_and_how_far_the_losses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "save_model", lambda name, folder: str(save_family(name, folder)))
    monkeypatch.setattr(kernels, "WARM_UP", 1)
    row = kernels.measure("qwen2_5_vl", 1)
    assert row["ratio"] == pytest.approx(row["plain_step_s"] / row["kernels_step_s"], rel=0.2)
    assert row["kernels"] == {"norm": "written", "rotary": "written", "gate": "plain"}
    assert row["deviation"] < 1e-5 and row["steps"] == 1
