"""What a rank computes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dhp.parallel import device
from dhp.parallel.device import describe_device, measure_speed


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
