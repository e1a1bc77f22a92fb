"""Starts or joins Ray, with our time limit, and leaves nothing of ours behind.

What is replaced here for the time of the start is none of Ray's public names; it is pinned with Ray, and
tests/cluster/test_starting.py fails when it is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services, utils
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from dhp.cluster.address import CLIENT, LOCAL
from dhp.cluster.forks.start_server import environment
from dhp.cluster.own_ray import TOKEN, changed_environment, on_loopback, own_ray
from dhp.cluster.processes import descendants, end_descendants, has_ended, is_named
from dhp.cluster.servers import own_servers
from dhp.core.errors import ClusterError, ConfigError, DhpError, NoCluster
from dhp.core.process import end, go_on, say_nothing, was_interrupted

_SERVER_WAIT = "RAY_gcs_server_port_wait_time_s"
_POLL_S = 0.1


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """`ray.init` in here waits so long for its servers instead of 30 s, and sets no handler of SIGTERM: its own ends
    the process before a run can write its summary."""
    before = os.environ.get(_SERVER_WAIT)
    get_node, set_handler = services.get_node, utils.set_sigterm_handler
    if before is None:
        os.environ[_SERVER_WAIT] = str(max(1, round(timeout_s)))
    services.get_node = _patient(get_node, timeout_s)
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        services.get_node, utils.set_sigterm_handler = get_node, set_handler
        _take_back_sigterm()
        if before is None:
            os.environ.pop(_SERVER_WAIT, None)


def _take_back_sigterm() -> None:
    """Ray's core puts a handler of its own below Python's, which prints a stack and aborts three seconds later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _patient(get_node: Callable[[str, str], Any], timeout_s: float) -> Callable[[str, str], Any]:
    """`get_node`, asked until it knows the node: Ray itself would give up after 30 s whatever the machine."""
    deadline = time.monotonic() + timeout_s

    def ask(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as error:  # it is not known yet
                if any(has_ended(process) and is_named(process, "raylet") for process in descendants()):
                    raise ChildProcessError("its raylet ended at once") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its node was not ready after {timeout_s:g} s") from error
                time.sleep(_POLL_S)

    return ask


@contextmanager
def without_helpers() -> Iterator[None]:
    """`ray.init` in here starts no API server and no autoscaler's monitor: a Ray of our own has neither a dashboard nor
    nodes to add, and each takes seconds of a core to start."""
    before = {name: getattr(Node, name) for name in _HELPERS}
    for name in _HELPERS:
        setattr(Node, name, lambda _node, **_options: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


_HELPERS = ("start_api_server", "start_monitor")

PATH = "RAY_AUTH_TOKEN_PATH"


def check_token_file() -> None:
    """Raise ConfigError where Ray will read its token from a file that other users of this host can read too.

    Ray itself writes it with mode 0644, so what counts is whether they can enter every folder on the way as well.
    """
    file = Path(os.environ.get(PATH) or Path.home() / ".ray" / "auth_token")
    if TOKEN in os.environ or not file.is_file() or os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return
    real = file.resolve()
    if real.stat().st_mode & stat.S_IROTH and all(folder.stat().st_mode & stat.S_IXOTH for folder in real.parents):
        raise ConfigError(
            f"{file} is the cluster's token, and other users of this host can read it and run commands on the cluster "
            f"as you. Run `chmod 600 {file}`, and make a new token if others have accounts here"
        )


PROBE_TIMEOUT_S = 5.0
RETRIES_S = (2.0, 10.0)  # before the second and third start of a Ray of our own
_PASSING = (ChildProcessError, ConnectionError)  # what a start fails of that may be the moment's load

# Tensors go through shared memory and are read in place; without this each is copied and pickled in-band.
_ENVIRONMENT = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}

# Of a Ray of our own. It has no dashboard, so the events of tasks could not be queried, and its control store would
# keep them: 3 KiB a call, up to 100,000 calls. A worker registers once the fork server has imported what it needs.
OWN_SYSTEM = {"task_events_report_interval_ms": 0, "worker_register_timeout_seconds": 600}


@contextmanager
def ray_session(
    address: str,
    cpus: int,
    gpus: int | None = None,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = say_nothing,
) -> Iterator[None]:
    """Ray for the time of a run: its own on loopback for address=local, else a running one.

    cpus, gpus: logical resources of a Ray of our own; None: the GPUs that Ray finds. timeout_s: how long its servers
    may take to start. say: receives a line when they ended at once and are started again.

    Raises ConfigError when there is no cluster at `address` or others can read its token, ClusterError when Ray does
    not start. However it fails, no process of it stays.
    """
    os.environ.update(_ENVIRONMENT)
    ray_constants.RAY_ENABLE_ZERO_COPY_TORCH_TENSORS = True  # this process read its environment when it imported Ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA visible to actors without a GPU
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every failure is reported by us, once
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "dhp"}
    if address != LOCAL:
        _probe(address)
    with own_ray() if address == LOCAL else nullcontext() as folder:
        others = [process.pid for process in descendants()]
        if folder is None:
            with _whole_or_none(address, folder, timeout_s), within(timeout_s):
                _attach(address, common)
        else:
            common |= {"num_cpus": cpus, "num_gpus": gpus}
            _start(folder, timeout_s, common, say)
        with nullcontext() if folder is None else own_servers(others, folder.parent):
            try:
                if was_interrupted():  # Ray caught it
                    raise KeyboardInterrupt
                yield
            finally:
                ray.shutdown()


