"""Paths that a node lacks are told with the node; logs that cannot be written stay in Ray's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dhp.cluster import host
from dhp.cluster.host import beacon, require_beacon, require_paths
from dhp.core.errors import ConfigError


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_address", lambda: "10.0.0.6")
    monkeypatch.setattr(host, "BEACON_TIMEOUT_S", 0.0)


def test_a_missing_path_names_key_node_and_rank(tmp_path: Path) -> None:
    require_paths("text rank 1", {"text.model_name": str(tmp_path)})
    with pytest.raises(ConfigError) as caught:
        require_paths("text rank 1", {"text.model_name": str(tmp_path / "model")})
    told = f"text.model_name={tmp_path / 'model'} does not exist on node 10.0.0.6, where text rank 1 runs. "
    assert str(caught.value).startswith(told)


def test_a_beacon_shows_who_shares_a_directory(tmp_path: Path) -> None:
    require_beacon("text rank 1", None)
    with beacon(str(tmp_path)) as path:
        require_beacon("text rank 1", path)
        other = str(tmp_path / "elsewhere" / Path(path).name)
        with pytest.raises(ConfigError, match=r"training.checkpoint_dir=.*elsewhere on node 10.0.0.6, where text rank"):
            require_beacon("text rank 1", other)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["missing/logs", "file/logs"])
def test_a_log_that_cannot_be_written_stays_where_it_was(tmp_path: Path, made: str) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "import sys; from dhp.cluster.servers import redirect_output\n"
        "redirect_output(sys.argv[1], 'text-0'); print('after')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / made)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"text-0: the log stays here, because {tmp_path / made} cannot be written on this host: ")
    assert second == "after"
    assert not (tmp_path / "missing").exists()
