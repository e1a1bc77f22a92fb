"""Runs one rank in its process: joins, then answers calls."""

import gc
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from dhp.cluster.clock import BusyTime, ClockReading, read_clock
from dhp.cluster.gpus import check_gpus, read_gpus, tell_memory
from dhp.cluster.hangs.vitals import (
    HEARTBEAT_SUFFIX,
    IN_STEP,
    Heart,
    Post,
    keep_heartbeat,
    make_post,
    open_lasting_file,
    open_stacks,
)
from dhp.cluster.host import (
    LOOPBACK,
    choose_interface,
    expand_segments,
    keep_freed_memory,
    open_listener,
    record_nccl,
    require_beacon,
    require_paths,
    require_single_gpu,
    set_local_rank,
    whereabouts,
)
from dhp.cluster.servers import named_errors, redirect_output
from dhp.cluster.transport.links import LinkParcel, Links
from dhp.cluster.transport.shared_memory import SMALLEST_BYTES, Inbox, Lookahead, Outbox, RemoteValue, take_refusals
from dhp.core.batch import Bundle
from dhp.core.collectives import RECORD
from dhp.core.graph import CUDA_IPC, NCCL, SHARED_MEMORY, Way
from dhp.core.process import count_cores
from dhp.core.reports import StageReport
from dhp.core.torch_private import all_groups, limit_group
from dhp.core.tracing import (
    BACKWARD,
    CHECKPOINT,
    FORWARD,
    HANDOFF,
    OPTIMIZER,
    TRANSFER,
    WAIT,
    Span,
    add_sent,
    add_span,
    keep_spans,
    span,
    take_spans,
)

# What a trace calls an engine's methods.
_KINDS = {
    "forward_step": FORWARD,
    "backward_step": BACKWARD,
    "evaluate_step": FORWARD,
    "generate": FORWARD,
    "save": CHECKPOINT,
}
_END_STEP = {"optimizer_step", "end_evaluation"}
FLOAT_BYTES = 8  # the norm of a stage
_Send = tuple[int, tuple[int, ...]]  # of a result: its way, and the ranks that receive it


@dataclass(frozen=True)
class GroupSettings:
    """Settings that all ranks of a group share.

    stage: its name. size: ranks.

    log_dir: None leaves what ranks print to Ray.

    loopback: nothing listens beyond this host.

    needs: paths that must exist on a rank's node, by configuration key.

    beacon: what each rank must see of the directory of checkpoints (`dhp.cluster.host`); None: nothing.

    transport: how large results are sent, see `choose_transport`.

    trace: keep spans of what each rank does.

    keep_memory: what a rank frees stays with its process, see `keep_freed_memory`.

    pinned: memory between the stages is locked for GPUs.

    cuda: ranks use GPUs. shares_gpu: other processes of the run use a rank's GPU too. beside: by rank, the ranks of
    other stages in the same place.

    check_collectives: ranks agree on each collective before it begins (`dhp.core.collectives`).

    timeout_s: of the rendezvous, and of collectives until the engine is made. collective_s: of collectives from then
    on; None: the same.

    steps_done: before this run, of which it is the continuation."""

    stage: str
    size: int
    backend: str
    threads: int
    timeout_s: float
    log_dir: str | None
    loopback: bool
    needs: Mapping[str, str] = field(default_factory=dict)
    beacon: str | None = None
    transport: str = SHARED_MEMORY
    trace: bool = False
    keep_memory: bool = False
    pinned: bool = False
    cuda: bool = False
    shares_gpu: bool = False
    beside: Sequence[tuple[str, ...]] = ()
    check_collectives: bool = False
    collective_s: float | None = None
    steps_done: int = 0


GIVEN = ...  # in the place of an argument that is sent on its own


def _peer(name: str) -> tuple[str, int]:
    """The stage and the rank of a rank that is beside another."""
    stage, _, rank = name.rpartition(" rank ")
    return stage, int(rank)


