"""Steps with compiled layers and without take the same samples to the same losses."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from experiments.compile import __main__ as compiled
from tests.helpers.tiny_families import save_family


@pytest.mark.grid  # half a minute of a compiler
def test_a_line_tells_both_times_and_how_far_the_losses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "save_model", lambda name, folder: str(save_family(name, folder)))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # graphs without kernels: seconds
    monkeypatch.setattr(compiled, "WARM_UP", 1)
    row = compiled.measure("llava_clip", 1)
    assert row["ratio"] == pytest.approx(row["plain_step_s"] / row["compiled_step_s"], rel=0.2)
    assert row["warm_up_s"] > 0 and row["steps"] == 1
    assert row["deviation"] < 1e-5
