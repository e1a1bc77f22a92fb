"""Starts or joins Ray, apart from other users; cleans up."""

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from dhp.cluster.address import CLIENT, LOCAL
from dhp.cluster.forks.start_server import worker_environment
from dhp.cluster.ray_private import (
    AUTH_MODE,
    CLUSTERS,
    GET_NODE,
    HELPERS,
    SIGTERM_HANDLER,
    bootstrap_address,
    default_folder,
    read_environment_anew,
    replaced,
    with_clusters,
    without_copies,
)
from dhp.cluster.servers import descendants, end_descendants, has_ended, is_named, watch_servers
from dhp.core.errors import CheckpointError, ClusterError, ConfigError, DataError, DhpError, NoCluster
from dhp.core.files import base_for_socket
from dhp.core.process import end, go_on, say_nothing, was_interrupted

TOKEN = "RAY_AUTH_TOKEN"
NO_REPORTS = {"RAY_USAGE_STATS_ENABLED": "0"}  # whatever the user's own clusters send to Ray's makers
LOOPBACK = ("127.0.0.1", "localhost")
# As much as Ray adds to a folder for the paths of its sockets.
_SOCKET = "/dhp-ray-12345678/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_EXPECTED = (ConfigError, DataError, CheckpointError, KeyboardInterrupt, SystemExit)  # not in Ray's logs
_REMOVAL_S = 2.0  # its last helpers end a moment after it, and write until then


@contextmanager
def private_ray() -> Iterator[Path]:
    """The environment of a Ray of our own, for as long as it runs, and an empty folder for its sockets and logs that
    this user alone may enter. The folder is removed at the end; after a failure that Ray's logs may explain it stays.

    Raises OSError where no folder can be made."""
    folder = Path(tempfile.mkdtemp(prefix="dhp-ray-", dir=_base()))  # 0700; Ray opens what it makes below to everybody
    try:
        with session_token(), changed_environment({**NO_REPORTS, **_without_proxy()}):
            yield folder / "ray"
    except _EXPECTED:
        _remove(folder)
        raise
    except BaseException:
        if any(folder.iterdir()):
            print(f"the logs of Ray's own processes stay in {folder}", file=sys.stderr, flush=True)
        else:
            _remove(folder)
        raise
    _remove(folder)


@contextmanager
def session_token() -> Iterator[None]:
    """Ray started in here asks for a token that is in the environment of its processes alone. The file that Ray would
    make in the home directory can be read by others wherever they may enter it, and the agent that runs commands for
    those who have the token listens without a dashboard too."""
    try:
        with changed_environment({AUTH_MODE: "token", TOKEN: secrets.token_hex(32)}):
            read_environment_anew()
            yield
    finally:
        read_environment_anew()


@contextmanager
def on_loopback() -> Iterator[None]:
    """Ray started in here, and its workers, listen on 127.0.0.1 only.

    `ray.init` replaces a loopback node address by the host's own; what it has for desktops, where clusters are
    off and firewalls ask, is the way to keep it."""
    with changed_environment({CLUSTERS: "0"}), with_clusters(False):
        yield


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables with these values in here, and as they were after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _without_proxy() -> dict[str, str]:
    """Both spellings of the addresses that no proxy is asked for, with loopback among them: Ray's processes would ask
    it for their own neighbours."""
    known = [name for key in ("no_proxy", "NO_PROXY") for name in os.environ.get(key, "").split(",") if name.strip()]
    names = ",".join(dict.fromkeys([*known, *LOOPBACK]))
    return {"no_proxy": names, "NO_PROXY": names}


def _base() -> str:
    """Where Ray itself would put its folder, or /tmp where the paths of sockets below it would be too long."""
    return base_for_socket(default_folder(), _SOCKET)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


_SERVER_WAIT = "RAY_gcs_server_port_wait_time_s"
_POLL_S = 0.1


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """`ray.init` in here waits so long for its servers instead of 30 s, and sets no handler of SIGTERM: its own ends
    the process before a run can write its summary."""
    wait = {} if _SERVER_WAIT in os.environ else {_SERVER_WAIT: str(max(1, round(timeout_s)))}
    with (
        changed_environment(wait),
        replaced(GET_NODE, lambda ask: _patient(ask, timeout_s)),
        replaced(SIGTERM_HANDLER, lambda _: lambda _handler: None),
    ):
        try:
            yield
        finally:
            _take_back_sigterm()


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
    with ExitStack() as stack:
        for one in HELPERS:
            stack.enter_context(replaced(one, lambda _: lambda _node, **_options: None))
        yield


PATH = "RAY_AUTH_TOKEN_PATH"


def check_token_file() -> None:
    """Raise ConfigError where Ray will read its token from a file that other users of this host can read too.

    Ray itself writes it with mode 0644, so what counts is whether they can enter every folder on the way as well."""
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
    address: str, cpus: int, gpus: int | None = None, timeout_s: float = 300.0, say: Callable[[str], None] = say_nothing
) -> Iterator[None]:
    """Ray for the time of a run: its own on loopback for address=local, else a running one.

    cpus, gpus: logical resources of a Ray of our own; None: the GPUs that Ray finds. timeout_s: how long its servers
    may take to start. say: receives a line when they ended at once and are started again.

    Raises ConfigError when there is no cluster at `address` or others can read its token, ClusterError when Ray does
    not start. However it fails, no process of it stays."""
    os.environ.update(_ENVIRONMENT)
    without_copies()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA visible to actors without a GPU
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every failure is reported by us, once
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "dhp"}
    if address != LOCAL:
        _probe(address)
    with private_ray() if address == LOCAL else nullcontext() as folder:
        others = [process.pid for process in descendants()]
        if folder is None:
            with _whole_or_none(address, folder, timeout_s), within(timeout_s):
                _attach(address, common)
        else:
            common |= {"num_cpus": cpus, "num_gpus": gpus}
            _start(folder, timeout_s, common, say)
        with nullcontext() if folder is None else watch_servers(others, folder.parent):
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
                with on_loopback(), without_helpers():
                    ray.init(address=LOCAL, **own, **common, runtime_env=worker_environment())
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
            found = bootstrap_address(address)
        host, _, port = found.removeprefix(CLIENT).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:  # Ray's ConnectionError is one too
        raise _no_cluster(address, f"{found}: {error.strerror or error}") from error


def _no_cluster(address: str, reason: object) -> NoCluster:
    return NoCluster(
        f"cluster.address={address}: no Ray cluster answers there ({reason}). "
        "Start one with `ray start --head`, or set cluster.address=local"
    )
