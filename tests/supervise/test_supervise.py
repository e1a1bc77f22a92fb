"""Attempts, verdicts, and a supervisor over stand-ins."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config, same_command
from dhp.core.errors import (
    DIED,
    DRAINED,
    HUNG,
    LOST,
    RAISED,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Fault,
    ModelError,
    MoreDevices,
    NoCluster,
    PartFailed,
    RecordError,
    TooFewDevices,
)
from dhp.supervise.attempt import (
    CLUSTER,
    COMPLETED,
    FEWER,
    GONE,
    INTERRUPTED,
    KILLED,
    MORE,
    REFUSED,
    VARIABLE,
    Attempt,
    Choice,
    ElasticLayout,
    ElasticLayouts,
    Verdict,
    known_device,
    larger_layouts,
    read_layouts,
    read_verdict,
    restarts,
    tell_device,
    tell_layouts,
    tell_opened,
    tell_saved,
    tell_state,
    telling_end,
    this_attempt,
    verdict_file,
    verdict_of,
    write_verdict,
    written,
)
from dhp.supervise.launch import changes, reporting
from dhp.supervise.policy import LONGEST_WAIT_S, Ended, Restart, Rules, Stop, decide
from dhp.supervise.supervisor import Begun, judge
from tests.helpers.marks import MARK, marked_processes
from tests.helpers.runs import ROOT, heed_interrupts


def test_nothing_is_said_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert this_attempt() is None and restarts() == 0
    tell_opened()
    tell_state("training")
    tell_saved(Path("step_1"))
    with telling_end():
        pass


def test_what_is_said_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(str(tmp_path), 3, 2)
    monkeypatch.setenv(VARIABLE, attempt.environment()[VARIABLE])
    assert this_attempt() == attempt and restarts() == 2
    assert (attempt.has_opened, attempt.state, attempt.checkpoint, attempt.verdict) == (False, "starting", None, None)
    tell_opened()
    tell_state("saving")
    tell_saved(Path("a/step_1"))
    assert (attempt.has_opened, attempt.state, attempt.checkpoint) == (True, "saving", "a/step_1")
    with pytest.raises(PartFailed), telling_end():
        raise PartFailed("first")
    attempt.ended(PartFailed("what followed from it"))
    verdict = attempt.verdict
    assert verdict is not None and (verdict.message, verdict.state, verdict.attempt) == ("first", "saving", 3)


def test_layouts_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    layouts = ElasticLayouts(ElasticLayout(2), (ElasticLayout(1, ("a=1", "b=[1,2]")),))
    tell_layouts(lambda: pytest.fail("nothing supervises it"))
    assert larger_layouts() == ()
    first, second = Attempt(str(tmp_path), 1, 0, asks_layouts=True), Attempt(str(tmp_path), 2, 1, (2,), "cuda")
    assert first.layouts is None and first.device_said is None and known_device() == ""
    monkeypatch.setenv(VARIABLE, first.environment()[VARIABLE])
    tell_layouts(lambda: layouts)
    assert first.layouts == layouts
    tell_device("cpu")
    assert first.device_said == "cpu" and known_device() == ""
    monkeypatch.setenv(VARIABLE, second.environment()[VARIABLE])
    tell_layouts(lambda: pytest.fail("they are known"))
    assert list(larger_layouts()) == [2] and known_device() == "cuda"


def test_a_stage_that_has_completed_is_no_end_of_a_curriculum(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path), 1, 0)
    attempt.ended(None)
    attempt.opened()
    assert attempt.verdict is None


def test_a_folder_that_is_gone_fails_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    attempt = Attempt(str(file), 1, 0)
    attempt.in_state("training")
    assert attempt.ended(PartFailed("no")).restartable and attempt.verdict is None


OWN, HALF, ONE = ElasticLayout(8), ElasticLayout(4, ("text.num_actors=4",)), ElasticLayout(1, ("text.num_actors=1",))
ALL = ElasticLayouts(OWN, (HALF, ONE))


@pytest.mark.parametrize(("there", "layout"), [(9, OWN), (8, OWN), (7, HALF), (4, HALF), (3, ONE), (1, ONE), (0, None)])
def test_the_largest_for_which_there_are_devices(there: int, layout: ElasticLayout | None) -> None:
    assert ALL.for_devices(there) == layout


def test_what_is_larger() -> None:
    assert (ALL.larger_than(OWN), ALL.larger_than(HALF), ALL.larger_than(ONE)) == ((), (8,), (8, 4))


def test_a_run_follows_its_devices() -> None:
    choice = Choice(ALL, OWN)
    assert choice.larger == () and choice.after(None, True, False) == choice
    shrunk = choice.after(5, False, False)
    assert (shrunk.now, shrunk.before, shrunk.larger) == (HALF, None, (8,))
    grown = shrunk.after(8, True, False)
    assert (grown.now, grown.before) == (OWN, HALF)
    assert grown.after(None, True, False) == Choice(ALL, OWN)  # it has trained
    assert grown.after(None, False, False) == grown  # a fault before it has


@pytest.mark.parametrize(("there", "ended"), [(None, True), (7, False), (9, False)])
def test_a_layout_that_it_grew_to_and_cannot_train_in_is_not_tried_again(there: int | None, ended: bool) -> None:
    grown = Choice(ALL, ONE).after(8, True, False)
    back = grown.after(there, False, ended)
    assert back == Choice(ALL, ONE, None, frozenset({8})) and back.larger == (4,)
    assert Choice(ALL, HALF, None, frozenset({8})).larger == ()


def test_a_run_that_is_refused_in_the_layout_that_it_began_in_stays_so() -> None:
    choice = Choice(ALL, OWN)
    assert choice.after(None, False, True) == choice
    assert choice.after(0, False, False) == choice  # too few for any


def test_layouts_are_read_back() -> None:
    assert read_layouts(json.loads(json.dumps(written(ALL)))) == ALL


OPENED, SAVED = Begun(opened=True), Begun(opened=True, saved=True)


def asked(begun: Begun, *overrides: str, run_dir: str = "runs/one") -> dict[str, str]:
    config = compose_config("tiny", overrides=[f"run_dir={run_dir}", *overrides])
    found = changes(config, begun)
    assert found.pop("run_dir") == run_dir
    return found


@pytest.mark.parametrize("overrides", [(), ("overwrite=true",), ("training.resume=auto",), ("training.resume=/a/run",)])
def test_until_the_run_has_its_directory_an_attempt_is_as_the_first(overrides: tuple[str, ...]) -> None:
    assert asked(Begun(), *overrides) == {}


@pytest.mark.parametrize("overrides", [(), ("overwrite=true",), ("training.resume=auto",)])
def test_then_it_continues_and_replaces_nothing(overrides: tuple[str, ...]) -> None:
    for begun in (OPENED, SAVED):
        assert asked(begun, *overrides) == {"overwrite": "false", "training.resume": "auto"}


def test_a_run_that_began_with_anothers_checkpoint_begins_there_until_it_has_its_own() -> None:
    other = "training.resume=/another/run/checkpoints/step_4"
    assert asked(OPENED, other) == {"overwrite": "true", "training.resume": "/another/run/checkpoints/step_4"}
    assert asked(SAVED, other) == {"overwrite": "false", "training.resume": "auto"}


def test_a_checkpoint_in_the_run_itself_is_continued(tmp_path: Path) -> None:
    own = f"training.resume={tmp_path}/checkpoints/step_4"
    assert asked(OPENED, own, run_dir=str(tmp_path)) == {"overwrite": "false", "training.resume": "auto"}


def test_a_curriculum_goes_on_by_its_own_record() -> None:
    stages = "stages=[{name: a, training: {max_steps: 1}}]"
    config = compose_config("tiny", overrides=["run_dir=runs/one"])
    config.stages = [stages]  # type: ignore[list-item]
    assert changes(config, SAVED) == {"run_dir": "runs/one", "overwrite": "false"}


def test_the_command_line_names_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp.config.command_line.job_overrides", list)  # those of another test's job
    file = tmp_path / "my.yaml"
    file.write_text("name: mine\n")
    words = same_command([str(file), "seed=3"], {"run_dir": "runs/one"})
    assert words == [f"--config-path={tmp_path}", "--config-name=my", "run_dir='runs/one'"]
    monkeypatch.setattr("dhp.config.command_line.job_overrides", lambda: ["text.num_actors=4", "seed=3"])
    words = same_command([str(file)], {"run_dir": "x"}, ("text.num_actors=2", "text.cuts=[1]"))
    assert words[2:] == ["seed=3", "run_dir='x'", "text.num_actors=2", "text.cuts=[1]"]


@pytest.mark.parametrize("odd", ["plain", "it's, {odd} = 1\\2", "ends\\", "a\\'b"])
def test_any_path_is_read_back(odd: str) -> None:
    (override,) = [word for word in same_command(["--config-name=tiny"], {"run_dir": odd}) if word[:7] == "run_dir"]
    assert compose_config("tiny", overrides=[override]).run_dir == odd


def test_how_a_driver_ends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def end(number: int, error: BaseException | None) -> Attempt:
        attempt = Attempt(str(tmp_path / str(number)), number, 0)
        with reporting(attempt):
            if error is not None:
                raise error
        return attempt

    verdict = end(1, None).verdict
    assert verdict is not None and verdict.kind == COMPLETED
    with pytest.raises(SystemExit) as ended:
        end(2, PartFailed("text rank 1 died"))
    assert ended.value.code == 75 and capsys.readouterr().err == "PartFailed: text rank 1 died\n"
    with pytest.raises(ConfigError):
        end(3, ConfigError("no"))
    with pytest.raises(SystemExit):
        end(4, SystemExit(130))
    verdict = Attempt(str(tmp_path / "4"), 4, 0).verdict
    assert verdict is not None and verdict.kind == INTERRUPTED
    with pytest.raises(ZeroDivisionError):
        end(5, ZeroDivisionError())


RULES = Rules(max_restarts=3, wait_s=5.0)


def ended(*kinds: str, saved: tuple[int, ...] = (), step: int | None = 7, message: str = "no") -> list[Ended]:
    """Attempts that ended so, one after another; those numbered in `saved` (from 1) finished a checkpoint."""
    final = (COMPLETED, INTERRUPTED, REFUSED)
    return [
        Ended(Verdict(number, kind, "Error", message, step=step, restartable=kind not in final), number in saved)
        for number, kind in enumerate(kinds, 1)
    ]


@pytest.mark.parametrize(("kind", "status"), [(COMPLETED, 0), (INTERRUPTED, 130), (REFUSED, 1)])
def test_some_ends_are_final(kind: str, status: int) -> None:
    assert decide(ended(kind), RULES) == Stop(status)
    assert decide(ended(DIED, LOST, kind), RULES) == Stop(status)


@pytest.mark.parametrize("kind", [DIED, LOST, HUNG, CLUSTER, KILLED])
def test_a_fault_is_followed_by_a_restart_until_they_are_used_up(kind: str) -> None:
    decisions = [decide(ended(*[kind] * count), RULES) for count in range(1, 5)]
    assert decisions[:3] == [Restart(5.0, 1), Restart(10.0, 2), Restart(20.0, 3)]
    assert decisions[3] == Stop(1, "training.max_restarts=3 are used up since the newest checkpoint")


def test_each_new_checkpoint_begins_the_count_again() -> None:
    decisions = [decide(ended(*[DIED] * count, saved=(3, 4)), RULES) for count in range(1, 8)]
    waits = [(d.number, d.after_s) if isinstance(d, Restart) else d.status for d in decisions]
    assert waits == [(1, 5.0), (2, 10.0), (1, 5.0), (1, 5.0), (2, 10.0), (3, 20.0), 1]


def test_the_wait_is_bounded() -> None:
    many = Rules(max_restarts=100, wait_s=5.0)
    assert decide(ended(*[DIED] * 30), many) == Restart(LONGEST_WAIT_S, 30)
    assert decide(ended(*[DIED] * 3), Rules(100, 1000.0)) == Restart(1000.0, 3)


def test_nodes_that_go_with_notice_are_not_counted() -> None:
    history = ended(DRAINED, DRAINED, DRAINED, DRAINED, DRAINED)
    assert decide(history, RULES) == Restart(5.0, 0, "its node was drained")
    assert decide(ended(DRAINED, DIED, DRAINED, DIED), RULES) == Restart(10.0, 2)


def test_the_same_exception_at_the_same_step_ends_the_run() -> None:
    assert decide(ended(RAISED), RULES) == Restart(5.0, 1)
    assert decide(ended(RAISED, RAISED), RULES) == Stop(
        1, "attempt 1 ended in the same way at step 7: another would too"
    )
    assert decide(ended(RAISED, DIED, RAISED), RULES) == decide(ended(RAISED, RAISED), RULES)
    # Even where checkpoints were made between: it comes again and again.
    assert isinstance(decide(ended(RAISED, RAISED, saved=(2,)), RULES), Stop)


def test_another_step_or_message_is_another_exception() -> None:
    first, (second,) = ended(RAISED), ended(RAISED, step=8)
    assert decide([*first, second], RULES) == Restart(10.0, 2)
    (other,) = ended(RAISED, message="another\nwith more lines")
    assert decide([*first, other], RULES) == Restart(10.0, 2)


def test_before_the_first_step_it_is_one_place_too() -> None:
    assert decide(ended(RAISED, RAISED, step=None), RULES) == Stop(
        1, "attempt 1 ended in the same way before its first step: another would too"
    )


def left(kind: str, number: int = 2, moves: bool = False) -> Ended:
    """An attempt that found too few devices, or more than it has."""
    return Ended(Verdict(number, kind, devices=1, restartable=True, state="loading"), moves=moves)


@pytest.mark.parametrize("kind", [FEWER, GONE])
def test_a_run_that_never_had_its_devices_is_not_started_again(kind: str) -> None:
    assert decide([left(kind, 1)], RULES) == Stop(1)


@pytest.mark.parametrize("kind", [FEWER, GONE])
def test_a_run_that_lost_its_devices_waits_for_them_and_that_is_counted(kind: str) -> None:
    lost = Ended(Verdict(1, LOST, restartable=True, state="training"))
    assert decide([lost, left(kind)], RULES) == Restart(10.0, 2)


@pytest.mark.parametrize("kind", [FEWER, MORE])
def test_another_layout_is_taken_at_once_and_not_counted(kind: str) -> None:
    lost = Ended(Verdict(1, LOST, restartable=True, state="saving"))
    moving = left(kind, moves=True)
    assert decide([lost, moving], RULES) == Restart(0.0, 0, "it goes on in another layout")
    assert decide([lost, moving, lost], RULES) == Restart(10.0, 2)


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError, CheckpointError, RecordError])
def test_what_another_attempt_would_meet_again_is_refused(kind: type[Exception]) -> None:
    assert verdict_of(kind("no"), 2, "loading") == Verdict(2, REFUSED, kind.__name__, "no", state="loading")


def test_a_rank_that_died_is_named_in_fields() -> None:
    error = PartFailed("it died", Fault(DIED, "text.1 rank 3", "forward_step", "10.0.0.6")).at_step(12)
    assert verdict_of(error, 1) == Verdict(
        *(1, DIED, "PartFailed", "step 12: it died"),
        part="text.1",
        rank=3,
        node="10.0.0.6",
        step=12,
        action="forward_step",
        restartable=True,
    )


def test_an_actor_that_is_no_rank_is_the_part() -> None:
    verdict = verdict_of(PartFailed("it died", Fault(DIED, "data worker 0", "reading step 3")), 1)
    assert (verdict.part, verdict.rank) == ("data worker 0", None)


def test_other_ends() -> None:
    assert verdict_of(None, 1).kind == COMPLETED
    assert verdict_of(KeyboardInterrupt(), 1) == Verdict(1, INTERRUPTED)
    assert verdict_of(ClusterError("gone"), 1) == Verdict(1, CLUSTER, "ClusterError", "gone", restartable=True)
    assert verdict_of(ValueError("odd"), 1) == Verdict(1, RAISED, "ValueError", "odd", restartable=True)
    assert not verdict_of(SystemExit(1), 1).restartable


def test_devices_that_are_not_there_may_come() -> None:
    fewer, more, gone = (verdict_of(one, 1) for one in (TooFewDevices("no", 3), MoreDevices("yes", 4), NoCluster("no")))
    assert (fewer.kind, fewer.devices, fewer.restartable) == (FEWER, 3, True)
    assert (more.kind, more.devices, more.restartable) == (MORE, 4, True)
    assert (gone.kind, gone.devices, gone.restartable) == (GONE, None, True)


def test_a_step_is_named_once() -> None:
    error = PartFailed("it died").at_step(3)
    assert str(error.at_step(4)) == "step 3: it died" and error.fault.step == 3
    assert str(PartFailed("a worker died in reading step 5").at_step(5)) == "a worker died in reading step 5"
    assert str(PartFailed("a worker died in reading step 50").at_step(5)).startswith("step 5: ")
    hung = "text rank 1 hangs\n  text rank 1: step 3, forward_step"
    assert str(PartFailed(hung).at_step(3)) == f"step 3: {hung}"  # lines of all ranks name steps too


def test_a_verdict_is_read_back(tmp_path: Path) -> None:
    file = verdict_file(tmp_path, 7)
    assert file == tmp_path / "faults" / "007.json"
    assert read_verdict(file) is None
    verdict = Verdict(7, DIED, "PartFailed", "text rank 1\nmore", rank=1, step=3, restartable=True, exit_code=75)
    write_verdict(file, verdict)
    assert read_verdict(file) == verdict and verdict.headline() == "PartFailed: text rank 1"
    file.write_text('{"attempt": 1, "ki')
    assert read_verdict(file) is None


LIMIT_S = 300

# Does in each attempt what the argument of that number says.
DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dhp.core.errors import HUNG, RAISED, ConfigError, Fault, MoreDevices, PartFailed, TooFewDevices
from dhp.supervise.attempt import ElasticLayout, ElasticLayouts, this_attempt

attempt = this_attempt()
attempt.opened()
attempt.in_state("training")
print("attempt", attempt.number, "restarts", attempt.restarts, flush=True)
print("layout", os.environ.get("LAYOUT") or "own", "larger", *attempt.larger, flush=True)
for word in sys.argv[attempt.number].split("+"):
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "aborted":
        os.abort()
    elif word == "raised":
        attempt.ended(PartFailed("the norm is nan", Fault(RAISED, "text rank 0", step=3)))
        sys.exit(75)
    elif word == "refused":
        sys.exit(1)
    elif word == "hung":
        attempt.ended(PartFailed("nothing moved", Fault(HUNG)))
    elif word == "done":
        attempt.ended(None)
    elif word == "layouts":
        attempt.has_layouts(ElasticLayouts(ElasticLayout(4), (ElasticLayout(2, ("text.num_actors=2",)),)))
    elif word == "loading":
        attempt.in_state("loading")
    elif word == "barred":
        attempt.ended(ConfigError("this node has no data"))
        sys.exit(1)
    elif word == "few":
        attempt.ended(TooFewDevices("2 are there", 2))
        sys.exit(75)
    elif word == "more":
        attempt.ended(MoreDevices("4 are there", 4))
        sys.exit(75)
    elif word == "saved":
        attempt.saved(Path(f"step_{attempt.number}"))
    elif word == "orphan":  # in a session of its own, and no child of anybody's
        subprocess.run(["sh", "-c", "setsid sleep 600 & exit 0"], check=True)
    elif word == "sleeps":
        time.sleep(600)
    elif word == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "heeds":
        def end(number, frame):
            attempt.ended(KeyboardInterrupt())
            sys.exit(130)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
"""

