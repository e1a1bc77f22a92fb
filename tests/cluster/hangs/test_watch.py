"""Waiting: the first failure of any actor becomes one message that names who failed; nothing waits for ever."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)

from dhp.cluster.hangs import watch
from dhp.cluster.hangs.lookout import SILENT, STOPPED, Lookout, Seen, find_stall
from dhp.cluster.hangs.vitals import Beat
from dhp.cluster.hangs.watch import Watched, fetch, wait_all
from dhp.cluster.servers import named_errors
from dhp.core.errors import DIED, HUNG, LOST, RAISED, DataError, Fault, PartFailed, RankRaised
from tests.helpers.posts import seen

pytestmark = pytest.mark.usefixtures("local_ray")


class Rank:
    def pid(self) -> int:
        return os.getpid()

    def hand_on(self, *values: Any) -> int:
        return len(values)

    def sleep(self) -> None:
        time.sleep(600)

    def die(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def refuse(self) -> None:
        raise DataError("dataset 'shapes', element 3: no picture")

    def stumble(self) -> None:
        with named_errors("vision rank 1", "forward_step"):
            raise ZeroDivisionError("unforeseen")

    def lose_neighbour(self) -> None:
        with named_errors("vision rank 1", "forward_step"):
            raise RuntimeError("Connection closed by peer")


@pytest.fixture(scope="module")
def alive() -> Iterator[list[Any]]:
    """Actors that have nothing to do, for whoever needs some."""
    import ray

    idle: list[Any] = []
    yield idle
    for actor in idle:
        ray.kill(actor)


@pytest.fixture
def ranks(alive: list[Any]) -> Iterator[list[Any]]:
    """Two actors. The next test gets them too, but for those that sleep or died."""
    import ray

    while len(alive) < 2:
        alive.append(ray.remote(Rank).options(num_cpus=0, max_restarts=0).remote())
    yield list(alive)
    for actor in [actor for actor in alive if actor._actor_id in spent]:
        alive.remove(actor)
        ray.kill(actor)


spent: set[Any] = set()


def watched(ranks: list[Any], rank: int, method: str, *arguments: Any) -> Watched:
    actor = ranks[rank]
    if method in ("sleep", "die"):
        spent.add(actor._actor_id)
    return Watched(f"vision rank {rank}", method, getattr(actor, method).remote(*arguments), actor._actor_id.hex())


def failure(entries: list[Watched], timeout_s: float = 60.0) -> PartFailed:
    with pytest.raises(PartFailed) as caught:
        wait_all(entries, timeout_s)
    assert type(caught.value) is PartFailed  # what a person reads has one name
    return caught.value


def test_it_returns_when_all_calls_have_worked(ranks: list[Any]) -> None:
    entries = [watched(ranks, rank, "pid") for rank in (0, 1)]
    wait_all(entries, 60.0)
    assert fetch(entries[0], 60.0) != fetch(entries[1], 60.0)
    wait_all([], 0.0)


def test_an_error_meant_for_a_person_comes_through_as_it_is_while_others_hang(ranks: list[Any]) -> None:
    entries = [watched(ranks, 0, "sleep"), watched(ranks, 1, "refuse")]
    with pytest.raises(DataError) as caught:
        wait_all(entries, 60.0)
    assert str(caught.value) == "dataset 'shapes', element 3: no picture"


def test_an_unforeseen_error_names_the_rank_and_keeps_its_traceback(ranks: list[Any]) -> None:
    told = str(failure([watched(ranks, 0, "pid"), watched(ranks, 1, "stumble")]))
    assert told.startswith("vision rank 1 failed in forward_step: ZeroDivisionError: unforeseen\nTraceback")


def test_who_waits_for_a_failed_result_is_not_blamed(ranks: list[Any]) -> None:
    broken = watched(ranks, 1, "stumble")
    dependent = watched(ranks, 0, "hand_on", broken.ref)
    assert str(failure([dependent, broken])).startswith("vision rank 1 failed in forward_step")
    assert str(failure([dependent])).startswith("vision rank 1 failed in forward_step")


def test_a_dead_actor_is_named_while_others_hang(ranks: list[Any]) -> None:
    told = str(failure([watched(ranks, 0, "sleep"), watched(ranks, 1, "die")]))
    assert told.startswith("vision rank 1 died during die: ")
    assert "ran out of memory" in told and "logs/" in told


def test_a_broken_connection_is_told_as_the_death_behind_it(ranks: list[Any]) -> None:
    told = str(failure([watched(ranks, 1, "lose_neighbour"), watched(ranks, 0, "die", 1.0)]))
    assert told.startswith("vision rank 0 died during die: ")


def test_who_waits_for_a_dead_actor_is_not_taken_for_it(ranks: list[Any]) -> None:
    import ray

    dead = watched(ranks, 1, "die")
    dependent = watched(ranks, 0, "hand_on", dead.ref)
    ray.wait([dependent.ref, dead.ref], num_returns=2, timeout=300.0)  # now the dependent one is looked at first
    told = str(failure([dependent, dead]))
    assert told.startswith("vision rank 1 died while vision rank 0 waited for it in hand_on: ")


def test_no_answer_names_the_call_that_each_actor_is_in(ranks: list[Any]) -> None:
    entries = [watched(ranks, rank, method) for rank in (0, 1) for method in ("sleep", "pid")]
    told = str(failure(entries, 0.5))
    assert "no call finished for 0.5 s. Unfinished: vision rank 0 in sleep; vision rank 1 in sleep. " in told
    assert "cluster.step_timeout_s" in told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ObjectLostError("ab" * 14, None, ""), "^vision rank 0 in pid: ObjectLostError: "),
        (OutOfMemoryError("the node is full"), "^vision rank 0 in pid: OutOfMemoryError: the node is full"),
        (GetTimeoutError("late"), "^vision rank 0 finished pid, but its result is lost$"),
    ],
)
def test_a_result_that_ray_lost_is_a_failure(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch, error: RayError, told: str
) -> None:
    entry = watched(ranks, 0, "pid")

    def lost(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(watch.ray, "get", lost)
    with pytest.raises(PartFailed, match=told):
        wait_all([entry], 60.0)


def test_errors_are_named_where_they_are_raised() -> None:
    with (
        pytest.raises(RankRaised, match=r"text rank 0 failed in save: OSError: disk full"),
        named_errors("text rank 0", "save"),
    ):
        raise OSError("disk full")
    with pytest.raises(DataError, match="as it is"), named_errors("text rank 0", "save"):
        raise DataError("as it is")


def fault(entries: list[Watched], timeout_s: float = 60.0) -> Fault:
    return failure(entries, timeout_s).fault


def test_an_error_says_in_fields_what_failed_and_where(ranks: list[Any]) -> None:
    assert fault([watched(ranks, 1, "stumble")]) == Fault(RAISED, "vision rank 1", "forward_step")  # as it says itself
    found = fault([watched(ranks, 0, "sleep")], 0.5)
    assert found == Fault(HUNG, "vision rank 0", "sleep")
    found = fault([watched(ranks, 1, "die")])
    assert found.kind in (DIED, LOST) and (found.who, found.action, found.step) == ("vision rank 1", "die", None)


def test_an_error_names_the_node_of_the_rank_that_it_is_about(ranks: list[Any]) -> None:
    """Where a run is on several nodes; whatever part waits for it."""
    broken = replace(watched(ranks, 1, "stumble"), node="10.0.0.6")
    dependent = replace(watched(ranks, 0, "hand_on", broken.ref), node="10.0.0.5")
    error = failure([dependent, broken])
    assert str(error).startswith("vision rank 1 on node 10.0.0.6 failed in forward_step: ZeroDivisionError")
    assert error.fault == Fault(RAISED, "vision rank 1", "forward_step", "10.0.0.6")
    dead = replace(watched(ranks, 1, "die"), node="10.0.0.6")
    error = failure([dead])
    assert error.fault == Fault(error.fault.kind, "vision rank 1", "die", "10.0.0.6")
    assert "vision rank 1" in str(error).split(" during die: ")[0] and "node 10.0.0.6" in str(error)
    error = failure([replace(watched(ranks, 0, "sleep"), node="10.0.0.5")], 0.5)
    assert error.fault == Fault(HUNG, "vision rank 0", "sleep", "10.0.0.5")
    assert "Unfinished: vision rank 0 on node 10.0.0.5 in sleep. " in str(error)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RayActorError("a1", "Worker exit"), DIED, "vision rank 1 on node 10.0.0.6 died during pid: "),
        (
            RayActorError("a1", "The actor died because its node has died."),
            LOST,
            "node 10.0.0.6 was lost, or cannot be reached, and vision rank 1 with it, during pid: ",
        ),
        (ActorUnavailableError("no answer", b"1" * 16), LOST, "node 10.0.0.6 was lost, or cannot be reached, and "),
    ],
)
def test_a_lost_node_is_no_death_of_a_rank_alone(error: RayActorError, kind: str, said: str) -> None:
    entry = Watched("vision rank 1", "pid", None, "a1", "10.0.0.6")
    found = watch._death(entry, error, {"a1": entry})
    assert isinstance(found, PartFailed)
    assert str(found).startswith(said) and found.fault == Fault(kind, "vision rank 1", "pid", "10.0.0.6")
    here = str(watch._death(replace(entry, node=""), error, {}))
    assert here.startswith("vision rank 1 died" if kind == DIED else "vision rank 1 was lost, or cannot be reached,")


def test_a_stopped_process_without_a_heartbeat_is_blamed_for_its_open_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the dataset actor, while a worker waits for it."""
    stopped = seen("the dataset actor", None, STOPPED)
    lookout = Lookout(60.0, None, "here", {})
    monkeypatch.setattr(lookout, "look", lambda stacks: {stopped.who: stopped})
    who = ("data worker 0", "the dataset actor")
    stuck = watch._stuck([Watched(one, "reading step 6", object(), lookout=lookout) for one in who], 10.0)
    assert (
        "Unfinished: data worker 0 in reading step 6; the dataset actor in reading step 6. Held up by the dat"
        in str(stuck)
    )
    assert stuck.fault == Fault(HUNG, "the dataset actor", "reading step 6")


