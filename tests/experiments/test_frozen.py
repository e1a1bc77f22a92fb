"""A tower that is frozen, or whose projector alone is trained, keeps no more than that needs."""

from __future__ import annotations

import pytest

from experiments.frozen.__main__ import Left, bound_ratio, measure
from experiments.frozen.ways import BACKWARD, FORWARD, OPTIMIZER, Step


def test_what_is_not_trained_takes_no_bytes() -> None:
    rows = {row["train"]: row for row in measure(1, {"tower": 32, "decoder": 32, "layers": 2}, side=8)}
    assert list(rows) == ["all", "projector", "nothing"]
    # Of widths 4 × 32 and 32: the norm, two matrices and their biases, in float32.
    projector = 4 * (32 + 128 * 128 + 128 + 128 * 32 + 32)
    assert rows["projector"]["gradient_bytes"] == projector
    assert rows["projector"]["optimizer_bytes"] == 2 * projector
    assert rows["all"]["optimizer_bytes"] == 2 * rows["all"]["gradient_bytes"] > 2 * projector
    assert rows["nothing"]["optimizer_bytes"] == rows["nothing"]["gradient_bytes"] == 0
    assert rows["nothing"]["vision_backward_s"] == 0
    assert rows["all"]["step_ratio"] == rows["all"]["bound_ratio"] == 1


def test_the_bound_leaves_what_is_trained() -> None:
    full = Step(10.0, {FORWARD: 2.0, BACKWARD: 3.0, OPTIMIZER: 1.0}, 0.0)
    assert bound_ratio(full, Left(1.0, 1.0)) == 1
    assert bound_ratio(full, Left(0.0, 0.0)) == pytest.approx(0.6)
    assert bound_ratio(full, Left(0.5, 0.0)) == pytest.approx(0.75)
