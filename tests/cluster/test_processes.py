"""What an actor's log leaves out."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import ray._private.tensor_serialization_utils as tensors
import torch

from dhp.cluster.servers import silence_understood_warnings


def test_only_warnings_that_are_understood_are_left_out() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence_understood_warnings()
        warnings.warn("Zero-copy tensor serialization is enabled, but it only works safely …", stacklevel=1)
        array = torch.zeros(2).numpy()
        array.flags.writeable = False
        torch.from_numpy(array)
        warnings.warn("something else may cause data corruption", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something else may cause data corruption"]


def test_ray_still_says_it_in_these_words() -> None:
    assert "Zero-copy tensor serialization is enabled" in inspect.getsource(tensors)


REDIRECTED = """
import sys
from dhp.cluster.servers import redirect_output
redirect_output(sys.argv[1], "text-0")
print("what the rank says")
"""


def redirected(log_dir: Path) -> str:
    """What a process says on its own stdout whose output goes to a log there."""
    return subprocess.run(
        [sys.executable, "-c", REDIRECTED, log_dir], check=True, capture_output=True, text=True
    ).stdout


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    assert redirected(tmp_path / "logs") == redirected(tmp_path / "logs") == ""
    assert (tmp_path / "logs" / "text-0.log").read_text() == "what the rank says\n" * 2


@pytest.mark.parametrize("linked", ["logs", "logs/text-0.log"])
def test_no_log_goes_to_what_a_link_leads_to(tmp_path: Path, linked: str) -> None:
    """Of another run, say, whose log it would be mixed with."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "text-0.log"
    other.write_text("of another run")
    if linked == "logs":
        (tmp_path / "logs").symlink_to(tmp_path / "other")
    else:
        (tmp_path / "logs").mkdir()
        (tmp_path / linked).symlink_to(other)
    said = redirected(tmp_path / "logs")
    assert said.startswith("text-0: the log stays here") and said.endswith("what the rank says\n")
    assert other.read_text() == "of another run"
