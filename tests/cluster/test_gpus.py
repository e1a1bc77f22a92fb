"""What nvidia-smi and torch say of GPUs, and which answers a run refuses. No GPU is needed: all of it is told."""

import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dhp.cluster import gpus
from dhp.cluster.address import LOCAL
from dhp.cluster.cluster import Cluster, ClusterSpec
from dhp.cluster.gpus import (
    Build,
    Gpu,
    check_build,
    check_devices_here,
    check_gpus,
    check_modes,
    least_memory,
    parse_gpus,
    read_gpus,
    visible_gpus,
)
from dhp.core.errors import ConfigError
from tests.helpers.graphs import make_graph

NVIDIA_SMI_OUTPUT = "0, 580.65.06, Default, 81559 MiB, 12 MiB\n1, 580.65.06, Exclusive_Process, 40960 MiB, 0 MiB\n"
TWO = (Gpu(0, "580.65.06", "Default", 81559 << 20, 12 << 20), Gpu(1, "580.65.06", "Exclusive_Process", 40 << 30, 0))
CUDA_13 = Build("2.13.0+cu130", "13.0", True)
WHERE = "node 10.0.0.6, where text rank 0 runs"


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A command of that name, first in PATH, that says what `told` says and ends with what `status` says."""
    (tmp_path / "told").write_text(NVIDIA_SMI_OUTPUT)
    (tmp_path / "status").write_text("0")
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/told\nexit $(cat {tmp_path}/status)\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setattr(torch, "__version__", build.version)
    monkeypatch.setattr(torch.version, "cuda", build.cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: build.available)


def test_gpus_are_read_as_nvidia_smi_prints_them(nvidia_smi: Path) -> None:
    assert read_gpus() == TWO
    asked = (nvidia_smi / "asked").read_text().split()
    assert asked == ["--query-gpu=index,driver_version,compute_mode,memory.total,memory.used", "--format=csv,noheader"]


def test_lines_that_are_no_row_are_left_out() -> None:
    assert parse_gpus("") == parse_gpus("No devices were found\n") == parse_gpus("x, 1, Default, 1 MiB, 0 MiB\n") == ()
    assert parse_gpus("warning, of: something\n7,550.1,[N/A],[N/A],[N/A]\n") == (Gpu(7, "550.1", "[N/A]"),)


@pytest.mark.parametrize(("held", "said"), [(61 << 30, True), (3 << 30, False), (None, False)])
def test_memory_that_other_processes_hold_is_said_before_anything_is_loaded(
    held: int | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpus, "read_gpus", lambda: (Gpu(0, "580.65.06", "Default", 80 << 30), replace(TWO[0], held=held))
    )
    monkeypatch.setattr(gpus, "check_build", lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_devices_here("auto", 1, True)
    assert [str(one.message)[:80] for one in caught] == (
        ["this machine: other processes hold 61.0 GiB of the 79.6 GiB of GPU 0, and the ru"] if said else []
    )


def test_the_smallest_gpu_bounds_what_a_rank_may_keep() -> None:
    assert least_memory(TWO) == 40 << 30
    assert least_memory(()) is None and least_memory([*TWO, Gpu(2, "580.65.06", "Default")]) is None


def test_without_nvidia_smi_or_its_answer_there_is_nothing_to_check(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nvidia_smi / "status").write_text("9")
    assert read_gpus() == ()

    def late(command: object, *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(str(command), timeout)

    monkeypatch.setattr(gpus.subprocess, "run", late)
    assert read_gpus() == ()
    monkeypatch.undo()
    monkeypatch.setattr(gpus, "QUERY", (str(nvidia_smi / "nowhere"),))
    assert read_gpus() == ()
    check_modes((), True, WHERE)


@pytest.mark.parametrize(
    ("setting", "left"), [(None, (0, 1)), ("1", (1,)), ("1, 0", (0, 1)), ("", ()), ("GPU-8932f937", (0, 1)), ("7", ())]
)
def test_a_process_looks_at_the_gpus_that_it_may_use(setting: str | None, left: tuple[int, ...]) -> None:
    assert tuple(gpu.index for gpu in visible_gpus(TWO, setting)) == left


@pytest.mark.parametrize(
    ("cuda", "driver", "told"),
    [
        ("13.0", "550.54.14", "needs driver 580 or newer. Install such a driver, or a build of torch for CUDA 12,"),
        ("13.2", "579.9", "the NVIDIA driver 579.9 is too old for torch 2.13.0+cu, which is built for CUDA 13.2"),
        ("12.8", "470.82.01", "needs driver 525 or newer. Install such a driver, or set cluster.device=cpu"),
    ],
)
def test_a_driver_that_is_too_old_is_told_with_the_one_that_would_do(cuda: str, driver: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_build(Build("2.13.0+cu", cuda, False), [Gpu(0, driver, "Default")], WHERE)
    assert str(caught.value).startswith(WHERE) and told in str(caught.value)


def test_a_driver_that_torch_can_use_is_new_enough() -> None:
    check_build(CUDA_13, TWO, WHERE)
    check_build(CUDA_13, [Gpu(0, "550.54.14", "Default")], WHERE)  # by NVIDIA's package for forward compatibility
    check_build(CUDA_13, (), WHERE)


@pytest.mark.parametrize(
    ("build", "found", "told"),
    [
        (Build("2.13.0+cpu", None, False), TWO, "torch 2.13.0+cpu is built for CPUs alone (torch.version"),
        (Build("2.13.0+cpu", None, False), (), "Install torch 2.13.0 from PyPI"),
        (Build("2.13.0", "13.0", False), TWO, "false; NVIDIA driver 580.65.06, CUDA_VISIBLE_DEVICES=-1"),
        (Build("2.13.0", "13.0", False), (), "NVIDIA driver unknown"),
        (Build("2.13.0", "13.0", False), [Gpu(0, "[N/A]", "Default")], "NVIDIA driver [N/A]"),
        (Build("2.20.0", "14.0", False), TWO, "built for CUDA 14.0, cannot use any"),
    ],
)
def test_a_torch_that_cannot_use_gpus_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, build: Build, found: tuple[Gpu, ...], told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError) as caught:
        check_build(build, found, WHERE)
    assert told in str(caught.value) and str(caught.value).endswith("set cluster.device=cpu")


def test_a_shared_gpu_must_admit_several_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        check_modes(TWO[1:], True, WHERE)
    told = str(caught.value)
    assert told.startswith(WHERE) and "GPU 1 Exclusive_Process" in told and "nvidia-smi -i 1 -c DEFAULT" in told
    assert "cluster.collocate=false" in told
    check_modes(TWO[1:], False, WHERE)
    check_modes(TWO, True, WHERE)  # Ray may give the first one; whoever gets the second looks for itself
    check_modes([Gpu(0, "580.1", "[N/A]")], True, WHERE)
    with pytest.raises(ConfigError, match="GPU 2 Prohibited, and no process may use it"):
        check_modes([Gpu(2, "580.1", "Prohibited")], False, WHERE)


def test_through_the_multi_process_service_an_exclusive_gpu_is_shared(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, CUDA_13)
    with pytest.raises(ConfigError, match="Exclusive_Process"):
        check_gpus(TWO[1:], True, WHERE)
    (nvidia_smi / "mps").mkdir()
    (nvidia_smi / "mps" / "control").touch()
    check_gpus(TWO[1:], True, WHERE)


def test_a_run_of_its_own_ray_looks_before_it_starts_one(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("auto", "cuda"):
        layout = ClusterSpec(make_graph(), device, LOCAL, 1, 60.0, 60.0, "logs", "checkpoints")
        with pytest.raises(ConfigError, match="^this machine: there are GPUs, but torch .* built for CPUs alone"):
            Cluster(layout).__enter__()
    pretend(monkeypatch, CUDA_13)
    check_devices_here("auto", 2, collocate=True)
    (nvidia_smi / "told").write_text("0, 580.65.06, Exclusive_Process, 81559 MiB, 0 MiB\n")
    check_devices_here("cuda", 1, collocate=False)
    for bundles, collocate in ((1, True), (2, False)):
        with pytest.raises(ConfigError, match="GPU 0 Exclusive_Process"):
            check_devices_here("auto", bundles, collocate)
    check_devices_here("cpu", 2, collocate=True)


def test_without_any_gpu_cuda_is_refused_and_auto_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    check_devices_here("auto", 2, collocate=True)
    with pytest.raises(ConfigError, match="cluster.device=cuda, but there is no GPU"):
        check_devices_here("cuda", 2, collocate=True)
