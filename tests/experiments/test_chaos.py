"""The chaos experiment: its points are functions of dhp, its judge sees what is wrong, and one fault is survived."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest

from experiments.chaos.__main__ import ACTORS, DAMAGE, FULL, KILL, STOP, Fault, draw, harm, summary
from experiments.chaos.points import USERS_FILES, Point, flip_bit, names, points
from experiments.chaos.run import INJECT, Observed, Watch, judge
from tests.helpers.runs import ROOT, Outcome

VERDICT = {"part": "text", "rank": 1, "step": 3, "action": "grad_norm_sq", "state": "training", "at": 12.5}


def test_every_point_is_a_function_that_is_there() -> None:
    for point in points():
        module, _, function = point.target.partition(":")
        assert callable(reduce(getattr, function.split("."), importlib.import_module(module))), point
    assert len(names(points())) >= 50
    keys = [(point.name, point.kind) for point in points()]
    assert len(set(keys)) == len(keys)


SCRIPT = """
import os, sys
sys.orig_argv = ["python", "-m", "dhp.train_ray"]
import plain.module
for number in range(4):
    print(plain.module.Counter().count(number), flush=True)
"""
MODULE = """
class Counter:
    def count(self, number):
        print("in", number, flush=True)
        return number
"""


@pytest.mark.parametrize(("when", "printed"), [("before", "in 0 0 in 1 1"), ("after", "in 0 0 in 1 1 in 2")])
def test_the_signal_comes_at_the_call_that_is_due_and_once(tmp_path: Path, when: str, printed: str) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "module.py").write_text(MODULE)
    fired = tmp_path / "fired"
    point = Point("a", "plain.module:Counter.count", when, "driver", ("supervisor",), 2)
    environment = {**os.environ, "PYTHONPATH": f"{INJECT}:{tmp_path}:{ROOT}", **point.environment(fired)}
    run = lambda: subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    struck = run()
    assert (struck.returncode, struck.stdout.split()) == (-9, printed.split())
    assert json.loads(fired.read_text())["process"] == "supervisor"
    assert run().returncode == 0
    fired.unlink()
    other = point.environment(fired)["DHP_CHAOS_POINT"].replace("supervisor", "text-0")
    environment["DHP_CHAOS_POINT"] = other
    assert run().returncode == 0 and not fired.exists()


@pytest.fixture
def disturbed(first_run: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A run's directory as that of the first one, with the user's files in it."""
    run_dir = tmp_path / "run"
    shutil.copytree(first_run[0], run_dir, symlinks=True)
    for name in USERS_FILES:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()
    return run_dir


def seen(run_dir: Path, **changed: object) -> Observed:
    fired = {"at": 12.0, "pid": 1, "process": "text-1"}
    own: dict[str, object] = {"code": 0, "commands": 1, "output": "", "fired": fired, "first_step": 20.0}
    own |= {"faults": [VERDICT | {"followed_by": "restart 1 of 3, from x/step_2"}], "stopped": [13.0], "left": []}
    return Observed(run_dir, **{**own, "began": 0.0, "ended": 30.0, **changed})  # type: ignore[arg-type]


def test_a_run_like_the_undisturbed_one_has_no_problems(disturbed: Path, first_run: tuple[Path, Outcome]) -> None:
    found = judge(seen(disturbed), first_run[0], 8, True)
    assert found.problems == () and found.completed and found.identical
    assert (found.detect_s, found.rebuild_s, found.first_step_s) == (0.5, 7.5, 8.0)
    assert (found.lost_steps, found.samples_lost, found.samples_repeated) == (1, 0, 0)


def change_loss(run_dir: Path) -> None:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["loss"] += 1e-7
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def drop_step(run_dir: Path) -> None:
    file = run_dir / "metrics.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")


def repeat_step(run_dir: Path) -> None:
    file = run_dir / "metrics.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")


def harm_weights(run_dir: Path) -> None:
    flip_bit(next(run_dir.glob("checkpoints/step_*/text/rank_*.safetensors")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (change_loss, "loss"),
        (drop_step, "is missing"),
        (harm_weights, "differs"),
        (lambda run_dir: (run_dir / USERS_FILES[0]).unlink(), "of the user's is gone"),
        (lambda run_dir: (run_dir / "checkpoints" / "step_9.partial").mkdir(), "step_9.partial is left"),
    ],
)
def test_the_judge_sees_what_is_wrong(
    disturbed: Path, first_run: tuple[Path, Outcome], wrong: Callable[[Path], object], said: str
) -> None:
    wrong(disturbed)
    assert any(said in problem for problem in judge(seen(disturbed), first_run[0], 8, True).problems)


