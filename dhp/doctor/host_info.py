"""Says what a machine has for training, and tests it."""

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from dhp.core.process import count_cores
from dhp.parallel.attention.attention_kernels import AUTO, segment_kernel
from dhp.parallel.device import Extra, find_extras

MIB = 2**20
SENT_MIB = 16
ROUNDS = 5
LIMIT_S = 60.0
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Tried:
    """One thing that was tried. rate: MiB a second; None: it did not work, and error says why."""

    name: str
    rate: float | None
    error: str = ""

    def __str__(self) -> str:
        if self.rate is None:
            return f"does not work: {self.error}"
        return f"{self.rate:,.0f} MiB/s" if self.rate < 10_000 else f"{self.rate / 1024:,.1f} GiB/s"


def try_all() -> list[Tried]:
    """Collectives of two to eight ranks, on GPUs where there are two, and shared memory."""
    gpus = torch.cuda.device_count()
    ranks, backend = (min(8, gpus), "nccl") if gpus > 1 else (2, "gloo")
    return [*_collectives(ranks, backend), _shared_memory()]


def _collectives(ranks: int, backend: str) -> list[Tried]:
    names = [f"{name} over {ranks} ranks ({backend})" for name in _MOVES]
    with tempfile.TemporaryDirectory(prefix="dhp-doctor-") as folder:
        context = get_context("spawn")  # a fork would have this process's threads and GPUs
        started = [
            context.Process(target=_rank, args=(rank, ranks, backend, folder), daemon=True) for rank in range(ranks)
        ]
        try:
            for process in started:
                process.start()
            deadline = time.monotonic() + LIMIT_S
            while any(process.exitcode is None for process in started) and time.monotonic() < deadline:
                if any(process.exitcode for process in started):
                    break
                time.sleep(0.05)
        finally:
            ended = [process.exitcode for process in started if process.pid is not None]
            for process in started:
                if process.pid is not None:
                    process.kill()
                    process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        path = Path(folder, "rates")
        if errors or not path.exists():
            how = [f"by signal {-code}" if code < 0 else f"with status {code}" for code in ended if code]
            died = [f"a rank ended {one}" for one in how]
            why = [*errors, *died, f"the ranks did not end in {LIMIT_S:g} s"][0]
            return [Tried(name, None, why) for name in names]
        return [Tried(name, float(line)) for name, line in zip(names, path.read_text().splitlines(), strict=True)]


def _rank(rank: int, ranks: int, backend: str, folder: str) -> None:
    """One process: what it raises is written for the one that asked."""
    try:
        _time_moves(rank, ranks, backend, folder)
    except Exception as error:  # whatever a backend raises is the answer
        Path(folder, f"error-{rank}").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise SystemExit(1) from error


