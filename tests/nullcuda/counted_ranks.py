"""Counts what each rank of a run on null CUDA does in each step: a file of JSON lines a rank, in NULLCUDA_COUNTS.

A line a step: launches, calls of libraries and waits by phase, where the host waited, and bytes of torch's allocator. A
last line: bytes that are left when the engine has been let go."""

import ctypes
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

PHASES = {
    "forward_step": "forward",
    "backward_step": "backward",
    "tied_gradient": "norm",
    "grad_norm_sq": "norm",
    "optimizer_step": "update",
}
LET_GO_S = 60  # for all ranks of a stage
FOLDER = "NULLCUDA_COUNTS"


class Runtime:
    """The stand-in for CUDA's runtime in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")
        self._library.nullcuda_account.restype = ctypes.c_void_p
        # As account.h has it: pid and device, bytes, peak, launches, calls, waits, copies.
        self._account = (ctypes.c_long * 7).from_address(self._library.nullcuda_account())

    def counts(self) -> Counter[str]:
        """Launches of kernels, calls of libraries, waits and copies, so far."""
        return Counter(dict(zip(("launches", "calls", "waits", "copies"), self._account[3:7], strict=True)))

    def on_wait(self, tell: Callable[[], None]) -> None:
        """Call `tell` in each wait of the host, in the thread that waits."""
        self._kept = ctypes.CFUNCTYPE(None)(tell)
        self._library.nullcuda_on_wait(self._kept)

    def names(self) -> Counter[str]:
        """Launches by a kernel's name, mangled, since the last time."""
        with NamedTemporaryFile("r") as file:
            self._library.nullcuda_names(file.name.encode())
            lines = [line.split(" ", 1) for line in Path(file.name).read_text().splitlines()]
        found: Counter[str] = Counter()
        for launches, name in lines:
            found[name] += int(launches)
        return found


class Counted:
    """One rank. name: as its log has it."""

    def __init__(self, name: str) -> None:
        self._file = Path(os.environ[FOLDER]) / f"{name}.jsonl"
        self._runtime, self._phase, self.peak = Runtime(), "", 0
        self._begin()
        self._runtime.on_wait(self._wait)

    def run(self, method: str, call: Callable[[], Any]) -> Any:
        """What `call` answers, one method of the engine. An update ends a step."""
        self._phase = PHASES.get(method, "")
        before = self._runtime.counts()
        try:
            return call()
        finally:
            if self._phase:
                spent = self._runtime.counts()
                spent.subtract(before)
                self._spent.setdefault(self._phase, Counter()).update(spent)
                self._methods[method] += 1
            if self._phase == "update":
                self._end()
            self._phase = ""

    def receive(self) -> None:
        """Count a tensor that another rank's memory of a GPU has, or that is on its way from there."""
        self._methods["receive"] += 1

    def write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _begin(self) -> None:
        self._spent: dict[str, Counter[str]] = {}
        self._methods: Counter[str] = Counter()
        self._places: Counter[str] = Counter()

    def _end(self) -> None:
        import torch

        from dhp.core.torch_private import count_graphs

        held, (graphs, _) = torch.cuda.memory_allocated(), count_graphs()
        self.write(
            {"graphs": graphs, "phases": self._spent, "methods": self._methods, "places": self._places}
            | self._bytes(held)
        )
        self._begin()

    def _bytes(self, held: int) -> dict[str, int]:
        return {"peak_bytes": self.peak, "held_bytes": held}

    def _wait(self) -> None:
        if self._phase:
            self._places[f"{self._phase}: {place_of(sys._getframe())}"] += 1


def place_of(frame: Any) -> str:
    """The innermost function of dhp that is being called, and that of a library where it is what waits."""
    within = ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        _, found, below = file.rpartition("/dhp/")
        if found:
            return f"{below}:{name}{within}"
        _, library, inside = file.rpartition("/deepspeed/")
        if library and not within:
            within = f" in deepspeed/{inside}:{name}"
        frame = frame.f_back
    return f"outside of dhp{within}"


@cache
def counted(name: str) -> Counted:
    """This process's rank."""
    return Counted(name)


def count(module: ModuleType) -> None:
    """Count what a module of dhp does, which has been imported just now."""
    if FOLDER in os.environ:
        _COUNTING[module.__name__](module)


def _count_worker(module: Any) -> None:
    run = module.Worker._run

    def counted_run(worker: Any, method: str, *given: Any) -> Any:
        def call() -> Any:
            return run(worker, method, *given)

        if not worker.settings.cuda:
            return call()
        return counted(f"{worker.settings.stage}-{worker.rank}").run(method, call)

    open_value = module.Worker._open

    def counted_open(worker: Any, value: Any) -> Any:
        if worker.settings.cuda and isinstance(value, (DeviceParcel, LinkParcel)):
            counted(f"{worker.settings.stage}-{worker.rank}").receive()
        return open_value(worker, value)

    from dhp.cluster.transport.links import LinkParcel
    from dhp.cluster.transport.shared_memory import DeviceParcel

    module.Worker._run, module.Worker._open, module.Worker.let_go = counted_run, counted_open, _let_go


def _let_go(worker: Any) -> None:
    """Drop the engine and all that holds its tensors, and write what is left, but for what other ranks still map."""
    import torch

    boxes = [worker._outbox, getattr(worker._links, "_outbox", None)]
    segments = [segment for box in boxes if box is not None for segment in (*box._segments, *box._outgrown)]
    lent = sum(segment.capacity for segment in segments if not segment.waits)
    del boxes, segments
    worker._trainer = worker._outbox = worker._inbox = worker._links = worker._lookahead = None
    gc.collect()
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    left = max(0, torch.cuda.memory_allocated() - lent)
    name = f"{worker.settings.stage}-{worker.rank}"
    chosen = {"backend": worker.settings.backend, "transport": worker.settings.transport}
    counted(name).write({"left_bytes": left, "workspace_bytes": held - left, **chosen})


def _count_cluster(module: Any) -> None:
    stop = module.ActorGroup.stop

    def counted_stop(group: Any) -> None:
        if group.settings.cuda:
            _await([actor.let_go.remote() for actor in group._actors])
        stop(group)

    module.ActorGroup.stop = counted_stop


def _await(refs: list[Any]) -> None:
    import ray

    try:
        ray.get(refs, timeout=LET_GO_S)
    except Exception as error:  # of a run that failed: it is not for this to say so
        print(f"null CUDA: {error}", file=sys.stderr)


def _count_stage(module: Any) -> None:
    peak_memory = module.StageEngine._peak_memory

    def counted_peak(engine: Any) -> Any:
        import torch

        if engine.device.type == "cuda":
            counted(f"{engine.spec.name}-{engine.rank}").peak = torch.cuda.max_memory_allocated()
        return peak_memory(engine)

    module.StageEngine._peak_memory = counted_peak


_COUNTING: dict[str, Callable[[Any], None]] = {
    "dhp.cluster.worker": _count_worker,
    "dhp.cluster.cluster": _count_cluster,
    "dhp.engine.stage": _count_stage,
}
