"""Prepares a node for actors: environment, heap, paths, network interface.

A beacon is a file that the driver puts into a directory that all nodes must share. A rank that does not see it looks
at another disk, and would write its share of a checkpoint where it is not found.

Left alone, gloo looks up the host's own name, which many hosts map to 127.0.1.1 or to a container bridge, and ranks on
other hosts then wait for a connection that cannot come."""

import ctypes
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from tempfile import mkstemp

import psutil
import ray

from dhp.core.errors import ConfigError
from dhp.core.torch_private import set_allocator

LOCAL_RANK = "LOCAL_RANK"
KEEPS_ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ALLOCATOR, OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch reads the second one too
EXPANDABLE = "expandable_segments:True"


def set_local_rank() -> None:
    """A process sees its own device alone, so it is always the first; what Slurm or torchrun set counts devices that it
    does not see."""
    os.environ[LOCAL_RANK] = "0"


def require_single_gpu(where: str) -> None:
    """Raise ConfigError where Ray is set to show each process more than its own GPU."""
    value = os.environ.get(KEEPS_ALL_VISIBLE, "")
    if value.lower() in ("1", "true"):  # as Ray reads it
        raise ConfigError(
            f"{where}: {KEEPS_ALL_VISIBLE}={value}, so every rank would see all GPUs and use the first one. Unset it "
            "where the run or `ray start` gets its environment, and start again"
        )


def expand_segments() -> bool:
    """Let CUDA's allocator here grow what it has in place of fragmenting it: two processes on a GPU have no memory to
    leave unused. False, and nothing changed, where the environment has settings of the allocator."""
    if ALLOCATOR in os.environ or OLD_ALLOCATOR in os.environ:
        return False
    os.environ[ALLOCATOR] = EXPANDABLE
    set_allocator(EXPANDABLE)
    return True


def record_nccl(log_dir: str | None, name: str) -> None:
    """Let torch write what NCCL was doing next to the log of the rank `name` when a collective waits too long
    (`name-nccl-RANK`, its flight recorder's own format), and NCCL begin collectives of several groups in the order of
    the program. What the environment says already stays."""
    for variable, value in (_NCCL if log_dir is None else _NCCL | _dump_to(Path(log_dir), name)).items():
        os.environ.setdefault(variable, value)


_NCCL = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


def _dump_to(log_dir: Path, name: str) -> dict[str, str]:
    prefix = str(log_dir / f"{name}-nccl-")  # torch adds the rank
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the second is the older one
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # collectives that are kept
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} | dict.fromkeys(names, prefix) | dict.fromkeys(sizes, "2000")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """What the allocator takes from CUDA in here stays in one place, so that other processes can map it: torch opens
    memory in expandable segments by a right that containers and hardened kernels refuse (pidfd_getfd)."""
    both = (os.environ.get(name, "") for name in (ALLOCATOR, OLD_ALLOCATOR))
    settings = next((one for one in both if _EXPANDS.search(one)), None)
    if settings is None:
        yield
        return
    set_allocator(_EXPANDS.sub("expandable_segments:False", settings))
    try:
        yield
    finally:
        set_allocator(settings)


_EXPANDS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


# <malloc.h> of glibc
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1
_GROW_BYTES = 64 * 2**20
_CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next allocation, as PyTorch's allocator does on a GPU.

    By itself glibc gives large blocks back to the kernel at once and asks for them again a moment later; the page
    faults of that take up to half the time of an elementwise operation on a large tensor. The price is that the process
    stays as large as its largest step. False, and nothing changed, where the environment chooses an allocator or its
    settings (MALLOC_…, GLIBC_TUNABLES, LD_PRELOAD) or where the C library is not glibc."""
    if any(name.startswith(_CHOSEN) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_TRIM_THRESHOLD, _NEVER), (_MMAP_MAX, 0), (_TOP_PAD, _GROW_BYTES))
    return all(library.mallopt(*setting) == 1 for setting in settings)


BEACON_TIMEOUT_S = 10.0  # how long a new file may take to show on another host
EVERYWHERE = "Put it there, at the same path on every node, or on a disk that all of them see"


def require_paths(who: str, needs: Mapping[str, str]) -> None:
    """Raise ConfigError for the first of the paths, by configuration key, that does not exist on this node."""
    for key, path in needs.items():
        if not Path(path).exists():
            raise ConfigError(f"{key}={path} does not exist on {whereabouts(who)}. {EVERYWHERE}")


@contextmanager
def beacon(folder: str) -> Iterator[str]:
    """A file in `folder`, for the time of a run: its path."""
    handle, path = mkstemp(dir=folder, prefix=".running-")
    os.close(handle)
    try:
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def require_beacon(who: str, path: str | None) -> None:
    """Raise ConfigError when this node does not see the beacon; None: there is none to see."""
    if path is None:
        return
    end = time.monotonic() + BEACON_TIMEOUT_S
    while not Path(path).exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"training.checkpoint_dir={Path(path).parent} on {whereabouts(who)}, is not the directory that "
                "the driver sees. All ranks write their checkpoints there: give one on a disk that all "
                "nodes share, at the same path on each"
            )
        time.sleep(0.2)


def whereabouts(who: str) -> str:
    """This process's node, as an error names it."""
    return f"node {_address()}, where {who} runs"


def _address() -> str:
    return ray.util.get_node_ip_address()


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"

Interfaces = Mapping[str, Sequence[str]]  # addresses by name


def choose_interface(address: str, loopback: bool) -> str:
    """Make this process's collectives use the interface with `address`, as `socket_settings` says. What was chosen."""
    chosen = socket_settings(address, loopback, read_interfaces(), os.environ)
    os.environ.update(chosen)
    return ", ".join(f"{key}={value}" for key, value in chosen.items()) or "as the environment says"


def open_listener(address: str) -> socket.socket:
    """A socket that listens on `address` alone, on a port of the system's choice.

    Raises ConfigError when this host does not have that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        own = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in read_interfaces().items())
        raise ConfigError(
            f"no rank can listen on {address}, by which Ray knows its node ({error.strerror}). That host has {own}. "
            "Start Ray there with --node-ip-address=ADDRESS, one that the other nodes can reach"
        ) from error


def socket_settings(
    address: str, loopback: bool, interfaces: Interfaces, environment: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that put gloo and NCCL on the interface with `address`; {} where no interface has it.

    loopback: on the loopback interface, whatever the environment says. Otherwise a user's own setting stays."""
    name = interface_of(LOOPBACK if loopback else address, interfaces)
    if name is None:
        return {GLOO: "lo", NCCL: "=lo"} if loopback else {}
    wanted = {GLOO: name, NCCL: f"={name}"}  # without "=", NCCL takes every interface whose name starts so
    return {key: value for key, value in wanted.items() if loopback or key not in environment}


def interface_of(address: str, interfaces: Interfaces) -> str | None:
    """The interface with that address. Any loopback address (127.0.0.0/8) is the loopback interface's."""
    try:
        wanted = ip_address(address)
    except ValueError:  # a node known by a name
        return None
    for name, addresses in interfaces.items():
        own = [ip_address(found) for found in addresses]
        if wanted in own or (wanted.is_loopback and any(found.is_loopback for found in own)):
            return name
    return None


def read_interfaces() -> dict[str, list[str]]:
    """Addresses of this host by interface; those without any are left out."""
    found = {
        name: [
            entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
