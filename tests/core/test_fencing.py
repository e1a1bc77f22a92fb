"""A run that lost its directory of checkpoints to another neither finishes nor removes one there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dhp.checkpoint.folder import Unfinished, finish_checkpoint, open_checkpoint
from dhp.core.errors import CheckpointError
from dhp.core.locks import TOKEN_FILE, TakenOver, fenced, read_token, require_fence

ABOUT = {"step": 1}


def take_over(folder: Path) -> None:
    (folder / TOKEN_FILE).write_text(json.dumps({"id": "other", "host": "beta", "pid": 77}))


def test_the_token_is_there_for_the_time_of_the_run(tmp_path: Path) -> None:
    with fenced(tmp_path):
        token = read_token(tmp_path)
        assert token is not None and token.pid == os.getpid()
        require_fence(tmp_path)
    assert not list(tmp_path.iterdir())
    require_fence(tmp_path)  # nothing is fenced: no run's


def test_what_another_attempt_has_taken_over_stays_its_own(tmp_path: Path) -> None:
    with fenced(tmp_path):
        folder = open_checkpoint(tmp_path, 1)
        take_over(tmp_path)
        with pytest.raises(CheckpointError, match="process 77 on host beta"):
            finish_checkpoint(folder, ABOUT, {})
        assert folder.is_dir() and not folder.with_suffix("").exists()
    token = read_token(tmp_path)
    assert token is not None and token.id == "other"


def test_after_the_other_one_has_ended_too(tmp_path: Path) -> None:
    with fenced(tmp_path):
        (tmp_path / TOKEN_FILE).unlink()
        with pytest.raises(CheckpointError, match="whose run has ended"):
            require_fence(tmp_path)


def test_a_folder_that_cannot_be_read_is_nobody_elses(tmp_path: Path) -> None:
    with fenced(tmp_path):
        (tmp_path / TOKEN_FILE).rename(tmp_path / "aside")
        (tmp_path / TOKEN_FILE).mkdir()  # which reads as a disk that fails
        with pytest.raises(CheckpointError, match="cannot be read") as raised:
            require_fence(tmp_path)
        assert not isinstance(raised.value, TakenOver)
        with pytest.raises(KeyError), Unfinished() as unfinished:  # the error of the run's own is the one to report
            unfinished.add(open_checkpoint(tmp_path, 1))
            raise KeyError
        (tmp_path / TOKEN_FILE).rmdir()
        (tmp_path / "aside").rename(tmp_path / TOKEN_FILE)
        require_fence(tmp_path)


def test_a_stopped_process_that_wakes_renames_nothing(tmp_path: Path) -> None:
    """It stops itself right before the end of its checkpoint; meanwhile another one takes the directory over."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dhp.checkpoint.folder import finish_checkpoint, open_checkpoint\n"
        "from dhp.core.locks import fenced\n"
        "folder = Path(sys.argv[1])\n"
        "with fenced(folder):\n"
        "    unfinished = open_checkpoint(folder, 1)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    finish_checkpoint(unfinished, {'step': 1}, {})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    os.waitpid(process.pid, os.WUNTRACED)
    with fenced(tmp_path):
        finish_checkpoint(open_checkpoint(tmp_path, 2), {"step": 2}, {})
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 1 and "TakenOver" in stderr and f"process {os.getpid()} on host" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1.partial", "step_2"]
