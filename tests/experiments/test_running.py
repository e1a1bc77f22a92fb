"""A run by `dhp experiments run`: its lines, where its rows go, when it is not judged. The experiment is a stand-in."""

import json
import re
from pathlib import Path

import pytest

from experiments import running
from experiments.__main__ import kept, main
from experiments.declared import FIGURES
from experiments.figures import Figure, column
from experiments.registry import BY_NAME, ROWS, Experiment

STAND_IN = """
import json, sys
from pathlib import Path
print("a line that is no row")
row = {"value": float(sys.argv[1])}
if "--out" in sys.argv:
    Path(sys.argv[-1]).write_text(json.dumps(row))
else:
    print(json.dumps(row))
sys.exit(int("--fail" in sys.argv))
"""
ONE = Experiment("stand_in", "What?", 1, ("2", "4"), "3", processes=1)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one experiment, on a machine of two cores without load."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(running, "ROOT", tmp_path)
    monkeypatch.setattr("experiments.__main__.ROOT", tmp_path)
    monkeypatch.setattr(running, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("experiments.__main__.RESULTS", tmp_path / "results")
    monkeypatch.setattr(running, "count_cores", lambda: 2)
    loads(monkeypatch, 0.5)
    monkeypatch.setitem(FIGURES, "stand_in", (Figure("it takes {}", "it", column("value"), " s", "5 s, a paper"),))
    monkeypatch.setitem(BY_NAME, "stand_in", ONE)
    return tmp_path


def loads(monkeypatch: pytest.MonkeyPatch, *given: float) -> None:
    """The load of the last minute, in the order in which it is asked for; the last one stays."""
    left = list(given)
    monkeypatch.setattr("os.getloadavg", lambda: (left.pop(0) if len(left) > 1 else left[0], 0.0, 0.0))


def written(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_full_run_has_all_commands_rows_a_sentence_and_a_picture(
    stand_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = running.run(ONE, False, ())
    words = "stand_in: it takes 3 s (2 to 4 in 2 rows) (published: 5 s, a paper)."
    assert (outcome.words, outcome.judged, outcome.status) == (words, True, 0)
    assert outcome.file == stand_in / "results" / "stand_in.jsonl"
    *found, last = written(outcome.file)
    assert found == [{"command": f"python -m experiments.stand_in {n}", "value": float(n)} for n in (2, 4)]
    made = last["made_on"]
    assert isinstance(made, dict) and made["load"] == [0.5, 0.5] and made["cores"] >= 1 and made["quick"] is False
    assert {"cpu", "python", "torch", "date", "seconds"} <= set(made)
    assert outcome.file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert capfd.readouterr().out.count("a line that is no row\n") == 2
    assert kept(ONE) == f"2 rows, {made['date']}, load 0.5"


@pytest.mark.parametrize(("quick", "more", "values"), [(True, (), [3.0]), (False, ("7",), [7.0])])
def test_other_runs_leave_the_rows_of_a_full_one(
    stand_in: Path, quick: bool, more: tuple[str, ...], values: list[float]
) -> None:
    outcome = running.run(ONE, quick, more)
    assert outcome.judged and outcome.file == stand_in / "results" / "tried" / "stand_in.jsonl"
    assert [row["value"] for row in written(outcome.file)[:-1]] == values
    assert kept(ONE) == "none"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((2.6, 1.0), "the load was 2.6 on 2 cores before it began"),
        ((1.0, 3.1), "the load was 3.1 on 2 cores at its end"),
    ],
)
def test_nothing_is_judged_above_the_cores(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[float, ...], why: str
) -> None:
    loads(monkeypatch, *given)
    monkeypatch.setattr(running, "load_now", lambda: given[0])
    outcome = running.run(ONE, False, ())
    assert outcome.words.startswith(f"stand_in is not judged: {why}, so that ") and "it takes" not in outcome.words
    assert not outcome.judged and outcome.status == 0
    assert outcome.file == stand_in / "results" / "tried" / "stand_in.jsonl"


def test_a_load_that_has_ended_is_no_reason(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind another experiment: the minute's mean is still high, at its end too."""
    loads(monkeypatch, 3.9, 3.5)
    monkeypatch.setattr(running, "load_now", lambda: 0.2)
    assert running.run(ONE, False, ()).judged
    loads(monkeypatch, 3.5, 5.9)
    assert not running.run(ONE, False, ()).judged
    monkeypatch.setattr(running, "LOAD_S", 1e-6)  # as long before: nothing of it is left
    loads(monkeypatch, 20.0, 3.5)
    assert not running.run(ONE, False, ()).judged


def test_the_load_of_now_leaves_this_process_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr("os.getloadavg", lambda: (7.0, 0.0, 0.0))
    assert running.load_now() == 7.0
    (tmp_path / "loadavg").write_text("3.50 2.00 1.00 2/391 4711\n")
    assert running.load_now() == 1.0


@pytest.mark.parametrize(
    ("before", "after", "processes", "busy"),
    [(2.0, 2.0, 1, False), (2.1, 2.0, 4, True), (1.0, 3.9, 4, False), (1.0, 4.1, 4, True), (1.0, 2.1, 1, True)],
)
def test_a_load_that_the_experiment_makes_itself_is_none(
    before: float, after: float, processes: int, busy: bool
) -> None:
    one = Experiment("x", "?", 1, processes=processes)
    assert bool(running.too_busy(one, before, after, 2)) == busy


def test_rows_may_come_from_a_file() -> None:
    one = Experiment("stand_in", "What?", 1, (f"8 --out {ROWS}",))
    outcome = running.run(one, False, ())
    assert outcome.file is not None and written(outcome.file)[0] == {
        "command": "python -m experiments.stand_in 8",
        "value": 8.0,
    }


def test_a_command_that_fails_ends_the_run_and_leaves_no_rows(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "stand_in", "--quick", "--fail"]) == 1
    assert "python -m experiments.stand_in 3 --fail ended with status 1" in capsys.readouterr().out
    assert not (stand_in / "results").exists()


def test_rows_without_a_declared_sentence_are_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FIGURES, "stand_in")
    outcome = running.run(ONE, True, ())
    assert outcome.words == "stand_in: no sentence for these rows, which stand above"
    assert outcome.file is not None and not outcome.file.with_suffix(".png").exists()