def _time_moves(rank: int, ranks: int, backend: str, folder: str) -> None:
    """Rank 0 writes MiB a second of each move."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", ranks)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        rates = [SENT_MIB / _seconds(move, device) for move in _MOVES.values()]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "rates").write_text("".join(f"{rate}\n" for rate in rates))


def _seconds(move: Callable[[torch.Tensor], Any], device: torch.device) -> float:
    """The fastest of some rounds, behind one that does not count. Raises RuntimeError for a wrong sum."""
    found = []
    for _ in range(ROUNDS + 1):
        elements = SENT_MIB * MIB // 4
        tensor = torch.ones(elements - elements % dist.get_world_size(), device=device)
        dist.barrier()
        begun = time.perf_counter()
        move(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    if float(tensor[-1]) != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones came back as {float(tensor[-1])}")


def _all_to_all(tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    if float(received.min()) != 1.0:
        raise RuntimeError("what was sent came back changed")


_MOVES: dict[str, Callable[[torch.Tensor], None]] = {"all-reduce": _all_reduce, "all-to-all": _all_to_all}


def _shared_memory() -> Tried:
    """As tensors go between parts on one host: written once, read once."""
    name, size = "shared memory", 4 * SENT_MIB * MIB
    try:
        memory = SharedMemory(create=True, size=size)
    except OSError as error:
        return Tried(name, None, str(error))
    try:
        # Room is not taken before pages are written, and a process that finds none then ends by SIGBUS.
        os.posix_fallocate(getattr(memory, "_fd"), 0, size)  # noqa: B009
    except OSError as error:
        memory.close()
        memory.unlink()
        return Tried(name, None, str(error))
    try:
        source = torch.ones(size, dtype=torch.uint8)
        target = torch.frombuffer(memory.buf, dtype=torch.uint8, count=size)
        target.copy_(source)  # the pages are made
        begun = time.perf_counter()
        target.copy_(source)
        source.copy_(target)
        rate = 2 * size / MIB / (time.perf_counter() - begun)
        del target
        return Tried(name, rate)
    finally:
        memory.close()
        memory.unlink()


def advice(tried: list[Tried], gpus: int, cpus: int) -> list[str]:
    """What to do about what was found."""
    found = [f"{one.name} does not work: runs that need it will fail. {one.error}" for one in tried if one.rate is None]
    if _SHARED.is_dir() and (free := shutil.disk_usage(_SHARED).free) < 2 * 2**30:
        found.append(
            f"/dev/shm has {free / MIB:,.0f} MiB left: tensors between parts and read samples lie there. Give the "
            "container more (docker run --shm-size=8g)"
        )
    if not gpus:
        found.append("torch finds no GPU: runs compute on CPUs, which is for trying things out")
    if gpus and cpus < 2 * gpus:
        found.append(
            f"{cpus} CPU cores for {gpus} GPUs: reading and the ranks' own processes want two for each at least"
        )
    return found


@dataclass(frozen=True)
class HostInfo:
    """The machine that this process is on. gpus: name and compute capability of each."""

    python: str
    torch: str
    transformers: str
    ray: str
    cpus: int
    gpus: tuple[str, ...]
    links: str
    attention: str
    extras: tuple[Extra, ...]
    tried: tuple[Tried, ...] = ()
    advice: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(asdict(self))

    def as_table(self) -> str:
        """Aligned lines for the terminal."""
        rows = [
            ("python", self.python),
            ("torch", self.torch),
            ("transformers", self.transformers),
            ("CPU cores", str(self.cpus)),
            ("ray", self.ray),
            ("GPUs", ", ".join(self.gpus) or "none that torch finds"),
            *((("links", self.links),) if self.links else ()),
            ("attention", self.attention),
            *((extra.name, str(extra)) for extra in self.extras),
            *((one.name, str(one)) for one in self.tried),
        ]
        width = max(len(name) for name, _ in rows) + 2
        advised = [f"\n{line}" for line in self.advice]
        return "\n".join(f"{name:{width}}{value}" for name, value in rows) + "".join(advised)


def look_around(tries: bool = False) -> HostInfo:
    """The machine's versions, processors, GPUs and packages. tries: collectives and shared memory, some seconds; else
    of a GPU only its properties are read."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.append(f"{torch.cuda.get_device_name(number)} (compute capability {major}.{minor})")
    tried, cpus = try_all() if tries else [], count_cores()
    device = torch.device("cuda" if gpus else "cpu")
    dtype = torch.bfloat16 if gpus else torch.float32
    return HostInfo(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        ray=version("ray"),
        cpus=cpus,
        gpus=tuple(gpus),
        links=_links(len(gpus)),
        attention=f"{segment_kernel(AUTO, device, dtype)} ({str(dtype).removeprefix('torch.')} on {device.type})",
        extras=find_extras(),
        tried=tuple(tried),
        advice=tuple(advice(tried, len(gpus), cpus)) if tries else (),
    )


def _links(gpus: int) -> str:
    """Whether each GPU reads the others' memory; "" where there are not two."""
    if gpus < 2:
        return ""
    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return "each GPU reads the others' memory"
    return f"{len(apart)} of {len(pairs)} pairs of GPUs cannot read each other's memory, as {apart[0]}"