class Worker:
    """The actor. Every method answers with a status first, so that a call without results can be watched too."""

    def __init__(self, settings: GroupSettings, rank: int):
        self.settings, self.rank = settings, rank
        self._who = f"{settings.stage} rank {rank}"
        name = f"{settings.stage}-{rank}"
        redirect_output(settings.log_dir, name)
        self._heart = Heart(settings.steps_done, NCCL in settings.backend)
        file, path = open_lasting_file(settings.log_dir, f"{name}{HEARTBEAT_SUFFIX}")
        keep_heartbeat(file, self._heart.beat)
        self._files = open_stacks(settings.log_dir, name), path
        set_local_rank()
        if settings.cuda:
            expand_segments()
            record_nccl(settings.log_dir, f"{settings.stage}-{rank}")
        # Ray's CPUs may be more than there are cores (`ray start --num-cpus`), and threads that wait for one spin.
        torch.set_num_threads(min(settings.threads, count_cores()))
        if settings.keep_memory:
            keep_freed_memory()
        self._listener: socket.socket | None = None
        self._limited = 0  # process groups whose limit is that of training
        self._trainer: Any = None
        self._inbox: Inbox = Inbox(settings.pinned)
        self._outbox: Outbox | None = None
        if settings.transport in (SHARED_MEMORY, CUDA_IPC):
            self._outbox = Outbox(settings.transport == CUDA_IPC, settings.pinned)
        self._links: Links | None = None
        self._lookahead = Lookahead()
        self._idle_since = time.perf_counter_ns()
        self._busy = BusyTime(settings.cuda)
        if settings.trace:
            keep_spans()

    def post(self) -> Post:
        """Where this process is looked at from outside."""
        settings = self.settings
        return make_post(f"{settings.stage}-{self.rank}", ray.get_runtime_context().get_node_id(), *self._files)

    def listen(self) -> tuple[str, int]:
        """Open the rendezvous of the group on this rank: its address, bound to nothing wider than it must be."""
        with named_errors(self._who, "opening the rendezvous"):
            host = LOOPBACK if self.settings.loopback else ray.util.get_node_ip_address()
            self._listener = open_listener(host)
            return host, self._listener.getsockname()[1]

    def join(self, host: str, port: int) -> None:
        """Enter the process group."""
        with named_errors(self._who, "joining the group"):
            if not self.settings.loopback:
                require_paths(self._who, self.settings.needs)
                require_beacon(self._who, self.settings.beacon)
            if self.settings.cuda:
                where = whereabouts(self._who)
                require_single_gpu(where)
                check_gpus(read_gpus(sizes=False), self.settings.shares_gpu, where)
            self._join(host, port)

    def link(self, ways: tuple[Way, ...], sizes: Mapping[str, int], host: str, port: int) -> None:
        """Connect with the ranks of other stages that this one sends to or receives from. host, port: of the store
        of one of the groups. ways, sizes: see `dhp.cluster.transport.links.Links`."""
        with named_errors(self._who, "connecting with other stages"):
            settings = self.settings
            timeout = timedelta(seconds=settings.timeout_s)
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            near = [_peer(name) for name in settings.beside[self.rank]] if settings.cuda and settings.beside else ()
            device = torch.device("cuda", 0) if settings.cuda else torch.device("cpu")
            own = settings.stage, self.rank
            self._links = Links(own, ways, sizes, store, device, near, settings.timeout_s)

    def build(self, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Make the engine, in the place of one that is there; the process group is ready by then."""
        with self._named_errors("loading the stage"):
            self._trainer = None
            gc.collect()
            self._trainer = factory(*arguments)
            self._limit_collectives()

    def call(self, verbs: tuple[tuple[Any, ...], ...], *values: Any) -> Any:
        """Run methods of the engine one after another, each with its arguments, and where it is known, on which way and
        to which ranks each result goes; the next of `values` stands wherever an argument is GIVEN. Answers (status,
        *results) as far as there are results."""
        left = iter(values)
        results: list[Any] = []
        for method, arguments, *sends in verbs:
            given = tuple(next(left) if value is GIVEN else value for value in arguments)
            results += self._run(method, given, sends[0] if sends else ())
        return (None, *results) if results else None

    def _named_errors(self, what: str) -> AbstractContextManager[None]:
        beside = self.settings.beside[self.rank] if self.settings.beside else ()
        return named_errors(self._who, what, partial(tell_memory, beside))

    def _run(self, method: str, arguments: tuple[Any, ...], sends: Sequence[_Send]) -> tuple[Any, ...]:
        """The results of one method."""
        micro_batch = arguments[0] if arguments and isinstance(arguments[0], int) else None
        name = method if micro_batch is None else f"{method} {micro_batch}"
        self._heart.begin(method, micro_batch)
        add_span(f"for {name}", WAIT, self._idle_since, time.perf_counter_ns())
        with self._named_errors(method):
            with span("receive", TRANSFER):
                given = [self._open(argument) for argument in arguments]
            kind = _KINDS.get(method, OPTIMIZER)
            in_step = self._busy.measured(kind) if method in IN_STEP else nullcontext()
            with span(name, kind), in_step:
                result = getattr(self._trainer, method)(*given)
            if isinstance(result, StageReport):
                result = self._add_times(result)
            results = result if isinstance(result, tuple) else () if result is None else (result,)
            with span("send", TRANSFER):
                goes = sends or (None,) * len(results)
                results = tuple(self._hand_over(value, send) for value, send in zip(results, goes, strict=True))
                if self._outbox is not None:
                    self._outbox.flush()
        for box in (self._outbox, self._links) if method in _END_STEP else ():
            if box is not None:
                box.end_step()
        self._heart.end(method == "optimizer_step")
        self._limit_collectives()
        self._idle_since = time.perf_counter_ns()
        return results

    def _add_times(self, report: StageReport) -> StageReport:
        spent = self._busy.take(OPTIMIZER, report.comm_s)
        busy_s = sum(one.own_s + (one.comm_s or 0.0) for one in spent.values())
        return replace(report, busy_s=busy_s, spent=spent, notes=(*report.notes, *take_refusals()))

    def look_ahead(self, refs: list[Any]) -> None:
        """Fetch the next step's data during the step that runs. refs: of this rank's work, in its order; the calls that
        need it name it by `RemoteValue`."""
        self._lookahead.begin(refs)

    def take_spans(self, keep: bool = True) -> list[Span]:
        """Spans of this rank since the last time, if the run is traced; without `keep` they are forgotten."""
        found = take_spans()
        return found if keep else []

    def read_clock(self) -> ClockReading:
        """The clock of this rank's spans."""
        return read_clock()

    def _open(self, value: Any) -> Any:
        if isinstance(value, RemoteValue):
            value = self._lookahead.take(value)
        if isinstance(value, Bundle):
            return Bundle({name: self._open(tensor) for name, tensor in value.tensors.items()})
        if isinstance(value, LinkParcel):
            assert self._links is not None
            return self._links.open(value)
        return self._inbox.open(value)

    def _hand_over(self, value: Any, send: _Send | None) -> Any:
        """A result as it is sent to other processes. send: its way and the ranks there, where they are known. Its bytes
        count as often as they are written: once, or for each rank that they are sent to."""
        if isinstance(value, Bundle):
            return Bundle({name: self._hand_over(tensor, send) for name, tensor in value.tensors.items()})
        if isinstance(value, float):
            add_sent(HANDOFF, FLOAT_BYTES)
        if not isinstance(value, torch.Tensor):
            return value
        if self._links is not None and send is not None and value.nbytes >= SMALLEST_BYTES:
            parcel = self._links.send(value, *send)
            add_sent(HANDOFF, value.nbytes * len(parcel.numbers))
            return parcel
        add_sent(HANDOFF, value.nbytes)
        return value.cpu() if self._outbox is None else self._outbox.send(value)

    def _join(self, host: str, port: int) -> None:
        loopback = self.settings.loopback
        address = LOOPBACK if loopback else ray.util.get_node_ip_address()
        print(f"{self._who} on {address}; network interface: {choose_interface(address, loopback)}", flush=True)
        timeout = timedelta(seconds=self.settings.timeout_s)
        handed: dict[str, Any] = {} if self._listener is None else {"master_listen_fd": self._listener.detach()}
        store = dist.TCPStore(
            host, port, self.settings.size, self.rank == 0, timeout=timeout, wait_for_workers=False, **handed
        )
        # With its device known, NCCL connects now: what fails at it fails at the start, not in the first step's time.
        device = torch.device("cuda", 0) if NCCL in self.settings.backend else None
        dist.init_process_group(
            self.settings.backend,
            store=store,
            rank=self.rank,
            world_size=self.settings.size,
            timeout=timeout,
            device_id=device,
        )
        if self.settings.check_collectives:
            RECORD.check(dist.PrefixStore("checks", store), self.settings.timeout_s)

    def _limit_collectives(self) -> None:
        """Give all process groups the limit of a collective in training, those too that the engine has made since,
        which have the backend's own. While the stage was loaded theirs was longer: ranks read their weights at speeds
        of their own, and wait for one another."""
        groups = all_groups()
        if len(groups) != self._limited and self.settings.collective_s is not None:
            for group in groups:
                limit_group(group, timedelta(seconds=self.settings.collective_s))
            self._limited = len(groups)
