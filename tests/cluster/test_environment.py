"""Variables that a rank sets for libraries, and those that it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dhp.base.errors import ConfigError
from dhp.cluster.environment import expand_segments, require_fixed_segments, require_own_gpu

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WHERE = "node 10.0.0.6, where text rank 0 runs"


@pytest.fixture(autouse=True)
def set_by_nobody(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is set but by the test; what torch itself is told."""
    for name in (*NAMES, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    return told


@pytest.mark.parametrize("transport", ["shared_memory", "object_store"])
def test_segments_grow_where_nobody_says_otherwise(transport: str, set_by_nobody: list[str]) -> None:
    assert expand_segments(transport)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert set_by_nobody == ["expandable_segments:True"]


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl"])
def test_segments_stay_where_other_processes_reach_into_them(transport: str, set_by_nobody: list[str]) -> None:
    assert not expand_segments(transport)
    assert "PYTORCH_ALLOC_CONF" not in os.environ and set_by_nobody == []


@pytest.mark.parametrize("name", NAMES)
def test_the_users_allocator_stays(name: str, monkeypatch: pytest.MonkeyPatch, set_by_nobody: list[str]) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not expand_segments("shared_memory")
    assert {name: os.environ.get(name) for name in NAMES if name in os.environ} == {name: "max_split_size_mb:64"}
    assert set_by_nobody == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: True"])
def test_expandable_segments_and_cuda_ipc_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        require_fixed_segments("cuda_ipc", WHERE)
    assert str(caught.value).startswith(f"{WHERE}: cluster.transport=cuda_ipc with {name}={value}: ")
    require_fixed_segments("shared_memory", WHERE)
    monkeypatch.setenv(name, "expandable_segments:False")
    require_fixed_segments("cuda_ipc", WHERE)


def test_this_torch_knows_both_the_name_and_the_setting() -> None:
    """A canary: the variable that the pinned torch reads, and that it can be told after its import."""
    told = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    later = f"import torch; torch._C._accelerator_setAllocatorSettings('expandable_segments:True'); {told}"
    of_two = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {}
    for environment, program in zip(of_two, (told, later), strict=True):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
        assert done.stdout.strip() == "expandable_segments:True"


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_ray_may_be_told_to_show_each_process_its_own_gpu(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_own_gpu(WHERE)
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", value)
    require_own_gpu(WHERE)