CALL = "allreduce_(float32[4]), call 5 in group 0 of 2 ranks"


def inside(rank: int, device: bool = False) -> Seen:
    beat = Beat(3, "forward_step", 0, 66.0, 65.0, device, counts={"0": 5}, group="0", members=(0, 1), call=CALL)
    return seen(f"text rank {rank}", beat, node="10.0.0.5")


def held(*looks: list[Seen], monkeypatch: pytest.MonkeyPatch) -> PartFailed:
    """looks: what is seen, without stacks and with them."""
    lookout, left = Lookout(60.0, None, "here", {}), iter([{one.who: one for one in look} for look in looks])
    monkeypatch.setattr(lookout, "look", lambda stacks=False: next(left))
    with pytest.raises(PartFailed) as caught:
        watch._require_progress([Watched("text rank 0", "forward_step", object(), lookout=lookout)])
    return caught.value


def test_a_collective_on_gpus_that_does_not_end_is_said_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [inside(0, device=True), inside(1, device=True)]
    error = held(ranks, ranks, monkeypatch=monkeypatch)
    assert str(error).startswith(
        "text rank 0 on node 10.0.0.5 has waited for 65 s in a collective that all of its group (ranks 0, 1) have "
        f"begun: {CALL}. A device or a link between devices may be stuck: see `nvidia-smi` and Xid lines"
    )
    assert "in unlike ones" not in str(error) and "\n  text rank 1 on node 10.0.0.5: step 3, forward_step" in str(error)
    assert error.fault == Fault(HUNG, "text rank 0", "forward_step", "10.0.0.5")