def _start(folder: Path, timeout_s: float, common: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Start a Ray of our own. On a busy machine its servers give up waiting for one another: then once more."""
    own = {"include_dashboard": False, "_system_config": OWN_SYSTEM, "_temp_dir": str(folder)}
    for again_s in (*RETRIES_S, None):
        try:
            with _whole_or_none(LOCAL, folder, timeout_s), within(timeout_s):
                # Workers inherit the environment; a runtime_env would only delay them.
                with on_loopback(), without_helpers(), changed_environment(environment()):
                    ray.init(address=LOCAL, **own, **common)
            return
        except ClusterError as error:
            if again_s is None or not isinstance(error.__cause__, _PASSING):
                raise
            say(f"Ray did not start ({error.__cause__}): trying again in {again_s:g} s")
            go_on()
            time.sleep(again_s)


@contextmanager
def _whole_or_none(address: str, folder: Path | None, timeout_s: float) -> Iterator[None]:
    """The start of Ray, of which no process stays when it fails."""
    others = [process.pid for process in descendants()]
    try:
        yield
    except BaseException as error:
        end()
        with suppress(Exception):  # it may have started in part only
            ray.shutdown()
        end_descendants(others)
        if was_interrupted():
            raise KeyboardInterrupt from error  # Ray may have made something else of it
        if isinstance(error, DhpError) or not isinstance(error, Exception):
            raise
        raise _not_started(error, address, folder, timeout_s) from error


def _not_started(error: Exception, address: str, folder: Path | None, timeout_s: float) -> ClusterError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if folder is None:
        return ClusterError(
            f"cluster.address={address}: Ray could not be joined ({reason}). See `ray status` there, and its logs in "
            "/tmp/ray/session_latest/logs of its head"
        )
    return ClusterError(
        f"Ray did not start ({reason}). Its servers' logs are in {folder}/session_latest/logs. Frequent causes: a "
        f"busy machine (raise cluster.start_timeout_s={timeout_s:g}), no room in /tmp or "
        "/dev/shm, or a low limit of processes or open files (`ulimit -u`, `ulimit -n`)"
    )


def cluster_gpus() -> float:
    """GPUs that the cluster has registered."""
    return ray.cluster_resources().get("GPU", 0.0)


def _attach(address: str, common: dict[str, Any]) -> None:
    check_token_file()
    try:
        ray.init(address=address, runtime_env={"env_vars": _ENVIRONMENT}, **common)
    except (ConnectionError, AuthenticationError) as error:
        raise ConfigError(
            f"cluster.address={address}: something listens there, but a connection to Ray failed "
            f"({str(error).partition('. ')[0]}). If it asks for a token, set RAY_AUTH_MODE=token, and put the "
            "cluster's own token into ~/.ray/auth_token or RAY_AUTH_TOKEN. Its Ray must have the version of this one, "
            f"{ray.__version__}"
        ) from error


def _probe(address: str) -> None:
    """Raise ConfigError when nothing listens there: Ray would try for a minute and then abort the process."""
    found = address
    try:
        if not address.startswith(CLIENT):
            found = services.canonicalize_bootstrap_address(address)
        host, _, port = found.removeprefix(CLIENT).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:  # Ray's ConnectionError is one too
        raise _no_cluster(address, f"{found}: {error.strerror or error}") from error


def _no_cluster(address: str, reason: object) -> NoCluster:
    return NoCluster(
        f"cluster.address={address}: no Ray cluster answers there ({reason}). "
        "Start one with `ray start --head`, or set cluster.address=local"
    )
