"""A picture of a plan: seconds of a step against memory, a point for each of the best layouts."""

from __future__ import annotations

from pathlib import Path

from dhp.cli.plan_outcome import Outcome
from dhp.config.devices import GIB
from dhp.observe.scatter import Point, draw_points


def draw_plan(outcome: Outcome, path: Path) -> None:
    """Write a PNG. Layouts within a forecast's error of the limit are grey."""
    points = [
        Point(one.found.peak.total / GIB, one.found.step_s, "1" if rank == 1 else "", outcome.sure(one))
        for rank, one in enumerate(outcome.found.candidates, 1)
    ]
    limit = outcome.machine.limit_bytes / GIB
    title = f"{outcome.asked.named} on {outcome.machine}".replace("×", "x")  # the font has no such sign
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_points(points, title, "GiB of the fullest device", "seconds of a step", (limit, "limit"), path)
