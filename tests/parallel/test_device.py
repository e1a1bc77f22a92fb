"""Packages and speed of a device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dhp.parallel import device
from dhp.parallel.device import (
    BITSANDBYTES,
    COMPILE,
    FLASH_ATTENTION,
    LIGER,
    describe_device,
    find_extra,
    find_extras,
    measure_speed,
)


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, **installed: str) -> None:
    """A machine with a GPU of that capability, or none, and with these modules."""
    versions = {**installed, "flash-attn": installed.get("flash_attn"), "liger-kernel": installed.get("liger_kernel")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(device, "find_spec", lambda module: object() if module in installed else None)
    monkeypatch.setattr(device, "version", versions.__getitem__)


@pytest.mark.parametrize(
    ("name", "capability", "installed", "version", "obstacle"),
    [
        (FLASH_ATTENTION, (9, 0), {}, None, "flash-attn is not installed"),
        (FLASH_ATTENTION, (9, 0), {"flash_attn": "2.8.3"}, "2.8.3", None),
        (FLASH_ATTENTION, None, {"flash_attn": "2.8.3"}, "2.8.3", "torch finds no CUDA device"),
        (FLASH_ATTENTION, (9, 0), {"flash_attn": "3.0.0b1"}, "3.0.0b1", "from 2.7 on, below 3.0"),
        (FLASH_ATTENTION, (7, 5), {"flash_attn": "2.7.0"}, "2.7.0", "compute capability 7.5, its kernels need 8.0"),
        (BITSANDBYTES, (8, 0), {}, None, "bitsandbytes is not installed"),
        (BITSANDBYTES, None, {"bitsandbytes": "0.50.2"}, "0.50.2", "torch finds no CUDA device"),
        (BITSANDBYTES, (7, 5), {"bitsandbytes": "0.50.2"}, "0.50.2", None),
        (LIGER, (8, 0), {}, None, "liger-kernel is not installed"),
        (LIGER, (8, 0), {"liger_kernel": "0.6.2"}, "0.6.2", None),
        (LIGER, None, {"liger_kernel": "0.6.2"}, "0.6.2", "torch finds no CUDA device"),
        ("wandb", None, {}, None, "wandb is not installed"),
        ("wandb", None, {"wandb": "0.31.0"}, "0.31.0", None),
        (COMPILE, (8, 0), {}, torch.__version__, "triton is not installed"),
        (COMPILE, (6, 1), {"triton": ""}, torch.__version__, "compute capability 6.1, its kernels need 7.0"),
        (COMPILE, (8, 0), {"triton": ""}, torch.__version__, None),
    ],
)
def test_an_extra_is_told_with_its_version_and_what_keeps_it_from_use(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: Any, installed: dict, version: Any, obstacle: str | None
) -> None:
    on(monkeypatch, capability, **installed)
    found = find_extra(name)
    assert found.version == version
    assert (found.obstacle is None) if obstacle is None else (obstacle in (found.obstacle or ""))


def test_compiling_for_a_cpu_wants_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, None)
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert find_extra(COMPILE).obstacle is None
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert "there is no C++ compiler" in (find_extra(COMPILE).obstacle or "")


def test_each_is_written_on_a_line_with_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, None, flash_attn="2.8.3")
    flash, _, liger, *_ = map(str, find_extras())
    assert flash.startswith("2.8.3, not usable: torch finds no CUDA device (attention by its kernels")
    assert liger.startswith("not found (nothing here")


def test_ranks_of_one_machine_share_its_cpus() -> None:
    found = describe_device(torch.device("cpu"), torch.float64)
    assert (found.kind, found.name, found.format, found.measured) == ("cpu", "cpu", "float64", None)
    assert found == describe_device(torch.device("cpu"), torch.float64)


def test_a_measured_speed_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product takes as long as it has operations at 1 GFLOP/s, but the second of its size half as long."""
    now, made = [0.0], []

    def mm(left: torch.Tensor, right: torch.Tensor) -> None:
        size = len(left)
        made.append(size)
        now[0] += 2 * size**3 / (2e9 if made.count(size) == 2 else 1e9)

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device.torch, "mm", mm)
    threads = torch.get_num_threads()
    assert measure_speed(torch.float32) == pytest.approx(2e9)
    assert torch.get_num_threads() == threads
    assert now[0] < 1.0 and max(made) <= device.LARGEST_ROWS


def test_a_real_measurement_ends_and_is_a_speed() -> None:
    found = describe_device(torch.device("cpu"), torch.float32, measure=True)
    assert 1e7 < found.measured < 1e15


@pytest.mark.parametrize("allowed, expected", [(False, "float32"), (True, "tfloat32")])
def test_gpus_are_told_apart_by_their_own_ids(monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: str) -> None:
    about = SimpleNamespace(name="NVIDIA H200", uuid="1234-ab", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        found = describe_device(torch.device("cuda", 0), torch.float32, measure=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (found.kind, found.name, found.device_id) == ("cuda", "NVIDIA H200", "GPU 1234-ab")
    assert (found.format, found.measured, found.memory_bytes) == (expected, None, 141 * 2**30)
    assert describe_device(torch.device("cuda", 0), torch.bfloat16).format == "bfloat16"


@pytest.mark.parametrize(("wanted", "fits"), [(20, True), (30, True), (31, False)])
def test_room_is_what_the_process_holds_unused_and_what_the_gpu_has_free(
    wanted: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"reserved_bytes": {"all": {"current": 100}}, "allocated_bytes": {"all": {"current": 80}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: counts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 1000))
    device.require_memory(10**12, torch.device("cpu"))
    if fits:
        device.require_memory(wanted, torch.device("cuda"))
    else:
        with pytest.raises(torch.OutOfMemoryError, match="MiB that backward takes"):
            device.require_memory(wanted, torch.device("cuda"))
