"""The start and the end of a Ray."""

import inspect
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest
import ray
from ray._common.usage.usage_lib import usage_stats_enabled
from ray._private import node, services, utils, worker
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.utils import validate_socket_filepath
from ray._raylet import AuthenticationTokenLoader

from dhp.cluster import cluster as cluster_module
from dhp.cluster import ray_session as own
from dhp.cluster import ray_session as starting
from dhp.cluster import servers
from dhp.cluster.address import LOCAL
from dhp.cluster.cluster import GROUP_LATER_S, Cluster, ClusterSpec, _make_lookout
from dhp.cluster.host import GLOO, NCCL, interface_of, open_listener, read_interfaces, socket_settings
from dhp.cluster.host import LOOPBACK as HOST_LOOPBACK
from dhp.cluster.placement.nodes import ClusterNode
from dhp.cluster.placement.reservation import Topology
from dhp.cluster.ray_session import (
    TOKEN,
    changed_environment,
    check_token_file,
    cluster_gpus,
    private_ray,
    ray_session,
    session_token,
    within,
)
from dhp.cluster.servers import descendants, has_ended, limited_teardown, require_servers, watch_servers
from dhp.core.errors import ClusterError, ConfigError
from dhp.core.graph import StageGraph
from dhp.core.process import interruptible
from tests.helpers.graphs import make_graph
from tests.helpers.runs import ROOT
from tests.helpers.sockets import LOOPBACK, listening_addresses, processes_naming


def bearer() -> str:
    """The token that Ray would send from here."""
    return str(AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)["authorization"])


def test_each_run_has_a_token_of_its_own_and_no_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    for _ in range(2):
        before = {name: os.environ.get(name) for name in (TOKEN, "RAY_AUTH_MODE")}
        with session_token():
            ensure_token_if_auth_enabled()  # what `ray.init` does: it makes a file where it finds no token
            assert os.environ["RAY_AUTH_MODE"] == "token" and bearer() == f"Bearer {os.environ[TOKEN]}"
            seen.append(os.environ[TOKEN])
        assert {name: os.environ.get(name) for name in before} == before
    assert len(set(seen)) == 2 and all(len(token) == 64 for token in seen)
    assert list(tmp_path.iterdir()) == []


def ask_agent(token: str) -> int:
    """Status of a question to the agent that runs commands for whoever has the token."""
    from ray._private.worker import global_worker

    port = global_worker.node.dashboard_agent_listen_port
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/job_agent/jobs/none", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.usefixtures("local_ray")
def test_the_agent_that_runs_commands_knows_no_other_token() -> None:
    from ray._private.worker import global_worker

    if (global_worker.node.dashboard_agent_listen_port or 0) < 1:
        return  # another Ray of this host has the agent's port: this one's listens nowhere
    refused = (401, 403)
    assert ask_agent("0" * 64) in refused and ask_agent("") in refused
    file = Path.home() / ".ray" / "auth_token"
    if file.is_file():  # of other clusters of this user
        assert ask_agent(file.read_text().strip()) in refused
    assert ask_agent(os.environ[TOKEN]) not in refused  # or nothing was asked


@pytest.mark.usefixtures("local_ray")
def test_others_cannot_enter_the_folder_of_its_sockets() -> None:
    from ray._private.worker import global_worker

    sockets = Path(global_worker.node.get_sockets_dir_path())
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o777  # Ray's own doing: what counts lies above
    closed = [folder for folder in sockets.parents if stat.S_IMODE(folder.stat().st_mode) == 0o700]
    assert any(folder.name.startswith("dhp-ray-") for folder in closed)
    validate_socket_filepath(str(sockets / "plasma_store"))


def test_the_folder_is_removed_at_the_end() -> None:
    with private_ray() as folder:
        (folder / "session").mkdir(parents=True)
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("error", "stays"), [(ConfigError("x"), False), (KeyboardInterrupt(), False), (ClusterError("x"), True)]
)
def test_what_may_explain_a_failure_stays_and_is_named(
    error: BaseException, stays: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), private_ray() as folder:
        folder.mkdir()
        raise error
    assert folder.exists() is stays and (str(folder.parent) in capsys.readouterr().err) is stays
    own._remove(folder.parent)


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_a_long_folder_gives_way_to_one_in_which_sockets_have_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv(name, str(long))
    with private_ray() as folder:
        assert folder.parent.parent == Path("/tmp")
    room = 107 - len(own._SOCKET)  # bytes of a path
    (short := Path("/tmp") / uuid4().hex.ljust(room, "y")[: room - len("/tmp/")]).mkdir()
    try:
        monkeypatch.setenv(name, str(short))
        with private_ray() as folder:
            assert folder.parent.parent == short
            session = "session_2026-01-01_00-00-00_000000_4194304"
            validate_socket_filepath(str(folder / session / "sockets" / "plasma_store"))
    finally:
        short.rmdir()