SUPERVISOR = """
import os, sys
from pathlib import Path
from dhp.supervise import supervisor as driver
from dhp.supervise.policy import Rules
from dhp.supervise.supervisor import Supervisor

driver.GRACE_S = 0.2
folder, *words = sys.argv[1:]
print("begins", flush=True)
def commands(begun):
    os.environ["LAYOUT"] = " ".join(begun.layout)
    return [sys.executable, "-c", Path(folder, "driver.py").read_text(), *words]
sys.exit(Supervisor(commands, Path(folder) / "run", Rules(2, 0.01), stopping_s=1.0).run())
"""


@dataclass(frozen=True)
class Outcome:
    """How it ended. kept: the verdicts in run_dir. left: command lines of processes that were still there."""

    status: int
    lines: list[str]
    kept: list[dict]
    left: list[str]


def supervised(folder: Path, *words: str, meanwhile: Callable[[subprocess.Popen[str]], None] | None = None) -> Outcome:
    """Attempt number n does what the n-th of `words` says."""
    (folder / "driver.py").write_text(DRIVER)
    (folder / "run").mkdir()
    mark = f"{folder}"
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), *words],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        stdout, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    kept = [json.loads(file.read_text()) for file in sorted((folder / "run" / "faults").glob("*.json"))]
    return Outcome(process.returncode, stdout.splitlines(), kept, list(marked_processes(mark).values()))


