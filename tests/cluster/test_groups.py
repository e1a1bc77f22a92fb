"""Actor groups and the dataset actor on a real Ray: born whole, called together, ended together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from dhp.cluster.cluster import ActorGroup
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.hangs.watch import wait_all
from dhp.cluster.placement.reservation import plan_placement, reserve
from dhp.cluster.transport.shared_memory import RemoteValue
from dhp.cluster.worker import GroupSettings
from dhp.core.dispatch import Call, per_rank
from dhp.core.errors import DataError, ModelError, PartFailed, UnreadableVideo

pytestmark = pytest.mark.usefixtures("local_ray")
WAIT_S = 600.0


class Trainer:
    """Verbs with none, one and several results."""

    def __init__(self, base: int):
        import torch
        import torch.distributed as dist

        self.rank = dist.get_rank()
        ranks = torch.tensor([1.0])
        dist.all_reduce(ranks)
        self.base, self.size = base, int(ranks)

    def about(self) -> dict[str, Any]:
        return {"rank": self.rank, "size": self.size, "base": self.base}

    def nothing(self) -> None:
        print(f"rank {self.rank} was here")

    def several(self, own: int, shared: int) -> tuple[int, ...]:
        return tuple(own * 10 + k for k in range(shared))

    def name_of(self, work: Work) -> dict[str, Any]:
        return {"name": work.name, "by": work.by}

    def spread(self, count: int) -> tuple[int, ...]:
        return tuple(range(count))

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("lost")

    def die_on(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def refuse(*_: Any) -> None:
    raise ModelError("no such model")


@pytest.fixture(scope="module")
def make_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray.util.placement_group import remove_placement_group

    plan = plan_placement({"vision": range(2)}, gpus=0)
    reserved = reserve(plan, WAIT_S)
    made: list[ActorGroup] = []
    logs = tmp_path_factory.mktemp("logs")

    def make() -> ActorGroup:
        for old in made:
            old.stop()
        settings = GroupSettings("vision", 2, "gloo", 1, 60.0, str(logs), True)
        made.append(ActorGroup(settings, plan.slots["vision"], reserved))
        made[-1].logs = logs
        return made[-1]

    yield make
    for group in made:
        group.stop()
    remove_placement_group(reserved)


@pytest.fixture(scope="module")
def group(make_group: Any) -> ActorGroup:
    started = make_group()
    started.start(Trainer, 5)
    wait_all(started.take_watched(), WAIT_S)
    return started


def test_a_group_is_born_with_its_process_group(group: ActorGroup) -> None:
    told = group.execute_all("about", timeout_s=WAIT_S)
    assert told == [{"rank": rank, "size": 2, "base": 5} for rank in (0, 1)]


def test_results_come_as_one_ref_each(group: ActorGroup) -> None:
    import ray

    refs = group.execute_all_async("several", per_rank([1, 2]), 3, returns=3)
    assert [ray.get(of_rank) for of_rank in refs] == [[10, 11, 12], [20, 21, 22]]
    refs = group.execute_all_async("spread", per_rank([2, 0]), returns=per_rank([2, 0]))
    assert [ray.get(of_rank) for of_rank in refs] == [[0, 1], []]
    wait_all(group.take_watched(), WAIT_S)


def test_verbs_go_in_one_call_in_turn(group: ActorGroup) -> None:
    """Arguments that are refs stand where they were among plain ones; only one call is watched."""
    import ray

    own = per_rank([1, 2])
    calls = Call("nothing", (), 0), Call("several", (ray.put(3), 2), 2), Call("spread", (own,), own)
    refs = group.execute_in_turn_async(*calls)
    assert [ray.get(of_rank) for of_rank in refs] == [[30, 31, 0], [30, 31, 0, 1]]
    assert [w.what for w in group.take_watched()] == ["nothing, then several, then spread"] * 2


def test_what_a_rank_looked_ahead_for_is_handed_over_by_its_name(group: ActorGroup) -> None:
    """Each rank fetches refs of its own; a ref that nobody looked ahead for is fetched where it is needed."""
    import ray

    early, late = ray.put(4), ray.put(6)
    group.look_ahead([[early], []])
    for ref, wanted in ((early, 40), (late, 60)):
        (found, other) = group.execute_all_async("several", RemoteValue(ref), 1)
        assert ray.get([*found, *other]) == [wanted, wanted]
    assert {w.what for w in group.take_watched()} == {"looking ahead", "several"}


def test_calls_are_named_alike_in_every_step(group: ActorGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process, the metrics agent and the dashboard keep counters of each name they ever saw."""
    from ray.actor import ActorMethod

    submit, names = ActorMethod._remote, [[]]

    def noted(self: Any, *args: Any, name: str = "", **options: Any) -> Any:
        names[-1].append(name or self._method_name)
        return submit(self, *args, name=name, **options)

    monkeypatch.setattr(ActorMethod, "_remote", noted)
    data = DatasetActor(BatchReader, micro_batches=3, shards={"vision": 2, "text": 1}, workers=2, prefetch=1)
    try:
        wait_all(data.take_watched(), WAIT_S)
        for step in range(4):
            names.append([])
            wait_all(data.request(step), WAIT_S)
            data.take(step)
            group.execute_all_async("several", step, 3, returns=3)
            data.take_spans_async()
            group.take_spans_async()
            wait_all(data.take_watched() + group.take_watched(), WAIT_S)
        opening, *of_steps = map(set, names)
        assert opening == {"open"}
        assert of_steps == [{"data.batch", "data.read", "vision.several", "take_spans"}] * 4
    finally:
        data.stop()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_unread_is_filled_by_all_that_read(workers: int, group: ActorGroup) -> None:
    import ray

    actor = DatasetActor(LongFeed, **SHAPE, workers=workers)
    try:
        wait_all(actor.take_watched(), WAIT_S)
        wait_all(actor.request(0), WAIT_S)
        work = actor.take(0).work["vision"]
        assert [ray.get(shards[1]) for shards in work] == [Work(f"v 0 {m} 1") for m in range(3)]
        found = [group.execute_all("name_of", ref, timeout_s=WAIT_S)[0] for ref, _ in work]  # as if it came directly
        names, processes = tuple(one["name"] for one in found), [one["by"] for one in found]
        assert names == tuple(f"v 0 {m} 0" for m in range(3))
        assert len(set(processes)) == max(workers, 1)
        wait_all(actor.request(6), WAIT_S)
        with pytest.raises(DataError, match="^video w.mp4 is gone$"):
            wait_all(actor.request(5), WAIT_S)
    finally:
        actor.stop()


