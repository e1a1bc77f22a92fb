"""Ranks that hang, on a real Ray: who did not enter a collective is named, with what it does."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dhp.cluster.cluster import ActorGroup
from dhp.cluster.hangs import lookout as lookout_module
from dhp.cluster.hangs.lookout import RUNS, SILENT, Lookout, Seen, Sight
from dhp.cluster.hangs.vitals import Beat, Post
from dhp.cluster.hangs.watch import wait_all
from dhp.cluster.placement.nodes import this_node
from dhp.cluster.placement.reservation import plan_placement, reserve
from dhp.cluster.worker import GroupSettings
from dhp.core.dispatch import per_rank
from dhp.core.errors import HUNG, Fault, PartFailed
from dhp.core.reports import StageReport
from dhp.core.tracing import take_waited
from dhp.observe.ranks import STEPS, RankShare, Stragglers

pytestmark = pytest.mark.usefixtures("local_ray")
WAIT_S = 600.0
RANKS, LIMIT_S = 3, 77.0


class Trainer:
    """Ranks that meet in a collective after seconds of their own."""

    def __init__(self) -> None:
        from dhp.parallel.traffic import count_collectives, time_collectives

        count_collectives()
        time_collectives()

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def forward_step(self, micro_batch: int, after_s: float) -> None:
        import torch
        import torch.distributed as dist

        time.sleep(after_s)
        dist.all_reduce(torch.ones(2))

    def optimizer_step(self, rank: int) -> StageReport:
        return StageReport(rank, None, 1.0, {}, None, {}, comm_s=take_waited())

    def split(self) -> None:
        import torch.distributed as dist

        dist.new_group([0, 1])

    def limits(self) -> list[float]:
        import torch
        from torch.distributed.distributed_c10d import _world

        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        return [backend.options._timeout.total_seconds() for backend in backends]


@dataclass(frozen=True)
class Started:
    group: ActorGroup
    lookout: Lookout
    pids: list[int]
    logs: Path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    from ray.util.placement_group import remove_placement_group

    plan = plan_placement({"text": range(RANKS)}, gpus=0)
    reserved = reserve(plan, WAIT_S)
    logs = tmp_path_factory.mktemp("logs")
    lookout = Lookout(60.0, str(logs), this_node(), {})
    settings = GroupSettings("text", RANKS, "gloo", 1, WAIT_S, str(logs), True, collective_s=LIMIT_S, steps_done=4)
    group = ActorGroup(settings, plan.slots["text"], reserved, (), lookout)
    group.start(Trainer)
    wait_all(group.take_watched(), WAIT_S)
    yield Started(group, lookout, [rank["pid"] for rank in group.execute_all("about", timeout_s=WAIT_S)], logs)
    group.stop()
    remove_placement_group(reserved)


def failure(started: Started, *seconds: float, collective_s: float, step_s: float = WAIT_S) -> PartFailed:
    """Of ranks that compute for so long before they meet. All have gone on when it returns."""
    before, started.lookout.collective_s = started.lookout.collective_s, collective_s
    started.group.execute_all_async("forward_step", 1, per_rank(list(seconds)), returns=0)
    with pytest.raises(PartFailed) as caught:
        wait_all(started.group.take_watched(), step_s)
    started.lookout.collective_s = before
    for pid in started.pids:
        os.kill(pid, signal.SIGCONT)
    started.group.execute_all("about", timeout_s=WAIT_S)
    return caught.value


def test_groups_have_the_limit_of_training_once_the_stage_is_loaded_later_ones_too(started: Started) -> None:
    group = started.group
    assert group.execute_all("limits", timeout_s=WAIT_S) == [[LIMIT_S]] * RANKS
    group.execute_all_async("split", returns=0)
    assert group.execute_all("limits", timeout_s=WAIT_S) == [[LIMIT_S] * 2, [LIMIT_S] * 2, [LIMIT_S]]


@pytest.mark.slow
def test_a_rank_that_is_slow_within_the_limit_is_no_hang(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout_module, "EVERY_S", 0.5)
    looks, watch = [], started.lookout.watch
    monkeypatch.setattr(started.lookout, "watch", lambda: looks.append(watch()))
    started.group.execute_all_async("forward_step", 0, per_rank([0.0, 0.0, 4.0]), returns=0)
    assert wait_all(started.group.take_watched(), WAIT_S) and looks and set(looks) == {None}


def test_a_rank_that_does_not_enter_is_named_with_what_it_does(started: Started) -> None:
    error = failure(started, 0.0, 0.0, 6.0, collective_s=2.0)
    said = str(error)
    assert said.startswith("text rank 2 did not enter a collective in which text rank ")
    entered = re.search(
        r": allreduce_\(float32\[2\]\), call (\d+) in group 0 of 3 ranks\. The limit is cluster\.", said
    )
    assert entered and "cluster.collective_timeout_s=2:" in said and "Held up" not in said
    calls = int(entered[1])
    second, *others = said.splitlines()[1:4]  # who is to blame comes first
    assert second.startswith("  text rank 2: step 5, forward_step of micro-batch 1 for ")
    if calls > 1:
        assert f"; collectives so far: {calls - 1} in group 0; the last call: allreduce_(float32[2]), call " in second
    assert all(", in one collective for " in line and f": {calls} in group 0;" in line for line in others)
    assert "\n  text-0, text-1: in all_reduce (torch/distributed/distributed_c10d.py:" in said
    assert "\n  text-2: in forward_step (" in said
    assert error.fault == Fault(HUNG, "text rank 2", "forward_step")
    assert sorted(file.name for file in started.logs.glob("*.stacks")) == [f"text-{rank}.stacks" for rank in range(3)]


def test_a_stopped_rank_is_named_as_that(started: Started) -> None:
    os.kill(started.pids[1], signal.SIGSTOP)
    error = failure(started, 0.0, 0.0, 0.0, collective_s=3.0)
    said = str(error)
    assert re.match(
        r"text rank 1 is stopped or gone: text rank [02] has waited for it for \d+ s in a collective: allreduce", said
    )
    assert f"text rank 1: is stopped (SIGSTOP or a debugger; `kill -CONT {started.pids[1]}` lets it go on)" in said
    assert error.fault.who == "text rank 1"


@pytest.mark.slow
def test_where_no_call_ends_the_rank_that_others_wait_for_is_blamed(started: Started) -> None:
    error = failure(started, 0.0, 6.0, 0.0, collective_s=60.0, step_s=3.0)
    said = str(error)
    assert "no call finished for 3 s. Unfinished: text rank 0 in forward_step; text rank 1 in forward_step;" in said
    assert "Held up by text rank 1. A slow step needs a larger cluster.step_timeout_s" in said
    assert error.fault == Fault(HUNG, "text rank 1", "forward_step")


def test_processes_of_a_node_that_does_not_answer_stay_with_what_they_did_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now, beat = [100.0], Beat(3, "forward_step", 0, 4.0, 2.0, saved_s=50.0, counts={"0": 5})
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lookout = Lookout(60.0, None, "here", {"far": "10.0.0.6"})
    known, new = (Post(name, "far", 1, 0.0, "/missing") for name in ("text-1", "text-2"))
    lookout._posts = [("text rank 1", known)]
    answers = [[Sight(known, RUNS, beat)], [], [], [Sight(known, RUNS, beat)]]
    monkeypatch.setattr(lookout, "_ask", lambda *_: None)
    monkeypatch.setattr(lookout, "_answer", lambda *_: answers.pop(0))
    assert lookout.look()["text rank 1"].sight == Sight(known, RUNS, beat)
    lookout._posts.append(("text rank 2", new))
    for later in (130.0, 400.0):  # seconds go on
        now[0] = later
        far = lookout.look()
        since = later - 100.0
        last = replace(beat, verb_s=4.0 + since, held_s=2.0 + since, saved_s=50.0 + since)
        assert far["text rank 1"] == Seen("text rank 1", "10.0.0.6", Sight(known, SILENT, last))
        assert far["text rank 2"].sight == Sight(new, SILENT)
    lookout._posts.pop()
    assert lookout.look()["text rank 1"].sight == Sight(known, RUNS, beat)


@pytest.mark.slow
def test_a_rank_that_computes_for_longer_is_slow_and_those_that_wait_for_it_are_not(started: Started) -> None:
    """What of a step's methods is not spent in a collective is a rank's own."""
    group, stragglers = started.group, Stragglers()
    busy, own = [0.0] * RANKS, [0.0] * RANKS
    group.execute_all("optimizer_step", per_rank([0, 1, 2]), timeout_s=WAIT_S)
    for _ in range(STEPS):
        group.execute_all_async("forward_step", 0, per_rank([0.02, 0.12, 0.02]), returns=0)
        reports = group.execute_all("optimizer_step", per_rank([0, 1, 2]), timeout_s=WAIT_S)
        shares = [RankShare(f"text rank {one.rank}", one.busy_s - one.comm_s, 1.0) for one in reports]
        busy = [sum(both) for both in zip(busy, (one.busy_s for one in reports), strict=True)]
        own = [sum(both) for both in zip(own, (share.seconds for share in shares), strict=True)]
        stragglers.add({"text": shares})
    assert list(stragglers.named) == ["text rank 1"]
    assert busy[0] > 1.5 * own[0] and busy[2] > 1.5 * own[2]  # they were as busy as it is, waiting for it
