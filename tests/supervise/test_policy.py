"""Whether a run is started again, by how its attempts ended."""

from __future__ import annotations

import pytest

from dhp.core.errors import DIED, DRAINED, HUNG, LOST, RAISED
from dhp.supervise.attempt import CLUSTER, COMPLETED, FEWER, GONE, INTERRUPTED, KILLED, MORE, REFUSED, Verdict
from dhp.supervise.policy import LONGEST_WAIT_S, Ended, Restart, Rules, Stop, decide

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
