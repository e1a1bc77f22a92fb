"""What a figure of an experiment is: a phrase with a number and its spread, made of rows, and what was published."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from dhp.report.charts import Bar

Row = dict[str, Any]
Values = Callable[[Sequence[Row]], list[float]]

ONCE = "one row"


@dataclass(frozen=True)
class Figure:
    """phrase: has `{}` in the place of the number; label: its name in a chart; values: what rows measured of it, none
    where they do not have it; unit: behind the number; published: the figure beside it, with its source; share: each
    value is 1 or 0, and the number is how many are 1."""

    phrase: str
    label: str
    values: Values
    unit: str = " ×"
    published: str = ""
    share: bool = False

    def words(self, rows: Sequence[Row]) -> str | None:
        """The phrase of these rows; None where they do not have it."""
        found = self.values(rows)
        if not found:
            return None
        beside = f" (published: {self.published})" if self.published else ""
        number = f"{sum(found):,.0f} of {len(found):,}" if self.share else spread(found, self.unit)
        return self.phrase.format(number) + beside

    def bar(self, rows: Sequence[Row]) -> Bar | None:
        """Its bar in a chart, in percent for a share; None where the rows do not have it, or where it is negative."""
        found = [100 * mean(values)] if self.share and (values := self.values(rows)) else self.values(rows)
        return Bar(median(found), min(found), max(found)) if found and min(found) >= 0 else None


def spread(values: Sequence[float], unit: str) -> str:
    """`1.28 × (1.03 to 1.43 in 12 rows)`: the median, the least and the most."""
    middle = f"{shown(median(values))}{unit}"
    if len(values) == 1:
        return f"{middle} ({ONCE})"
    return f"{middle} ({shown(min(values))} to {shown(max(values))} in {len(values)} rows)"


def shown(value: float) -> str:
    """A number of three digits; whole ones from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value + 0.0:.3g}"  # + 0.0: none is -0


def sentence(figures: Sequence[Figure], rows: Sequence[Row]) -> str | None:
    """All figures that the rows have; None where they have none."""
    known = [words for figure in figures if (words := figure.words(rows)) is not None]
    if not known:
        return None
    beside = any(figure.published for figure in figures)
    return "; ".join(known) + ("." if beside else "; nothing of it was published.")


def column(key: str, **wanted: Any) -> Values:
    """The numbers of a column, of rows that have these values."""

    def values(rows: Sequence[Row]) -> list[float]:
        found = [row.get(key) for row in rows if all(row.get(name) == value for name, value in wanted.items())]
        return [float(value) for value in found if isinstance(value, (int, float)) and math.isfinite(value)]

    return values


def percent(of: Values) -> Values:
    """Sizes of shares, in percent: of errors of either sign."""
    return lambda rows: [100 * abs(value) for value in of(rows)]


def ratio(key: str, above: Row, below: Row, group: Sequence[str]) -> Values:
    """The numbers of some rows over those of others, each pair of rows alike in the columns of `group`; of several that
    are, the last one counts."""

    def values(rows: Sequence[Row]) -> list[float]:
        sides: tuple[dict[tuple[Any, ...], float], ...] = ({}, {})
        for row in rows:
            for side, wanted in zip(sides, (above, below), strict=True):
                if key in row and all(row.get(name) == value for name, value in wanted.items()):
                    side[tuple(str(row.get(name)) for name in group)] = row[key]
        return [value / sides[1][of] for of, value in sides[0].items() if of in sides[1]]

    return values


ALIKE = ("command", "shape", "patches")
AIMED = ("shape", "colour", "place", "count")  # kinds of questions that the goal of sight is about


LARGE = "as 32B"  # a shape of `experiments.layouts`


def layouts(above: str, below: str, links: bool, large: bool = False) -> Values:
    """Steps of one layout over those of another in the same run, with the slow link or without. large: of the shape
    with a large model's proportions alone; else of all others."""
    of = ratio("step_s", {"layout": above}, {"layout": below}, ALIKE)
    wanted = (links, large)
    return lambda rows: of(
        [row for row in rows if ("--links" in row.get("command", ""), row.get("shape") == LARGE) == wanted]
    )


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