def test_a_node_that_does_not_answer_is_named_and_not_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = seen("text rank 1", None, SILENT, node="10.0.0.6")
    error = held([inside(0), silent], [inside(0), silent], monkeypatch=monkeypatch)
    assert str(error).startswith(
        "node 10.0.0.6 does not answer: text rank 0 on node 10.0.0.5 has waited for text rank 1 on node 10.0.0.6 for "
        f"65 s in a collective: {CALL}. The limit"
    )
    assert error.fault == Fault(HUNG, "text rank 1", "", "10.0.0.6")


def test_a_node_that_has_no_time_for_stacks_is_not_blamed_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = seen("text rank 1", None, SILENT, node="10.0.0.5")
    computes = seen("text rank 1", Beat(3, "forward_step", 0, 66.0, counts={"0": 4}), node="10.0.0.5")
    assert find_stall({one.who: one for one in (inside(0), silent)}, 60.0) is not None
    error = held([inside(0), computes], [inside(0), silent], monkeypatch=monkeypatch)
    assert str(error).startswith("text rank 1 on node 10.0.0.5 did not enter a collective in which text rank 0 on node")
    assert str(error).count("\n  text rank 1 on node 10.0.0.5: ") == 1
    assert error.fault == Fault(HUNG, "text rank 1", "forward_step", "10.0.0.5")
