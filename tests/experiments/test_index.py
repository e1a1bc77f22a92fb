"""The table of EXPERIMENTS.md that is made of results/ is the one that its command makes."""

import json
from pathlib import Path

import pytest

from experiments.index import BEGIN, END, PAGE, indexed
from experiments.registry import BY_NAME, EXPERIMENTS
from tests.helpers.figures import ROOT


def test_the_table_is_that_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == indexed(page, ROOT / "results"), "stale: run `dhp experiments index`"


def test_other_rows_make_it_stale(tmp_path: Path) -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    rows = [{"mode": "speed", "plan": "auto, whole layers", "auto_vs_full": ratio} for ratio in (2.0, 3.0)]
    rows.append({"made_on": {"auto_vs_full": 9.0}})
    (tmp_path / "recompute.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "overhead.jsonl").write_text("{}\n")  # rows without any of its figures
    words = "whole layers alone 2.5 × (2 to 3 in 2 rows); nothing of it was published."
    made = indexed(page, tmp_path)
    assert made.startswith(f"before\n{BEGIN}\n| experiment | question |") and made.endswith(f" |\n{END}\nafter\n")
    lines = {line.split("]")[0].removeprefix("| ["): line for line in made.splitlines() if line.startswith("| [")}
    assert list(lines) == [one.name for one in EXPERIMENTS]
    assert lines["recompute"] == f"| [recompute](recompute/README.md) | {BY_NAME['recompute'].question} | {words} |"
    assert lines["overhead"].endswith("| no sentence yet. |")
    assert lines["chaos"].endswith("| no rows yet. |")


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_page_without_its_place_is_refused(page: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each on a line of its own"):
        indexed(page, tmp_path)