def test_a_driver_that_is_killed_is_started_again(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "saved+killed", "aborted", "done")
    assert outcome.status == 0 and outcome.left == []
    assert [line for line in outcome.lines if line.startswith("attempt") and "restarts" in line] == [
        *("attempt 1 restarts 0", "attempt 2 restarts 1", "attempt 3 restarts 2")
    ]
    assert "restart 1 of 2, after 0.01 s, from step_1" in outcome.lines
    assert [(one["attempt"], one["kind"], one["exit_code"]) for one in outcome.kept] == [
        *((1, KILLED, -signal.SIGKILL), (2, KILLED, -signal.SIGABRT), (3, COMPLETED, 0))
    ]
    assert "ended by SIGABRT while training" in outcome.kept[1]["message"]


def test_restarts_are_used_up(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "killed", "killed", "killed")
    assert outcome.status == 1 and outcome.left == []
    assert "attempt 3 failed, and there is no other one: training.max_restarts=2 are used up" in outcome.lines[-1]
    assert outcome.lines[-1].endswith("since the newest checkpoint; there is no checkpoint")
    assert outcome.kept[-1]["followed_by"] == "training.max_restarts=2 are used up since the newest checkpoint"


def test_the_same_exception_twice_ends_the_run(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "raised", "raised")
    assert outcome.status == 1
    assert [(one["part"], one["rank"], one["step"]) for one in outcome.kept] == [("text", 0, 3), ("text", 0, 3)]
    assert outcome.kept[1]["followed_by"] == "attempt 1 ended in the same way at step 3: another would too"


