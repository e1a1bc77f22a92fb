"""What rows of single experiments measured, where it takes more than a column: the numbers of their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.figures import Figure, Row, Values, column, ratio
from experiments.sight.scores import AIMED

ALIKE = ("command", "shape", "patches")


def layouts(above: str, below: str, links: bool) -> Values:
    """Steps of one layout over those of another in the same run, with the slow link or without."""
    of = ratio("step_s", {"layout": above}, {"layout": below}, ALIKE)
    return lambda rows: of([row for row in rows if ("--links" in row.get("command", "")) == links])


def differences(summary: str) -> Values:
    """Held-out losses below those of random batches, of each seed."""

    def values(rows: Sequence[Row]) -> list[float]:
        return [-value for row in rows if row.get("summary") == summary for value in row["differences"]]

    return values


def agreeing(rows: Sequence[Row]) -> list[float]:
    return [float(row["agrees"]) for row in rows if row.get("agrees") is not None]


def first_steps(rows: Sequence[Row]) -> list[float]:
    """Of kills at points alone, for faults from outside are noticed by other means; not of a busy machine."""
    idle = [row for row in rows if "point" in row and row.get("machine") != "busy"]
    return [row["first_step_s"] for row in idle if row.get("first_step_s") is not None]


def sparse(rows: Sequence[Row]) -> list[float]:
    """Sparse routes over dense ones, at the most ranks that were tried."""
    most = max((row["ranks"] for row in rows if "ranks" in row), default=0)
    of = ratio("step_s", {"routes": "sparse"}, {"routes": "dense"}, ("command", "version"))
    return of([row for row in rows if row.get("ranks") == most])


def fitting(rows: Sequence[Row]) -> list[float]:
    return [float(row["fits"]) for row in rows if "fits" in row]


def intact(rows: Sequence[Row]) -> list[float]:
    struck = [row for row in rows if "identical" in row and "wall_s" in row]
    return [float(row["completed"] and row["identical"]) for row in struck]


def seen(which: str) -> Values:
    """The least share of exact answers of a seed's kinds with right pictures, and the most with exchanged ones above
    chance."""

    def values(rows: Sequence[Row]) -> list[float]:
        own = [row for row in rows if row.get("what") == "scratch"]
        if which == "right":
            return [row["right"][kind] for row in own for kind in AIMED]
        return [100 * (row["exchanged"][kind] - row["chance"][kind]) for row in own for kind in AIMED]

    return values


def same(rows: Sequence[Row]) -> list[float]:
    exported = [row for row in rows if row.get("what") == "exported"]
    return [float(number < row["same"]) for row in exported for number in range(row["asked"])]


def right_kernels(rows: Sequence[Row]) -> list[float]:
    return [float(row["ok"]) for row in rows if row.get("section") == "kernels" and "ok" in row]


def longest(layout: str) -> Values:
    return column("ratio_to_one_rank", layout=layout, ranks=4, counted="device", recompute="none")


def answers(rows: Sequence[Row]) -> list[float]:
    own = [row for row in rows if row.get("question") == "inference" and row["ranks"] == 2]
    return [row["first_token_speed_to_plain"] for row in own if row["way"].startswith("dhp")]


def uneven(way: str, *published: str) -> Iterator[Figure]:
    """Deviations of forward times over their means."""
    for row, beside in zip(("between stages", "over time"), published or ("", ""), strict=True):
        words = f"with {way} forward times deviate by {{}} of their mean {row}"
        yield Figure(words, f"{row}, {way}", column("forward_ms_spread", row=row, way=way), "", beside)


def held_out(way: str) -> Values:
    return lambda rows: [row["loss"]["long"] for row in rows if row.get("way") == way]
