"""The registry names every experiment, its arguments are accepted, and sentences come of the rows that are here."""

import json
import re

import pytest

from experiments.declared import FIGURES
from experiments.figures import Figure, column, ratio, sentence, shown, spread
from experiments.registry import BY_NAME, EXPERIMENTS, PICTURE, ROWS, Experiment
from tests.helpers.experiments import accepts, folders
from tests.helpers.figures import ROOT, rows


def test_every_folder_that_can_be_run_is_named_once() -> None:
    assert [one.name for one in EXPERIMENTS] == sorted(folders())
    assert set(FIGURES) == set(BY_NAME)


def test_every_line_of_the_index_is_an_experiment() -> None:
    index = (ROOT / "experiments" / "EXPERIMENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[(\w+)\]\(", index, re.MULTILINE)) == set(BY_NAME)


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_declared_arguments_are_accepted(one: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [*one.commands(False), *(one.commands(True) if one.quick is not None else [])]
    commands += [one.draws.split()] if one.draws else []
    assert len({tuple(command) for command in one.commands(False)}) == len(one.full)
    for command in commands:
        given = [word.replace(ROWS, "x.jsonl").replace(PICTURE, "x.png") for word in command]
        assert accepts(monkeypatch, one.name, given), given
    assert not accepts(monkeypatch, one.name, ["--no-such-argument", "1"])


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_rows_that_are_here_make_a_sentence_and_bars(name: str) -> None:
    found = rows(BY_NAME[name].result)
    words = sentence(FIGURES[name], found)
    assert words is not None and "{}" not in words and words.endswith(".")
    assert all(figure.words(found) for figure in FIGURES[name]), "a figure that full rows do not have"
    assert any(figure.bar(found) for figure in FIGURES[name])


def test_sentences_have_the_figures_of_the_documents() -> None:
    words = {name: sentence(FIGURES[name], rows(BY_NAME[name].result)) or "" for name in FIGURES}
    assert "TP takes 1.22 × (1.03 to 1.43 in 23 rows) SP+TP's step (published: 1.26 to 1.37 ×" in words["layouts"]
    assert "with links as slow as a GPU's 1.67 × (1.66 to 1.68 in 2 rows)" in words["layouts"]
    assert "109 of 110 faults end to the bit" in words["chaos"]
    assert "16 of 34 published figures agree" in words["partition"]
    assert "are 5.62% (2 to 12.2 in 12 rows) off" in words["published"]
    assert words["micro"].endswith("; nothing of it was published.")


def test_a_spread_is_the_median_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 2.0], " s") == "2 s (1 to 3 in 3 rows)"
    assert spread([1.234], " ×") == "1.23 × (one row)"
    assert [shown(value) for value in (-0.0, 2427.4, 0.0859)] == ["0", "2,427", "0.0859"]


def test_rows_without_a_figure_leave_it_out_and_without_any_there_is_no_sentence() -> None:
    figures = (Figure("a {}", "a", column("x", kind="p")), Figure("b {}", "b", column("y"), "", "7, a paper"))
    assert sentence(figures, [{"x": 1.0, "kind": "p"}, {"x": 9.0}]) == "a 1 × (one row)."
    assert sentence(figures, [{"y": 2, "x": None}]) == "b 2 (one row) (published: 7, a paper)."
    assert sentence(figures, [{"z": 1.0}, {"x": float("nan"), "kind": "p"}]) is None


def test_a_share_counts_and_a_negative_value_has_no_bar() -> None:
    shared = Figure("{} ended", "ended", column("x"), share=True)
    found = [{"x": 1.0}, {"x": 0.0}, {"x": 1.0}, {"x": 1.0}]
    bar = shared.bar(found)
    assert shared.words(found) == "3 of 4 ended" and bar is not None and bar.value == 75.0
    assert shared.bar([]) is None and Figure("{}", "x", column("x")).bar([{"x": -1.0}]) is None


def test_a_ratio_is_of_rows_of_the_same_run() -> None:
    of = ratio("s", {"layout": "a"}, {"layout": "b"}, ("run",))
    found = [
        {"layout": "a", "run": 1, "s": 2.0},
        {"layout": "b", "run": 1, "s": 4.0},
        {"layout": "a", "run": 2, "s": 9.0},
    ]
    assert of(found) == [0.5] and json.dumps(of([])) == "[]"
