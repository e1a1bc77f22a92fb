"""What a verdict says of an error, and how it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import (
    DIED,
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
    MORE,
    REFUSED,
    Verdict,
    read_verdict,
    verdict_file,
    verdict_of,
    write_verdict,
)


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