def test_every_call_is_watched_once(group: ActorGroup) -> None:
    group.execute_all_async("nothing", returns=0)
    group.execute_all_async("about")
    taken = group.take_watched()
    assert [(w.who, w.what) for w in taken] == [
        (f"vision rank {rank}", method) for method in ("nothing", "about") for rank in (0, 1)
    ]
    assert len({w.actor for w in taken}) == 2
    assert group.take_watched() == []
    wait_all(taken, WAIT_S)


def test_what_a_rank_prints_is_in_its_own_file(group: ActorGroup) -> None:
    group.execute_all("nothing", timeout_s=WAIT_S, returns=0)
    for rank in (0, 1):
        assert f"rank {rank} was here" in (group.logs / f"vision-{rank}.log").read_text()


def test_a_rank_that_raises_is_named_and_the_others_stay_usable(group: ActorGroup) -> None:
    with pytest.raises(PartFailed, match=r"^vision rank 1 failed in fail_on: KeyError: 'lost'\n"):
        group.execute_all("fail_on", 1, timeout_s=WAIT_S, returns=0)
    assert len(group.execute_all("about", timeout_s=WAIT_S)) == 2


def test_a_rank_that_dies_in_a_collective_is_named(group: ActorGroup) -> None:
    """The last test of `group`: its other rank waits in the collective or has lost its connection."""
    with pytest.raises(PartFailed, match="^vision rank 0 died during die_on: "):
        group.execute_all("die_on", 0, timeout_s=WAIT_S, returns=0)


