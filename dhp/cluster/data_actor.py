"""Actors that read data: one assigns samples, others decode."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.clock import ClockReading, offset_ns, read_clock
from dhp.cluster.hangs.lookout import Lookout
from dhp.cluster.hangs.vitals import Post, make_post, open_stacks
from dhp.cluster.hangs.watch import Watched, fetch, wait_all
from dhp.cluster.host import require_paths
from dhp.cluster.placement.nodes import this_node
from dhp.cluster.ray_private import actor_id
from dhp.cluster.servers import named_errors, redirect_output
from dhp.cluster.transport.shared_memory import RemoteValue
from dhp.core.batch import Batch
from dhp.core.errors import UnreadableVideo
from dhp.core.tracing import DATA, Span, keep_spans, span, take_spans

WHO = "the dataset actor"
FILLING = "filling"  # calls that run concurrently with an actor's others


class _Reader:
    """A reading actor; whatever its methods raise names the actor."""

    def __init__(self, who: str, log_dir: str | None, log_name: str, threads: int, trace: bool):
        import torch

        self._who = who
        redirect_output(log_dir, log_name)
        self._files = log_name, open_stacks(log_dir, log_name)
        torch.set_num_threads(threads)
        self._feed: Any = None
        if trace:
            keep_spans()

    def post(self) -> Post:
        """Where this process is looked at from outside."""
        name, stacks = self._files
        return make_post(name, ray.get_runtime_context().get_node_id(), stacks)

    def open(
        self, factory: Callable[..., Any], arguments: tuple[Any, ...], needs: Mapping[str, str], readers: Sequence[Any]
    ) -> None:
        """Make the feed. readers: all of them, who fill what `read` leaves unread.

        Not in the constructor: Ray turns an exception there into an actor's death."""
        with named_errors(self._who, "opening the datasets"):
            require_paths(self._who, needs)
            self._feed = factory(*arguments)
        self._fillers = cycle(readers)

    def ask(self, name: str, *arguments: Any) -> Any:
        """A value of the feed, or the answer of one of its methods."""
        with named_errors(self._who, name):
            found = getattr(self._feed, name)
            return found(*arguments) if callable(found) else found

    def read(self, batch: Any) -> tuple[Any, ...]:
        """Info and routes, then every shard's work, part by part and micro-batch by micro-batch: one object each.

        Work with unread patches goes to the readers in turn, shard by shard; in its place there is a reference to it.
        Answers once all is there. A step in which a video proves broken is read again without it, or not at all: the
        feed decides."""
        broken: dict[Any, str] = {}
        while True:
            with named_errors(self._who, _reading(batch.step)), span(_reading(batch.step), DATA):
                data = self._feed.read(batch, broken)
            micro_batches = chain.from_iterable(data.work.values())
            pieces, filled = self._hand_on(chain.from_iterable(micro_batches), batch.step)
            found = _find_broken(filled)
            if not found:
                return data.info, data.routes, *pieces
            broken |= found

    @ray.method(concurrency_group=FILLING)
    def fill(self, work: Any, step: int) -> tuple[None, Any]:
        """A status, and a shard's work with its patches. Runs concurrently with `read`, which may wait for it."""
        with named_errors(self._who, _reading(step)), span(_reading(step), DATA):
            return None, self._feed.fill(work)

    def _hand_on(self, work: Iterable[Any], step: int) -> tuple[list[Any], list[Any]]:
        """The work, some of it elsewhere; and for each of these the ref that is ready when it is there."""
        pieces, filled = [], []
        for piece in work:
            if getattr(piece, "unread", ()):
                fill = next(self._fillers).fill.options(name="data.fill", num_returns=2)
                status, ref = fill.remote(piece, step)
                piece = RemoteValue(ref)
                filled.append(status)
            pieces.append(piece)
        return pieces, filled

    def take_spans(self, keep: bool = True) -> list[Span]:
        """Spans of what was read since the last time, if the run is traced; without `keep` they are forgotten."""
        found = take_spans()
        return found if keep else []

    def read_clock(self) -> ClockReading:
        """The clock of these spans."""
        return read_clock()


