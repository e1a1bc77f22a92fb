"""Ray's start keeps to our time limit, fails with a word on what to do, and leaves no process however it ends."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Callable

import pytest
import ray
from ray._private import node, services, utils, worker

from dhp.cluster import ray_session as starting
from dhp.cluster.address import LOCAL
from dhp.cluster.ray_session import ray_session, within
from dhp.cluster.servers import descendants, has_ended
from dhp.core.errors import ClusterError
from dhp.core.process import interruptible

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