def test_a_trainer_that_cannot_be_made_says_why(make_group: Any) -> None:
    made = make_group()
    made.start(refuse)
    with pytest.raises(ModelError, match="^no such model$"):
        wait_all(made.take_watched(), WAIT_S)


class BatchReader:
    size = 7

    def __init__(self) -> None:
        self.learned: dict[int, str] = {}

    def batch(self, step: int) -> Any:
        if step == 11:
            raise DataError("dataset 'made', element 2: too long")
        return SimpleNamespace(step=step)

    def read(self, batch: Any, broken: dict[str, str]) -> Any:
        step = batch.step
        if step == 9:
            raise DataError("dataset 'made', element 1: broken")
        two = lambda kind: tuple(tuple(f"{kind} {step} {m} {n}" for n in range(2)) for m in range(3))
        work = {"vision": two("v"), "text": tuple(row[:1] for row in two("t"))}
        return SimpleNamespace(info=f"info {step}", routes={"vision": f"routes {step}"}, work=work)

    def missing(self, step: int) -> list[int]:
        return [step, step + 1, step + 2]

    def measure(self, part: int) -> str:
        return f"{part} by {os.getpid()}"

    def learn(self, part: int, measured: str) -> None:
        self.learned[part] = measured


@dataclass(frozen=True)
class Work:
    """What a feed may leave unread. by: the process that filled it."""

    name: str
    unread: tuple[str, ...] = ()
    by: int = 0


class LongFeed(BatchReader):
    """Vision's first shards hold a part of a long video; that of step 5 is broken, and so is one of step 6, which is
    left out then."""

    def read(self, batch: Any, broken: dict[str, str]) -> Any:
        read = super().read(batch, broken)
        video = {5: "lost", 6: "left out" if broken else "broken"}.get(batch.step, "frames")
        vision = tuple((Work(first, (video,)), Work(other)) for first, other in read.work["vision"])
        assert broken in ({}, {Path("v.mp4"): "video v.mp4 is cut off"})
        return SimpleNamespace(**{**vars(read), "work": {**read.work, "vision": vision}})

    def fill(self, work: Work) -> Work:
        if work.unread == ("broken",):
            raise UnreadableVideo("video v.mp4 is cut off", Path("v.mp4"))
        if work.unread == ("lost",):
            raise DataError("video w.mp4 is gone")
        return Work(work.name, by=os.getpid())


def no_feed() -> None:
    raise DataError("a.json: malformed JSON at line 3")


SHAPE = {"micro_batches": 3, "shards": {"vision": 2, "text": 1}}


def test_the_dataset_actor_hands_out_refs_by_part_micro_batch_and_shard() -> None:
    import ray

    actor = DatasetActor(BatchReader, **SHAPE)
    try:
        assert actor.ask("size", timeout_s=WAIT_S) == 7
        assert [w.what for w in actor.take_watched()] == ["opening the datasets"]
        reading = actor.request(4)
        assert [w.what for w in reading] == ["reading step 5"] * 2
        wait_all(reading, WAIT_S)
        step = actor.take(4)
        assert ray.get(step.info) == "info 4" and step.routes == {"vision": "routes 4"}
        assert [ray.get(row) for row in step.work["vision"]] == [[f"v 4 {m} 0", f"v 4 {m} 1"] for m in range(3)]
        assert [ray.get(row) for row in step.work["text"]] == [[f"t 4 {m} 0"] for m in range(3)]
        for step, reason in ((9, "element 1: broken"), (11, "element 2: too long")):
            with pytest.raises(DataError, match=f"^dataset 'made', {reason}$"):
                wait_all(actor.request(step), WAIT_S)
    finally:
        actor.stop()