def _find_broken(filled: Sequence[Any]) -> dict[Any, str]:
    """Wait for these calls to end; the videos that could not be read, and why. Raises what else was raised."""
    found = {}
    for ref in filled:
        try:
            ray.get(ref)
        except RayTaskError as error:
            if not isinstance(error.cause, UnreadableVideo):
                raise error.cause from None
            found[error.cause.file] = str(error.cause)
    return found


@dataclass(frozen=True)
class _Step:
    """A step whose reading is submitted: its refs, and the calls to watch."""

    refs: list[Any]
    watched: list[Watched]


class DatasetActor:
    """`request(step)` begins to read a step and those after it; `take(step)` gives the refs of one that was read.
    Pixels never pass through the driver.

    One actor knows the order of the data and assigns samples to steps; with `workers` of them others read
    and decode, each a whole step at a time, else it does so itself. That one runs on the driver's node, where the paths
    of the datasets were checked and the user sees them; the others take turns on `nodes`, near the ranks."""

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        micro_batches: int,
        shards: Mapping[str, int],
        batches: Mapping[str, int] = MappingProxyType({}),
        workers: int = 0,
        prefetch: int = 0,
        threads: int = 1,
        log_dir: str | None = None,
        needs: Mapping[str, str] | None = None,
        trace: bool = False,
        nodes: Sequence[str] = (),
        lookout: Lookout | None = None,
    ):
        """shards: how many each part has. batches: for how many micro-batches a piece of a part's work is, where not
        for one.

        nodes: ids of those that workers run on, in turn; none: the driver's.

        prefetch: steps whose reading is submitted beyond the one asked for.

        log_dir: where its output goes; None: to Ray.

        needs: paths that must exist on its node, by configuration key.

        trace: keep spans.

        lookout: of the run, who looks at its processes; None: nobody does."""
        self._shards = dict(shards)
        self._micro_batches = {part: -(-micro_batches // batches.get(part, 1)) for part in shards}
        self._prefetch = prefetch
        self._ahead: dict[int, _Step] = {}
        self._steps: int | None = None
        names = [WHO, *(f"data worker {number}" for number in range(workers))]
        logs = ["data", *(f"data-{number}" for number in range(workers))]
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        make = ray.remote(concurrency_groups={FILLING: 1})(_Reader)
        places = [this_node(), *islice(cycle(nodes or [this_node()]), workers)]
        # Not soft: Ray 2.60 puts a soft one without resources anywhere. A run does not outlive a node of its own.
        pinned = [{**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(at, soft=False)} for at in places]
        self._actors = [
            make.options(**own).remote(who, log_dir, log, threads, trace)
            for own, who, log in zip(pinned, names, logs, strict=True)
        ]
        self._names = {actor_id(actor): name for actor, name in zip(self._actors, names, strict=True)}
        self._readers, self._lookout = self._actors[1:] or self._actors, lookout
        if lookout is not None:
            for actor, name in zip(self._actors, names, strict=True):
                lookout.add(name, actor.post.remote())
        self._places = dict(zip(names, places, strict=True))
        args = (factory, arguments, dict(needs or {}), self._readers)
        self._watched = [self._watch(actor, "opening the datasets", actor.open.remote(*args)) for actor in self._actors]

    @property
    def size(self) -> int:
        """Processes."""
        return len(self._actors)

    def ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """A value of the feed or the answer of a method, waited for; raises as `wait_all` does."""
        actor = self._actors[0]
        return fetch(self._watch(actor, name, actor.ask.remote(name, *arguments)), timeout_s)

    def measure(self, step: int, timeout_s: float, tell: Callable[[int, int], None]) -> None:
        """Measure what the feed lacks of lengths to begin with `step`, with all workers. tell: is called with parts
        done, and all. Raises as `wait_all`."""
        keeper, submitted = self._actors[0], []
        parts = self.ask("missing", step, timeout_s=timeout_s)
        for reader, part in zip(cycle(self._readers), parts):
            measured = reader.ask.remote("measure", part)
            learned = keeper.ask.remote("learn", part, measured)
            what = "measuring samples"
            submitted.append([self._watch(reader, what, measured), self._watch(keeper, what, learned)])
        for done, calls in enumerate(submitted):
            tell(done, len(submitted))
            wait_all(calls, timeout_s)

    def end_at(self, steps: int) -> None:
        """Read nothing ahead beyond that many steps."""
        self._steps = steps

    def request(self, step: int) -> list[Watched]:
        """Begin to read a step (0-based) and those ahead of it, as far as that was not asked for yet. Its calls, the
        last of which ends when all is read."""
        last = step + self._prefetch
        for number in range(step, last + 1 if self._steps is None else max(min(last + 1, self._steps), step + 1)):
            if number not in self._ahead:
                self._ahead[number] = self._submit(number)
        return self._ahead[step].watched

    def take(self, step: int) -> Batch:
        """A requested step, whose calls have ended."""
        info, routes, *pieces = self._ahead.pop(step).refs
        return Batch(info, self._work(pieces), ray.get(routes))

    def coming(self, step: int) -> Mapping[str, list[list[Any]]]:
        """Refs of the work of a step that is not read yet, which begins to be read; none behind the last step."""
        if self._steps is not None and step >= self._steps:
            return {}
        self.request(step)
        _, _, *pieces = self._ahead[step].refs
        return self._work(pieces)

    def _work(self, pieces: Sequence[Any]) -> dict[str, list[list[Any]]]:
        """Refs of each part's work, [micro-batch][shard]."""
        work: dict[str, list[list[Any]]] = {}
        begin = 0
        for part, shards in self._shards.items():
            starts = range(begin, begin + self._micro_batches[part] * shards, shards)
            work[part] = [list(pieces[start : start + shards]) for start in starts]
            begin = starts.stop
        return work

    def take_spans_async(self, keep: bool = True) -> list[Any]:
        """For each process the ref of its spans, as `ActorGroup.take_spans_async` has one for each rank."""
        refs = [actor.take_spans.remote(keep) for actor in self._actors]
        what = "reporting its spans"
        self._watched += [self._watch(actor, what, ref) for actor, ref in zip(self._actors, refs, strict=True)]
        return refs

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to each process's clock to get this one's, nanoseconds."""
        read: Callable[[Any], ClockReading] = lambda actor: ray.get(actor.read_clock.remote(), timeout=timeout_s)
        return [offset_ns(partial(read, actor)) for actor in self._actors]

    def take_watched(self) -> list[Watched]:
        """The calls submitted since the last time, for `wait_all`."""
        taken, self._watched = self._watched, []
        return taken

    def stop(self) -> None:
        """End all of them."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _submit(self, step: int) -> _Step:
        keeper, reader = self._actors[0], self._readers[step % len(self._readers)]
        # Names without the step: of each name that a process, the metrics agent or the dashboard ever saw, they keep
        # counters for good.
        batch = keeper.ask.options(name="data.batch").remote("batch", step)
        count = 2 + sum(self._micro_batches[part] * shards for part, shards in self._shards.items())
        refs = reader.read.options(num_returns=count, name="data.read").remote(batch)
        return _Step(refs, [self._watch(keeper, _reading(step), batch), self._watch(reader, _reading(step), refs[0])])

    def _watch(self, actor: Any, what: str, ref: Any) -> Watched:
        name, lookout = self._names[actor_id(actor)], self._lookout
        node = "" if lookout is None else lookout.node_name(self._places[name])
        return Watched(name, what, ref, actor_id(actor), node, lookout)


def _reading(step: int) -> str:
    return f"reading step {step + 1}"
