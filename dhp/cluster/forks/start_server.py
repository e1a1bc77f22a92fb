"""Starts the server that forks Ray's workers.

PyTorch and transformers take five seconds of a core to import, in each rank. What a process computes does not depend on
whether it imports its modules or finds them imported."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dhp.cluster.forks.fork_client import SERVER
from dhp.core.files import private_folder

# GPUs' devices, by how Linux names them: NVIDIA's, those of a Jetson, AMD's, and any under Windows' own Linux.
DEVICES = ("nvidia[0-9]*", "nvmap", "kfd", "dxg")
CLIENT = Path(__file__).parent / "fork_client.py"


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[None]:
    """A Ray that is started in here has forks for workers. modules: what they find imported, see `dhp.cluster.forks.
    server`; the server imports them while this process goes on.

    Nothing is started beside GPUs, where CUDA must not have been touched before a fork, nor where there is a server."""
    if SERVER in os.environ or not sys.platform.startswith("linux") or has_gpus():
        yield
        return
    with private_folder("dhp-forks-", "server") as folder:
        address = folder / "server"
        command = [sys.executable, "-m", "dhp.cluster.forks.server", str(address), *modules]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[SERVER] = str(address)
        try:
            yield
        finally:
            del os.environ[SERVER]
            server.kill()  # its forks end with it
            server.communicate()


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether the machine may have GPUs; asking CUDA itself would initialize it."""
    return any(found for name in DEVICES for found in devices.glob(name))


def worker_environment() -> dict[str, str] | None:
    """The runtime environment of a Ray whose workers are to be forks; None where there is no server."""
    return {"py_executable": f"{sys.executable} {CLIENT}"} if SERVER in os.environ else None