def test_a_run_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    assert supervised(tmp_path, "refused").status == 1


def test_a_teardown_that_hangs_is_ended(tmp_path: Path) -> None:
    """Asleep or stopped, with a process that nobody knows any more."""
    outcome = supervised(tmp_path, "orphan+hung+sleeps", "hung+stopped", "done+sleeps")
    assert outcome.status == 0 and outcome.left == []
    assert outcome.lines.count("the driver has not ended in its time: killing it with all that it started") == 3
    assert [one["kind"] for one in outcome.kept] == ["hung", "hung", "completed"]


def test_what_the_driver_leaves_is_ended(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "orphan+killed", "done")
    assert outcome.status == 0 and outcome.left == []
    assert "ended what the driver left: sleep" in outcome.lines


def test_the_layout_follows_the_devices(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "layouts+saved+killed", "few", "saved+more", "done")
    assert outcome.status == 0
    assert [line for line in outcome.lines if line.startswith("layout")] == [
        *("layout own larger", "layout own larger", "layout text.num_actors=2 larger 4", "layout own larger")
    ]
    moved = "restart, not counted, for it goes on in another layout, after 0 s, from step_"
    assert f"{moved}1, in the layout text.num_actors=2" in outcome.lines and f"{moved}3" in outcome.lines
    assert [(one["kind"], one["devices"]) for one in outcome.kept] == [
        *(("killed", None), ("fewer devices", 2), ("more devices", 4), ("completed", None))
    ]


