"""The Ray actors of one stage; creation, calls and the end are collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dhp.cluster.clock import ClockReading, offset_ns
from dhp.cluster.lookout import Lookout
from dhp.cluster.placement.reservation import Slot
from dhp.cluster.watch import Watched, wait_all
from dhp.cluster.worker import GIVEN, GroupSettings, Worker
from dhp.core.dispatch import Call, PerRank, spread


class ActorGroup:
    """`size` ranks of one stage. Calls go to all ranks, each rank runs its calls in the order of submission."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[Slot],
        reserved: PlacementGroup,
        nodes: Sequence[str] = (),
        lookout: Lookout | None = None,
    ):
        """nodes: the name of each rank's node, for messages; none on the machine of the run itself. lookout: of the
        run, who looks at its ranks; None: nobody does."""
        self.settings, self.size = settings, settings.size
        self._nodes = list(nodes) or [""] * settings.size
        self._watched: list[Watched] = []
        self._actors = [self._create(slot, rank, reserved) for rank, slot in enumerate(slots)]
        self._lookout = lookout
        if lookout is not None:
            for rank, actor in enumerate(self._actors):
                lookout.add(f"{settings.stage} rank {rank}", actor.post.remote())

    def start(self, factory: Callable[..., Any], *arguments: Any) -> None:
        """Submit rendezvous and the making of each rank's engine; `take_watched` has the calls to wait for."""
        address = self._actors[0].listen.options(num_returns=2).remote()
        self._submit("joining the group", [actor.join.remote(*address) for actor in self._actors])
        self._submit("loading the stage", [actor.build.remote(factory, arguments) for actor in self._actors])

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """Submit a method of the engine, by name or as one, on every rank; for each rank, the refs of its `returns`
        results."""
        return self.execute_in_turn_async(Call(method, arguments, returns))

    def execute_in_turn_async(self, *calls: Call) -> list[list[Any]]:
        """Submit methods that each rank runs one after another, in one call of the actor, which begins once the
        arguments of all are there; for each rank, the refs of all results."""
        names = "+".join(call.name for call in calls)
        given = [spread(call.arguments, self.size) for call in calls]
        counts = [spread((call.returns,), self.size) for call in calls]
        refs = []
        for rank, actor in enumerate(self._actors):
            verbs = tuple((call.name, tuple(map(_plain, of_ranks[rank]))) for call, of_ranks in zip(calls, given))
            count = sum(of_ranks[rank][0] for of_ranks in counts)
            remote = actor.call.options(num_returns=1 + count, name=f"{self.settings.stage}.{names}")
            values = (value for of_ranks in given for value in of_ranks[rank] if isinstance(value, ray.ObjectRef))
            answer = remote.remote(verbs, *values)
            refs.append(list(answer) if count else [answer])
        self._submit(", then ".join(call.name for call in calls), [of_rank[0] for of_rank in refs])
        return [of_rank[1:] for of_rank in refs]

    def execute_all(self, method: str, *arguments: Any, timeout_s: float, returns: int = 1) -> list[Any]:
        """Run `method` on every rank and wait: the result of each rank, in rank order; raises as `wait_all` does."""
        refs = self.execute_all_async(method, *arguments, returns=returns)
        wait_all(self.take_watched(), timeout_s)
        results = [ray.get(of_rank) for of_rank in refs]
        return [of_rank[0] for of_rank in results] if returns == 1 else results

    def look_ahead(self, of_ranks: Sequence[Sequence[Any]]) -> None:
        """Let each rank fetch its refs of the next step's data during the step that is submitted now."""
        # Inside a list, for Ray resolves only top-level arguments: the call does not wait for them.
        refs = [actor.look_ahead.remote(list(own)) for actor, own in zip(self._actors, of_ranks, strict=True)]
        self._submit("looking ahead", refs)

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        """For each rank, the ref of what it did since the last time; empty lists when the run is not traced. keep:
        false forgets it."""
        refs = [actor.take_spans.remote(keep) for actor in self._actors]
        self._submit("telling what it did", refs)
        return refs

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to each rank's clock to get this process's, nanoseconds."""
        return [offset_ns(partial(_read_clock, actor, timeout_s)) for actor in self._actors]

    def take_watched(self) -> list[Watched]:
        """The calls submitted since the last time, for `wait_all`."""
        taken, self._watched = self._watched, []
        return taken

    def stop(self) -> None:
        """End all ranks, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _create(self, slot: Slot, rank: int, reserved: PlacementGroup) -> Any:
        # No restarts: Ray would put an empty actor in a dead one's place and the next call would not notice.
        options = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": slot.cpus, "num_gpus": slot.gpus}
        strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=slot.bundle)
        actor = ray.remote(Worker).options(scheduling_strategy=strategy, **options)
        return actor.remote(self.settings, rank)

    def _submit(self, what: str, refs: Sequence[Any]) -> None:
        stage = self.settings.stage
        for rank, (actor, ref) in enumerate(zip(self._actors, refs, strict=True)):
            who, node = f"{stage} rank {rank}", self._nodes[rank]
            self._watched.append(Watched(who, what, ref, actor._actor_id.hex(), node, self._lookout))


def _plain(value: Any) -> Any:
    """An argument as it is sent: plain ones together, which is cheaper than one by one, and refs for Ray to resolve."""
    return GIVEN if isinstance(value, ray.ObjectRef) else value


def _read_clock(actor: Any, timeout_s: float) -> ClockReading:
    return ray.get(actor.read_clock.remote(), timeout=timeout_s)
