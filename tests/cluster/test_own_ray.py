"""A Ray of our own obeys nobody else on the host: its token, its folder, its sockets and its proxies."""

from __future__ import annotations

import os
import stat
import urllib.error
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
from ray._common.usage.usage_lib import usage_stats_enabled
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.utils import validate_socket_filepath
from ray._raylet import AuthenticationTokenLoader

from dhp.cluster import ray_session as own
from dhp.cluster.ray_session import TOKEN, changed_environment, own_ray, own_token
from dhp.core.errors import ClusterError, ConfigError


def bearer() -> str:
    """The token that Ray would send from here."""
    return str(AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)["authorization"])


def test_each_run_has_a_token_of_its_own_and_no_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    for _ in range(2):
        before = {name: os.environ.get(name) for name in (TOKEN, "RAY_AUTH_MODE")}
        with own_token():
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
    with own_ray() as folder:
        (folder / "session").mkdir(parents=True)
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("error", "stays"), [(ConfigError("x"), False), (KeyboardInterrupt(), False), (ClusterError("x"), True)]
)
def test_what_may_explain_a_failure_stays_and_is_named(
    error: BaseException, stays: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), own_ray() as folder:
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
    with own_ray() as folder:
        assert folder.parent.parent == Path("/tmp")
    room = 107 - len(own._SOCKET)  # bytes of a path
    (short := Path("/tmp") / uuid4().hex.ljust(room, "y")[: room - len("/tmp/")]).mkdir()
    try:
        monkeypatch.setenv(name, str(short))
        with own_ray() as folder:
            assert folder.parent.parent == short
            session = "session_2026-01-01_00-00-00_000000_4194304"
            validate_socket_filepath(str(folder / session / "sockets" / "plasma_store"))
    finally:
        short.rmdir()


@pytest.mark.parametrize(("given", "found"), [("", ""), ("inner.example,localhost", "inner.example,localhost,")])
def test_no_proxy_is_asked_for_loopback(given: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", given)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with own_ray():
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
        assert {"127.0.0.1", "localhost"} <= set(os.environ["no_proxy"].split(","))
        assert os.environ["no_proxy"].startswith(found)
        assert urllib.request.proxy_bypass_environment("127.0.0.1")
    assert os.environ["no_proxy"] == given and "NO_PROXY" not in os.environ


def test_nothing_is_reported_whatever_the_user_allows_other_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    assert usage_stats_enabled()  # or nothing was asked
    with own_ray():
        assert not usage_stats_enabled()
    assert usage_stats_enabled()


def test_the_environment_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SET", "1")
    monkeypatch.delenv("AN_UNSET", raising=False)
    with pytest.raises(OSError), changed_environment({"A_SET": "2", "AN_UNSET": "3"}):
        assert os.environ["AN_UNSET"] == "3"
        raise OSError
    assert os.environ["A_SET"] == "1" and "AN_UNSET" not in os.environ
