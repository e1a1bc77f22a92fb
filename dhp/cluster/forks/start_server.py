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

# Threads of OpenMP wait for each other in a loop; those of two actors that share cores then wait for each other's turn.
RESTING = {"GOMP_SPINCOUNT": "0"}
# With it torch counts GPUs without their driver, which a process must not have asked whose forks are to use them.
UNASKED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_WAITING = {"OMP_WAIT_POLICY", *RESTING}  # with which a user has said how threads wait
CLIENT = Path(__file__).parent / "fork_client.py"


@contextmanager
def fork_server(modules: Sequence[str], gpus: bool = True, sharing: bool = False) -> Iterator[None]:
    """A Ray that is started in here has forks for workers. modules: what they find imported, see `dhp.cluster.forks.
    server`; the server imports them while this process goes on. gpus: false where no fork is to see any.
    sharing: forks of several parts work at the same time on the same cores.

    Nothing is started where there is a server already."""
    if SERVER in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    with private_folder("dhp-forks-", "server") as folder:
        address = folder / "server"
        command = [sys.executable, "-m", "dhp.cluster.forks.server", str(address), *modules]
        environment = os.environ | UNASKED | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        if sharing and not _WAITING & environment.keys():
            environment |= RESTING
        server = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        os.environ[SERVER] = str(address)
        try:
            yield
        finally:
            del os.environ[SERVER]
            server.kill()  # its forks end with it
            server.communicate()


def worker_environment() -> dict[str, str] | None:
    """The runtime environment of a Ray whose workers are to be forks; None where there is no server."""
    return {"py_executable": f"{sys.executable} {CLIENT}"} if SERVER in os.environ else None