class OnePass(BatchReader):
    """Pictures of two micro-batches together, and those of the third."""

    def read(self, batch: Any, broken: dict[str, str]) -> Any:
        read = super().read(batch, broken)
        return SimpleNamespace(**{**vars(read), "work": {**read.work, "vision": read.work["vision"][:2]}})


def test_work_that_is_for_several_micro_batches_comes_in_fewer_pieces() -> None:
    import ray

    actor = DatasetActor(OnePass, **SHAPE, batches={"vision": 2, "text": 1})
    try:
        wait_all(actor.request(1), WAIT_S)
        step = actor.take(1)
        assert [ray.get(row) for row in step.work["vision"]] == [[f"v 1 {m} 0", f"v 1 {m} 1"] for m in range(2)]
        assert [ray.get(row) for row in step.work["text"]] == [[f"t 1 {m} 0"] for m in range(3)]
    finally:
        actor.stop()


@pytest.fixture(scope="module")
def data() -> Iterator[DatasetActor]:
    """One that deals out and two that read, two steps ahead."""
    actor = DatasetActor(BatchReader, **SHAPE, workers=2, prefetch=2, trace=True)
    wait_all(actor.take_watched(), WAIT_S)
    yield actor
    actor.stop()


def test_workers_read_in_turn_and_ahead_but_not_beyond_the_end(data: DatasetActor) -> None:
    import ray

    assert data.size == 3
    data.end_at(4)
    for step in range(4):
        reading = data.request(step)
        assert data.request(step) == reading  # what was asked for twice is read once
        assert [w.who for w in reading] == ["the dataset actor", f"data worker {step % 2}"]
        wait_all(reading, WAIT_S)
        assert set(data._ahead) == set(range(step, min(step + 3, 4)))
        assert ray.get(data.take(step).info) == f"info {step}"
    assert not data._ahead


def test_a_bad_sample_read_ahead_is_told_when_its_step_comes(data: DatasetActor) -> None:
    data.end_at(20)
    wait_all(data.request(8), WAIT_S)  # 9 and 11 are read ahead, and bad
    with pytest.raises(DataError, match="element 1: broken"):
        wait_all(data.request(9), WAIT_S)
    wait_all(data.request(10), WAIT_S)


def test_workers_measure_what_is_missing_and_the_first_actor_keeps_it(data: DatasetActor) -> None:
    told: list[tuple[int, int]] = []
    data.measure(1, WAIT_S, lambda done, parts: told.append((done, parts)))
    learned = data.ask("learned", timeout_s=WAIT_S)
    assert told == [(0, 3), (1, 3), (2, 3)]
    by = {part: int(text.split()[-1]) for part, text in learned.items()}
    assert list(by) == [1, 2, 3] and by[1] == by[3] != by[2]


def test_a_worker_that_died_idle_is_named_when_spans_are_collected(data: DatasetActor) -> None:
    """The last test of `data`."""
    import ray

    data.take_spans_async()
    wait_all(data.take_watched(), WAIT_S)
    ray.kill(data._actors[2])
    with pytest.raises(RayActorError):  # a moment later
        while True:
            ray.get(data._actors[2].read_clock.remote())
    data.end_at(13)
    wait_all(data.request(12), WAIT_S)  # the other one's
    data.take_spans_async()
    with pytest.raises(PartFailed, match="^data worker 1 died during reporting its spans: "):
        wait_all(data.take_watched(), WAIT_S)


def test_datasets_that_cannot_be_opened_are_told_as_they_are() -> None:
    actor = DatasetActor(no_feed, micro_batches=1, shards={"vision": 1})
    try:
        with pytest.raises(DataError, match="^a.json: malformed JSON at line 3$"):
            wait_all(actor.take_watched(), WAIT_S)
    finally:
        actor.stop()