@pytest.mark.parametrize(("given", "found"), [("", ""), ("inner.example,localhost", "inner.example,localhost,")])
def test_no_proxy_is_asked_for_loopback(given: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", given)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with private_ray():
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
        assert {"127.0.0.1", "localhost"} <= set(os.environ["no_proxy"].split(","))
        assert os.environ["no_proxy"].startswith(found)
        assert urllib.request.proxy_bypass_environment("127.0.0.1")
    assert os.environ["no_proxy"] == given and "NO_PROXY" not in os.environ


def test_nothing_is_reported_whatever_the_user_allows_other_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    assert usage_stats_enabled()  # or nothing was asked
    with private_ray():
        assert not usage_stats_enabled()
    assert usage_stats_enabled()


def test_the_environment_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SET", "1")
    monkeypatch.delenv("AN_UNSET", raising=False)
    with pytest.raises(OSError), changed_environment({"A_SET": "2", "AN_UNSET": "3"}):
        assert os.environ["AN_UNSET"] == "3"
        raise OSError
    assert os.environ["A_SET"] == "1" and "AN_UNSET" not in os.environ


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.usefixtures("local_ray")
def test_a_local_ray_listens_on_loopback_only() -> None:
    import ray

    session = Path(ray.get_runtime_context().get_session_name()).name
    found = listening_addresses([os.getpid(), *processes_naming(session)])
    assert found and found <= LOOPBACK
    assert ray.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.usefixtures("local_ray")
def test_logical_gpus_are_counted() -> None:
    assert cluster_gpus() == 2.0


@pytest.mark.usefixtures("local_ray")
def test_sigterm_is_left_to_whoever_handled_it() -> None:
    """`ray.init` brings a handler that ends the process; Python's default must be back."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_ray_of_our_own_keeps_no_events_of_tasks() -> None:
    """Its control store would keep 3 KiB for each call of a run, and nobody could ask for them."""
    import ray

    assert ray.get(ray.remote(lambda: os.getpid()).options(num_cpus=0).remote()) != os.getpid()
    end = time.monotonic() + 2.5  # events are sent every second
    while time.monotonic() < end:
        assert ray.timeline() == []
        time.sleep(0.25)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_a_mistake_told_at_once(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError) as caught, ray_session(address, cpus=1):
        pass
    told = str(caught.value)
    assert told.startswith(f"cluster.address={address}: no Ray cluster answers there")
    assert "ray start --head" in told and "cluster.address=local" in told


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "refused"),
    [(0o644, 0o755, True), (0o644, 0o700, False), (0o600, 0o755, False), (0o640, 0o755, False)],
)
def test_a_token_that_others_can_read_is_refused(
    file_mode: int, folder_mode: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with TemporaryDirectory(dir="/tmp") as home:  # below pytest's own folder nobody else could enter
        monkeypatch.setenv("HOME", home)
        file = Path(home) / ".ray" / "auth_token"
        file.parent.mkdir()
        file.write_text("0" * 64)
        file.chmod(file_mode)
        Path(home).chmod(folder_mode)
        if refused:
            with pytest.raises(ConfigError, match="chmod 600"):
                check_token_file()
            monkeypatch.setenv(TOKEN, "1" * 64)  # which Ray takes before the file
        check_token_file()


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (make_graph(), "1 vision and 1 text actors on cpu, sharing devices"),
        (make_graph(stages=3), "1 vision, 1 text.0, 1 text.1 and 1 text.2 actors on cpu, sharing devices"),
    ],
)
def test_it_lists_its_actors(graph: StageGraph, told: str) -> None:
    cluster = Cluster(ClusterSpec(graph, "cpu", LOCAL, 1, 60.0, 60.0, "logs", "checkpoints"))
    cluster.device, cluster._where = "cpu", ""
    assert cluster.describe() == told


@pytest.mark.parametrize(("connected", "own"), [(True, ""), (False, "head")])
def test_through_the_client_no_node_is_the_drivers(monkeypatch: pytest.MonkeyPatch, connected: bool, own: str) -> None:
    """The head's ids of processes mean others, or none, on the client's machine, where each would count as gone."""
    monkeypatch.setattr(cluster_module, "client", SimpleNamespace(is_connected=lambda: connected), raising=False)
    monkeypatch.setattr(cluster_module, "this_node", lambda: "head")
    layout = ClusterSpec(make_graph(), "cpu", "ray://head:10001", 1, 60.0, 60.0, "logs", "checkpoints")
    topology = Topology([ClusterNode("head", "10.0.0.1", "10.0.0.1", {}, {})], [0])
    lookout = _make_lookout(layout, topology)
    assert (lookout._own_node, lookout.node_name("head")) == (own, "10.0.0.1")


def test_a_groups_own_limit_leaves_time_for_a_checkpoint_that_the_next_step_waits_for() -> None:
    for saving_s in (0.0, 1800.0):
        layout = ClusterSpec(make_graph(), "cpu", LOCAL, 1, 60.0, 60.0, "logs", "checkpoints", saving_s=saving_s)
        cluster = Cluster(layout)
        cluster.device = "cpu"
        assert cluster._common("gloo", 1)["collective_s"] == 600.0 + saving_s + GROUP_LATER_S


HOST = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.5", "fd00::5"], "ib0": ["10.1.0.5"]}


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("10.0.0.5", "eth0"),
        ("10.1.0.5", "ib0"),
        ("fd00::5", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.0.3", "lo"),  # the whole of 127.0.0.0/8 is this host
        ("10.0.0.6", None),
        ("head.example", None),
    ],
)
def test_the_interface_is_found_by_its_address(address: str, wanted: str | None) -> None:
    assert interface_of(address, HOST) == wanted


def test_both_libraries_are_told() -> None:
    assert socket_settings("10.1.0.5", False, HOST, {}) == {GLOO: "ib0", NCCL: "=ib0"}
    assert socket_settings("10.9.9.9", False, HOST, {}) == {}


def test_what_the_user_set_stays() -> None:
    assert socket_settings("10.1.0.5", False, HOST, {NCCL: "eth"}) == {GLOO: "ib0"}
    assert socket_settings("10.1.0.5", False, HOST, {GLOO: "eth0", NCCL: "eth"}) == {}


def test_a_local_run_stays_on_loopback_whatever_the_environment_says() -> None:
    told = socket_settings("10.0.0.5", True, HOST, {GLOO: "eth0", NCCL: "eth0"})
    assert told == {GLOO: "lo", NCCL: "=lo"}
    assert socket_settings("10.0.0.5", True, {"lo0": ["127.0.0.1"]}, {}) == {GLOO: "lo0", NCCL: "=lo0"}
    assert socket_settings("10.0.0.5", True, {}, {}) == {GLOO: "lo", NCCL: "=lo"}


def test_this_host_has_a_loopback_interface() -> None:
    found = read_interfaces()
    assert interface_of(HOST_LOOPBACK, found) in {name for _, name in socket.if_nameindex()}


def test_a_listener_is_bound_to_the_one_address() -> None:
    with open_listener(HOST_LOOPBACK) as listener:
        assert listener.getsockname()[0] == HOST_LOOPBACK


def test_an_address_of_another_host_is_told_with_those_of_this_one() -> None:
    with pytest.raises(ConfigError) as caught:
        open_listener("192.0.2.77")  # reserved for documentation
    assert "no rank can listen on 192.0.2.77" in str(caught.value) and "--node-ip-address" in str(caught.value)


TIMED_OUT = "The current node timed out during startup. This could happen"


def test_ray_still_asks_what_is_replaced_for_the_time_of_its_start() -> None:
    """Canary: by these names Ray waits for its node, sets its handler, and reads how long its server may take."""
    start = inspect.getsource(node.Node.__init__)
    assert "ray._private.services.get_node(" in start and "except RuntimeError" in start
    assert inspect.getsource(worker.init).count("ray._private.utils.set_sigterm_handler(") == 1
    assert "RAY_gcs_server_port_wait_time_s" in inspect.getsource(node)
    head = inspect.getsource(node.Node.start_head_processes)
    assert "self.start_api_server(\n" in head and "self.start_monitor()" in head


def test_the_node_is_waited_for_as_long_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"id": 1}])
    now = [0.0]

    def get_node(_address: str, _node: str) -> dict[str, int]:
        answer = next(answers, RuntimeError("never"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(starting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(starting.time, "sleep", lambda _: now.__setitem__(0, now[0] + 40.0))
    set_handler = utils.set_sigterm_handler
    with within(100.0):
        assert os.environ["RAY_gcs_server_port_wait_time_s"] == "100"
        assert services.get_node("", "") == {"id": 1} and now[0] == 80.0
        with pytest.raises(TimeoutError, match="not ready after 100 s"):
            services.get_node("", "")
        utils.set_sigterm_handler(lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert now[0] == 120.0
    assert services.get_node is get_node and utils.set_sigterm_handler is set_handler
    assert "RAY_gcs_server_port_wait_time_s" not in os.environ


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[int]]:
    """Make `ray.init` start a helper, which has one of its own and heeds no SIGTERM, and end as given."""

    def prepare(outcome: Callable[[], None]) -> list[int]:
        started: list[int] = []
        before = {process.pid for process in descendants()}  # other tests' ranks come from a server that stays

        def init(*_: object, **__: object) -> None:
            command = "trap '' TERM; sleep 60 & echo ready; wait; sleep 60"
            helper = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
            with helper.stdout:
                helper.stdout.readline()
            started.extend(process.pid for process in descendants() if process.pid not in before)
            outcome()

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)  # of the Ray that other tests of this folder share
        monkeypatch.setattr("dhp.cluster.servers.GRACE_S", 0.3)
        return started

    return prepare


def times_out() -> None:
    raise Exception(TIMED_OUT)


def gets_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def gets_sigterm_and_makes_something_of_it() -> None:
    try:
        gets_sigterm()
    except KeyboardInterrupt:
        raise RuntimeError("could not start") from None


def catches_sigterm() -> None:
    try:
        gets_sigterm()
    except KeyboardInterrupt:
        pass


def test_a_failed_start_says_what_to_do_and_leaves_nothing(helpers) -> None:
    started = helpers(times_out)
    with pytest.raises(ClusterError) as caught, ray_session(LOCAL, cpus=1, timeout_s=7):
        pass
    for told in (TIMED_OUT, "session", "logs", "cluster.start_timeout_s=7", "ulimit"):
        assert told in str(caught.value)
    assert len(started) >= 2 and not [p for p in descendants() if p.pid in started and not has_ended(p)]


def test_servers_that_ended_at_once_are_started_again(helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([ChildProcessError("its raylet ended at once"), ConnectionError("no answer"), None])
    said: list[str] = []

    def end() -> None:
        error = next(ends)
        if error is not None:
            raise error

    started = helpers(end)
    monkeypatch.setattr(starting, "RETRIES_S", (0.01, 0.02))
    with interruptible(), ray_session(LOCAL, cpus=1, say=said.append):
        assert said == [
            "Ray did not start (its raylet ended at once): trying again in 0.01 s",
            "Ray did not start (no answer): trying again in 0.02 s",
        ]
        assert len([p for p in descendants() if p.pid in started and not has_ended(p)]) == 2  # of the third start
    for process in [p for p in descendants() if p.pid in started]:
        process.kill()


def test_three_starts_are_enough(helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise ChildProcessError("its raylet ended at once")

    helpers(end)
    said: list[str] = []
    monkeypatch.setattr(starting, "RETRIES_S", (0.01, 0.02))
    with pytest.raises(ClusterError, match="its raylet ended at once"):
        with interruptible(), ray_session(LOCAL, cpus=1, say=said.append):
            pass
    assert len(said) == 2


@pytest.mark.parametrize("how", [gets_sigterm, gets_sigterm_and_makes_something_of_it, catches_sigterm])
def test_an_interrupted_start_is_that_and_leaves_nothing(helpers, how: Callable[[], None]) -> None:
    helper = helpers(how)
    with interruptible(), pytest.raises(KeyboardInterrupt), ray_session(LOCAL, cpus=1):
        pass
    if how is catches_sigterm:  # the start was complete: what stands is Ray's own to end
        for process in [p for p in descendants() if p.pid in helper]:
            os.kill(process.pid, signal.SIGKILL)
    else:
        assert not [p for p in descendants() if p.pid in helper and not has_ended(p)]


def test_a_cluster_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("version mismatch")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("dhp.cluster.ray_session._probe", lambda _: None)
    with pytest.raises(ClusterError, match="cluster.address=auto: Ray could not be joined .*version mismatch"):
        with ray_session("auto", cpus=1):
            pass


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process of that name, with one of its own that survives it."""
    monkeypatch.setattr(servers, "LEFT_S", 0.2)
    monkeypatch.setattr(servers, "CHECK_S", 0.0)
    program = tmp_path / "raylet"
    program.write_text("#!/bin/sh\nsetsid sleep 600 &\necho ready\nwait\n")
    program.chmod(0o755)
    process = subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def others(raylet: subprocess.Popen[str]) -> list[int]:
    own = {raylet.pid, *(child.pid for child in psutil.Process(raylet.pid).children(recursive=True))}
    return [process.pid for process in descendants() if process.pid not in own]


def test_a_server_that_ends_is_named(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    require_servers(at_once=True)  # there is none
    with watch_servers(others(raylet), tmp_path):
        require_servers()
        raylet.send_signal(signal.SIGKILL)
        raylet.wait()
        with pytest.raises(
            ClusterError, match=rf"Ray's raylet \(its server of this node, process {raylet.pid}\) ended"
        ):
            require_servers()
    require_servers(at_once=True)


def stop(raylet: subprocess.Popen[str]) -> None:
    raylet.send_signal(signal.SIGSTOP)
    os.waitpid(raylet.pid, os.WUNTRACED)


def test_a_server_that_is_stopped_for_too_long_is_named(
    raylet: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch_servers(others(raylet), tmp_path):
        monkeypatch.setattr(servers, "STOPPED_S", 60.0)
        stop(raylet)
        require_servers()
        assert set(servers._Own.stopped) == {"raylet"}
        raylet.send_signal(signal.SIGCONT)
        os.waitpid(raylet.pid, os.WCONTINUED)
        require_servers()
        assert not servers._Own.stopped  # it goes on: the time before does not count
        stop(raylet)
        monkeypatch.setattr(servers, "STOPPED_S", 0.3)
        require_servers()
        with pytest.raises(ClusterError, match="stopped"):  # where a hang is looked into, at once
            require_servers(at_once=True, stopped_s=0.0)
        time.sleep(0.4)
        with pytest.raises(ClusterError) as caught:
            require_servers()
        said = f"Ray's raylet (its server of this node, process {raylet.pid}) has been stopped for 1 s"
        assert str(caught.value).startswith(said) and f"`kill -CONT {raylet.pid}`" in str(caught.value)
        with limited_teardown(None):  # it would not answer
            raylet.wait(60)


def test_what_servers_leave_is_ended(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    (left,) = psutil.Process(raylet.pid).children(recursive=True)
    with watch_servers(others(raylet), tmp_path):
        raylet.kill()
        assert not has_ended(left)
    left.wait(60)
    assert has_ended(left)


def test_a_teardown_that_waits_for_ray_goes_on_once_its_processes_are_killed(
    raylet: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "TEARDOWN_S", 0.1)
    with watch_servers(others(raylet), tmp_path), limited_teardown(None):
        raylet.wait(60)
    assert "Ray has not ended in 0.1 s: killing its processes" in capsys.readouterr().err


def test_a_teardown_in_time_is_left_alone(raylet: subprocess.Popen[str], tmp_path: Path) -> None:
    with watch_servers(others(raylet), tmp_path):
        with limited_teardown(None):
            pass
        assert raylet.poll() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "teardown"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [("None", 0, ""), ("KeyboardInterrupt()", 130, ""), ("PartFailed('it died')", 1, "\nPartFailed: it died\n")],
)
def test_a_teardown_that_hangs_for_good_ends_the_process(error: str, status: int, said: str) -> None:
    code = (
        "import time\nfrom dhp.cluster import servers\nfrom dhp.core import process\n"
        "from dhp.core.errors import PartFailed\nprocess.begin_command()\n"
        f"servers.TEARDOWN_S, servers.FORCED_S = 0.1, 0.1\n"
        f"with servers.limited_teardown({error}):\n    time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert f"Ray's shutdown hangs: this process ends without it{said}" in done.stderr
