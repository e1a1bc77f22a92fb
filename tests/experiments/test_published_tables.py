"""The tables of experiments/published/README.md have the figures of the rows in results/published.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.figures import Row, cells, fixed, missing, one, rows

PAGE = "experiments/published/README.md"
SAME = "published degrees"
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


def planned() -> Lines:
    for state_bytes in (16, 10):
        for row in plans("planned", state_bytes):
            figures = [f"{row[key]:.0f}" for key in ("published", "simulated", "predicted")]
            ratios = [fixed(row[key]) for key in ("ratio", "ratio_simulated")]
            others = [reached(of_length(f"planned, {name}", row)) for name in ("other cells", "eager", "slower")]
            yield cells(row["patches"], row["beside"], *figures, *ratios, *others, fixed(row["memory_gib"], 1))


def layouts() -> Lines:
    for state_bytes in (16, 10):
        for row in plans("planned", state_bytes):
            divided = f"{row['micro_batches']} × {row['micro_batch_size']}"
            again = [counted(row["recomputed"][part]) for part in ("text", "vision")]
            yield cells(row["patches"], str(state_bytes), divided, row["text"], row["vision"], *again)


def gains() -> Lines:
    for state_bytes in (16, 10):
        for row in plans("planned", state_bytes):
            names = (f"{SAME}, all recomputed", SAME, f"{SAME}, norms divided", "planned", "planned, larger batch")
            yield cells(row["patches"], str(state_bytes), *(reached(of_length(name, row)) for name in names))


def plans(search: str, state_bytes: int) -> list[Row]:
    return rows("published", search=search, state_bytes=state_bytes)


def of_length(search: str, row: Row) -> Row | None:
    found = [own for own in plans(search, row["state_bytes"]) if own["patches"] == row["patches"]]
    return found[0] if found else None


def reached(row: Row | None) -> str:
    """Beside the best published figure; in brackets: it does not fit."""
    if row is None:
        return "-"
    return fixed(row["ratio"]) if row["fits"] else f"({fixed(row['ratio'])})"


def counted(choices: dict[str, int]) -> str:
    return ", ".join(f"{count} {choice}" for choice, count in choices.items())


def span(shares: list[float]) -> str:
    return f"{shares[0]:.1%} to {shares[1]:.1%}"


TABLES: list[Callable[[], Lines]] = [scores, ray_cells, omnibal, longest, planned, layouts, gains]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_have_the_figures_of_the_rows(table: Callable[[], Lines]) -> None:
    lines = list(table())
    assert lines and missing((PAGE, line) for line in lines) == []
