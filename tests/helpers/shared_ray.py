"""One Ray for the runs of a worker's tests that are not about Ray's own start and end, which take most of a short run.

A process of its own holds it: `python -m tests.helpers.shared_ray` prints where it is, and ends with its standard
input."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.helpers import forks

ROOT = Path(__file__).parents[2]
CPUS = 64  # logical: runs come one behind another


@cache
def join() -> tuple[str, dict[str, str]]:
    """The address of the shared Ray, and what the environment of a run that joins it must say. The first call starts
    it."""
    environment = {**os.environ, **forks.environment()}
    holder = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(_end, holder)
    assert holder.stdout is not None
    said = holder.stdout.readline()
    if not said:
        raise RuntimeError(f"the shared Ray did not start (status {holder.wait()})")
    found = json.loads(said)
    # Or Ray would look for 127.0.0.1 under the host's other address.
    return found["address"], {**found["environment"], "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _end(holder: subprocess.Popen[bytes]) -> None:
    try:
        holder.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        holder.kill()


def main() -> None:
    """Hold Ray until standard input ends."""
    import ray

    from dhp.cluster.address import LOCAL
    from dhp.cluster.ray_session import ray_session

    with ray_session(LOCAL, cpus=CPUS, gpus=0):
        environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
        print(json.dumps({"address": ray.get_runtime_context().gcs_address, "environment": environment}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
