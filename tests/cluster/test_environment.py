"""Variables that a rank sets for libraries, and those that it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dhp.cluster.host import expand_segments, fixed_segments, record_nccl, require_single_gpu

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


def test_segments_grow_where_nobody_says_otherwise(set_by_nobody: list[str]) -> None:
    assert expand_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert set_by_nobody == ["expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
def test_the_users_allocator_stays(name: str, monkeypatch: pytest.MonkeyPatch, set_by_nobody: list[str]) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not expand_segments()
    assert {name: os.environ.get(name) for name in NAMES if name in os.environ} == {name: "max_split_size_mb:64"}
    assert set_by_nobody == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "meanwhile"),
    [
        ("expandable_segments:True", ["expandable_segments:False", "expandable_segments:True"]),
        (
            "max_split_size_mb:64, expandable_segments: True",
            ["max_split_size_mb:64, expandable_segments:False", "max_split_size_mb:64, expandable_segments: True"],
        ),
        ("expandable_segments:False", []),
        ("", []),
    ],
)
def test_memory_for_others_is_taken_in_segments_that_stay_and_the_users_settings_come_back(
    name: str, value: str, meanwhile: list[str], monkeypatch: pytest.MonkeyPatch, set_by_nobody: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="no memory"), fixed_segments():
        assert set_by_nobody == meanwhile[:1]
        raise RuntimeError("no memory")
    assert set_by_nobody == meanwhile


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
    require_single_gpu(WHERE)
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", value)
    require_single_gpu(WHERE)


NCCL_VARIABLES = (
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)


def test_what_nccl_did_is_written_beside_the_ranks_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    record_nccl(None, "text-3")
    assert {name: os.environ[name] for name in NCCL_VARIABLES if name in os.environ} == {NCCL_VARIABLES[0]: "1"}
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    record_nccl("/runs/a/logs", "text-3")
    prefix = "/runs/a/logs/text-3-nccl-"
    assert [os.environ[name] for name in NCCL_VARIABLES] == ["1", "1", "7", "2000", prefix, prefix]


def test_this_torch_knows_the_names_of_its_recorder() -> None:
    """A canary: what the pinned torch's library asks the environment for."""
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert f"{name}\0".encode() in library