def test_the_judge_counts_samples(disturbed: Path, first_run: tuple[Path, Outcome]) -> None:
    repeat_step(disturbed)
    assert judge(seen(disturbed), first_run[0], 8, True).samples_repeated == 8
    drop_step(disturbed)
    drop_step(disturbed)
    assert judge(seen(disturbed), first_run[0], 8, True).samples_lost == 8


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"faults": [VERDICT | {"rank": 0}]}, "rank=0, not 1"),
        ({"faults": [VERDICT | {"step": None}]}, "no step"),
        ({"faults": [VERDICT | {"action": ""}]}, "no action"),
        ({"faults": []}, "there is no verdict"),
        ({"fired": None}, "not reached"),
        ({"code": 1, "output": "why"}, "exit status 1: why"),
        ({"left": ["process raylet"]}, "process raylet"),
    ],
)
def test_the_judge_reads_the_verdict(
    disturbed: Path, first_run: tuple[Path, Outcome], changed: dict[str, object], said: str
) -> None:
    found = judge(seen(disturbed, **changed), first_run[0], 8, True)
    assert any(said in problem for problem in found.problems), found.problems


def test_the_first_step_behind_a_fault_is_one_of_another_attempt(tmp_path: Path) -> None:
    watch, metrics = Watch(tmp_path, tmp_path / "fired"), tmp_path / "metrics.jsonl"
    metrics.write_text("1\n2\n3\n")
    watch.look()
    watch.tell_fired({"at": 1.0, "pid": 1, "process": "text-0"})
    with metrics.open("a") as file:
        file.write("4\n")  # a step that was on its way
    watch.look()
    assert watch.first_step is None
    (tmp_path / "new").write_text("1\n2\n")  # cut behind its checkpoint
    os.replace(tmp_path / "new", metrics)
    watch.look()
    assert watch.first_step is None
    with metrics.open("a") as file:
        file.write("3\n")
    watch.look()
    assert watch.first_step is not None


def test_faults_are_drawn_by_a_seed_and_have_every_kind() -> None:
    faults = draw(7, 24, 40)
    assert faults == draw(7, 24, 40) != draw(8, 24, 40) and len(faults) == 24
    assert {fault.target for fault in faults if fault.kind == KILL} >= {"raylet", "gcs_server", "driver", "supervisor"}
    assert {fault.target for fault in faults if fault.kind == STOP} >= {"raylet", "gcs_server", "data", "data-0"}
    assert {fault.target for fault in faults if fault.kind == DAMAGE} == {"bit", "cut", "missing", "manifest"}
    assert any(fault.kind == FULL for fault in faults)
    assert all(fault.target in ACTORS for fault in faults[19:])


def test_a_file_is_harmed_as_the_fault_says(disturbed: Path) -> None:
    newest = max(disturbed.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
    file = sorted((newest / "text").glob("rank_*.safetensors"))[-1]
    before = file.read_bytes()
    harm(Fault(KILL, "text-0", 3), disturbed)
    assert file.read_bytes() == before
    harm(Fault(DAMAGE, "bit", 3), disturbed)
    assert file.read_bytes() != before and len(file.read_bytes()) == len(before)
    harm(Fault(DAMAGE, "cut", 3), disturbed)
    assert len(file.read_bytes()) == len(before) - 7
    harm(Fault(DAMAGE, "missing", 3), disturbed)
    assert not file.exists()
    harm(Fault(DAMAGE, "manifest", 3), disturbed)
    assert not (newest / "checkpoint.json").exists()


def test_a_summary_has_the_largest_seconds_of_kills() -> None:
    row = {"completed": True, "identical": True, "samples_lost": 0, "samples_repeated": 0, "lost_steps": 1}
    row |= {"problems": [], "detect_s": 0.5, "rebuild_s": 9.0, "first_step_s": 9.5}
    slow = row | {"fault": STOP, "detect_s": 20.0, "problems": ["one"], "identical": False}
    found = summary([row, row | {"detect_s": 1.5, "lost_steps": 2}, slow], "a command")
    assert (found["runs"], found["completed"], found["identical"], found["problems"]) == (3, 3, 2, 1)
    assert found["detect_s"] == [1.0, 1.5] and found["lost_steps"] == 2 and found["command"] == "a command"


@pytest.mark.slow
def test_a_rank_that_is_killed_amid_its_step_costs_nothing(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; import sys\n"
        "from dhp.supervise.supervisor import adopt_orphans\n"
        "from experiments.chaos.__main__ import Laboratory\n"
        "from experiments.chaos.points import points\n"
        "adopt_orphans()\n"
        "point = next(one for one in points() if (one.name, one.kind) == ('optimizer.one_part', 'vision'))\n"
        "_, judged = Laboratory(Path(sys.argv[1])).run(point.scenario, point.environment)\n"
        "print(judged.row())\n"
        "sys.exit(bool(judged.problems))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
