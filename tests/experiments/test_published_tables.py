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
            yield cells(row["score"], row["fitted"], row["held_out"], f"{row['median']:.1%}", f"{row['max']:.1%}", goal)
    of_cells = one("published", score="18 cells")
    yield f"over all 18 choices {of_cells['median_over_choices']:.1%}"
    yield f"medians {span(of_cells['medians_of_choices'])}, largest errors {span(of_cells['max_of_choices'])}"


def ray_cells() -> Lines:
    for row in rows("published", group="18 cells"):
        error = "-" if row["error"] is None else f"{row['error']:+.1%}"
        figures = [row[key] if isinstance(row[key], str) else f"{row[key]:.0f}" for key in ("published", "predicted")]
        batches = ["-" if row[key] is None else str(row[key]) for key in ("batch", "predicted_batch")]
        yield cells(row["row"], *figures, error, *batches, fixed(row["free_gib"], 1), row["role"].replace("_", " "))


def omnibal() -> Lines:
    for group in ("chain of rows", "ratios", "other models", "hardware"):
        for row in rows("published", group=group):
            figures = [f"{row[key]:.3g}" for key in ("published", "predicted")]
            yield cells(row["row"], *figures, f"{row['error']:+.1%}")


def longest() -> Lines:
    for row in rows("published", group="longest"):
        known = row.get("published_step_s")
        seconds = (fixed(row["step_s"], 1), "-" if known is None else f"{known:g}")
        sizes = (row["tokens_a_device"], fixed(row["memory_gib"], 1), fixed(row["free_gib"], 1))
        yield cells(row["row"], row["device"].upper(), *sizes, *seconds)


def span(shares: list[float]) -> str:
    return f"{shares[0]:.1%} to {shares[1]:.1%}"


TABLES: list[Callable[[], Lines]] = [scores, ray_cells, omnibal, longest]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_have_the_figures_of_the_rows(table: Callable[[], Lines]) -> None:
    lines = list(table())
    assert lines and missing((PAGE, line) for line in lines) == []
