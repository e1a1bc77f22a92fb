"""The table of EXPERIMENTS.md that is made of results/ is the one that its command makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.index import BEGIN, END, PAGE, indexed
from tests.helpers.figures import ROOT


def test_the_table_is_that_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == indexed(page, ROOT / "results"), "stale: run `dhp experiments index`"


def test_other_rows_make_it_stale(tmp_path: Path) -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    rows = [{"ratio": 2.0}, {"ratio": 3.0}, {"made_on": {"ratio": 9.0}}]
    (tmp_path / "compile.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "roofline.jsonl").write_text("{}\n")  # has no sentence yet
    words = "compiled layers make a step 2.5 × (2 to 3 in 2 rows) as fast; nothing of it was published."
    table = f"| experiment | what its rows say |\n|---|---|\n| compile | {words} |"
    assert indexed(page, tmp_path) == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_page_without_its_place_is_refused(page: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each on a line of its own"):
        indexed(page, tmp_path)