def test_all_quick_ones_one_behind_another_and_a_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    none = Experiment("without", "?", 1)
    fails = Experiment("stand_in", "Fails?", 1, quick="9 --fail")
    monkeypatch.setattr("experiments.__main__.EXPERIMENTS", (none, ONE))
    assert main(["run", "all", "--quick"]) == 0
    shown = capfd.readouterr().out
    line = r"\njudged +\d+ s  stand_in: it takes 3 s \(one row\) \(published: 5 s, a paper\)\.\n"
    assert re.search(line + r"1 experiments in 0\.\d minutes\n$", shown)
    assert "without" not in shown
    monkeypatch.setattr("experiments.__main__.EXPERIMENTS", (fails,))
    assert main(["run", "all", "--quick"]) == 1
    failed = r"\nfailed +\d+ s  python -m experiments.stand_in 9 --fail ended with status 1\n"
    assert re.search(failed, capfd.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "layoutz"], "layoutz is no experiment; did you mean layouts?"),
        (["run", "gpu_check", "--quick"], "gpu_check has no quick run. Leave --quick out: about 13 minutes"),
        (["run", "all"], "`run all` is for quick runs, without further arguments"),
        (["run", "all", "--quick", "--rounds", "1"], "`run all` is for quick runs, without further arguments"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert why in capsys.readouterr().err


def test_the_list_names_all_with_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({name for name in BY_NAME if name != "stand_in"}) + 2
    assert lines[1].split()[:4] == ["balance", "1", "0.5", "none"]
