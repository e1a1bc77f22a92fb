"""The tables of experiments/published/README.md have the figures of the rows in results/published.jsonl."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.figures import cells, fixed, missing, one, rows

PAGE = "experiments/published/README.md"
Lines = Iterator[str]


def scores() -> Lines:
    for row in rows("published"):
        if "score" in row:
            goal = "-" if row["goal"] is None else f"{row['goal']['median']:.0%}, {row['goal']['max']:.0%}"
            counts = (row["fitted"], row["chosen"], row["held_out"])
            yield cells(row["score"], *counts, f"{row['median']:.1%}", f"{row['max']:.1%}", goal)
    of_cells = one("published", score="18 cells")
    yield f"over all 18 choices {of_cells['median_over_choices']:.1%}"
    yield f"medians {span(of_cells['medians_of_choices'])}, largest errors {span(of_cells['max_of_choices'])}"


def ray_cells() -> Lines:
    for row in rows("published", group="18 cells"):
        error = "-" if row["error"] is None else f"{row['error']:+.1%}"
        figures = [row[key] if isinstance(row[key], str) else f"{row[key]:.0f}" for key in ("published", "predicted")]
        batches = ["-" if row[key] is None else str(row[key]) for key in ("batch", "predicted_batch")]
        yield cells(row["row"], *figures, error, *batches, fixed(row["free_gib"], 1), row["role"].replace("_", " "))


def errors() -> Lines:
    for group in ("chain of rows", "ratios", "days of ratios", "ZeRO-3", "other models", "hardware", "points"):
        for row in rows("published", group=group):
            figures = [f"{row[key]:.3g}" for key in ("published", "predicted")]
            yield cells(row["row"], *figures, f"{row['error']:+.1%}")


def rings() -> Lines:
    hops = {
        tuple({f"{row['hop_gb_s']:.1f}" for row in rows("published", group=group) if devices in row["row"]})
        for group, devices in (("Megatron CP", "Megatron"), ("ring", "32 devices"), ("ring", "64 devices"))
    }
    assert hops == {("12.9",), ("8.7",), ("4.4",)}
    yield "Megatron's reach 12.9 GB/s of the 45 that a card is taken to give"
    yield "LongVILA's own 8.7 on 32 devices and 4.4 on 64"


def longest() -> Lines:
    for row in rows("published", group="longest"):
        known = row.get("published_step_s")
        seconds = (fixed(row["step_s"], 1), "-" if known is None else f"{known:g}")
        sizes = (row["tokens_a_device"], fixed(row["memory_gib"], 1), fixed(row["free_gib"], 1))
        yield cells(row["row"], row["device"].upper(), *sizes, row["published"], row["predicted"], *seconds)


def span(shares: list[float]) -> str:
    return f"{shares[0]:.1%} to {shares[1]:.1%}"


TABLES: list[Callable[[], Lines]] = [scores, ray_cells, rings, errors, longest]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_have_the_figures_of_the_rows(table: Callable[[], Lines]) -> None:
    lines = list(table())
    assert lines and missing((PAGE, line) for line in lines) == []