def test_a_layout_that_cannot_be_is_left_again(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "layouts+saved+killed", "few", "saved+more", "loading+barred", "saved+done")
    assert outcome.status == 0
    assert [line for line in outcome.lines if line.startswith("layout")][2:] == [
        *("layout text.num_actors=2 larger 4", "layout own larger", "layout text.num_actors=2 larger")
    ]
    assert [one["kind"] for one in outcome.kept] == [
        *("killed", "fewer devices", "more devices", "refused", "completed")
    ]


def say_after(word: str, number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    def send(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        while word not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)

    return send


def test_a_signal_reaches_the_driver_and_ends_the_run(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "heeds+sleeps", meanwhile=say_after("ready", signal.SIGTERM))
    assert outcome.status == 130 and outcome.kept == [] and outcome.left == []


def test_a_driver_that_does_not_heed_a_signal_is_killed(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "stopped", meanwhile=say_after("attempt 1", signal.SIGINT))
    assert outcome.status == 130 and outcome.left == []


def test_the_driver_ends_with_its_supervisor(tmp_path: Path) -> None:
    outcome = supervised(tmp_path, "heeds+sleeps", meanwhile=say_after("ready", signal.SIGKILL))
    assert outcome.status == -signal.SIGKILL
    deadline = time.monotonic() + LIMIT_S
    while marked_processes(str(tmp_path)):
        assert time.monotonic() < deadline


def test_an_exit_status_is_judged_by_what_was_said(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path), 1, 0)
    silent = {code: judge(attempt, code, killed=False, interrupted=False) for code in (0, 1, 75, 130, -9)}
    assert {code: verdict.kind for code, verdict in silent.items()} == {
        **{0: COMPLETED, 1: REFUSED, 75: REFUSED, 130: INTERRUPTED, -9: KILLED}
    }
    assert [code for code, verdict in silent.items() if verdict.restartable] == [75, -9]
    assert judge(attempt, -9, killed=False, interrupted=False, at=12.5).at == 12.5
    assert judge(attempt, -9, killed=True, interrupted=True).kind == INTERRUPTED
    attempt.ended(None)
    assert judge(attempt, -9, killed=True, interrupted=False) == Verdict(1, COMPLETED, state="starting", exit_code=-9)
    failed_after = judge(attempt, 1, killed=False, interrupted=False)
    assert failed_after.kind == REFUSED and not failed_after.restartable
