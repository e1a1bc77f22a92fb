"""The peak of a run's devices, asked of its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.core.axes import Degrees
from dhp.core.dispatch import spread
from dhp.core.reports import DeviceInfo, KernelUse
from dhp.engine.stage import StageEngine
from dhp.trainer.step_reports import compile_notes, find_peak, name_kernels, overlap_warning
from tests.helpers.graphs import make_graph


class Group:
    """Ranks on the given devices; measured: which of them were asked to measure."""

    def __init__(self, *devices: DeviceInfo):
        self.devices, self.size = devices, len(devices)
        self.measured: list[int] = []

    def execute_all(self, method: str, *arguments: Any, timeout_s: float) -> list[DeviceInfo]:
        assert method == "describe_device" and timeout_s == 9.0
        wanted = [measure for (measure,) in spread(arguments, self.size)]
        self.measured += [rank for rank, measure in enumerate(wanted) if measure]
        return [
            DeviceInfo(d.kind, d.name, d.device_id, d.format, 1e9 if measure else None)
            for d, measure in zip(self.devices, wanted, strict=True)
        ]


def test_collocated_parts_on_two_machines_measure_each_once() -> None:
    on = lambda device_id: DeviceInfo("cpu", "cpu", device_id, "float32")
    groups = {"vision": Group(on("m"), on("m")), "text": Group(on("m"), on("n"), on("n"))}
    said: list[str] = []
    assert find_peak(groups, 9.0, said.append)[0] == 2e9
    assert (groups["vision"].measured, groups["text"].measured) == ([0], [1])
    assert said == ["timing how fast the CPUs multiply, for mfu"]


def test_gpus_are_looked_up_and_an_unknown_one_is_told_once() -> None:
    known = DeviceInfo("cuda", "NVIDIA H100 PCIe", "GPU 0", "bfloat16")
    unknown = DeviceInfo("cuda", "Some GPU", "GPU 1", "bfloat16")
    said: list[str] = []
    assert find_peak({"vision": Group(known), "text": Group(known)}, 9.0, said.append)[0] == 756e12 and not said
    groups = {"vision": Group(known), "text": Group(unknown, unknown)}
    assert find_peak(groups, 9.0, said.append)[0] is None
    assert said == [
        "mfu is not reported: no peak of Some GPU in bfloat16 is known. Add it to configs/devices/devices.json, from "
        "the vendor's data sheet"
    ]
    assert not groups["text"].measured


def test_kernels_of_a_stage_are_one_result_of_its_verb() -> None:
    """A rank's tuple is as many results of a call, which has one."""
    uses = (KernelUse("attention", "varlen", 2), KernelUse("loss", "chunked"))
    found = StageEngine.describe_kernels(SimpleNamespace(_kernels=uses))  # type: ignore[arg-type]
    assert not isinstance(found, tuple) and list(found) == list(uses)


def test_each_stage_names_its_kernels_and_what_would_be_faster() -> None:
    uses = (KernelUse("attention", "varlen", 2), KernelUse("gate", "plain", 2, "gate compiled, which needs triton"))
    group = SimpleNamespace(execute_all=lambda verb, timeout_s: {"describe_kernels": [list(uses), []]}[verb])
    loss = SimpleNamespace(execute_all=lambda *_, timeout_s: [[KernelUse("loss", "chunked")]])
    assert name_kernels({"vision": group, "text": loss}, 9.0) == [
        "kernels of vision: attention varlen ×2, gate plain ×2",
        "faster in vision: gate compiled, which needs triton",
        "kernels of text: loss chunked",
    ]


@pytest.mark.parametrize(
    ("schedule", "device", "tensor", "warns"),
    [
        ("vision_ahead", "cuda", 2, True),
        ("sequential", "cuda", 2, False),
        ("vision_ahead", "cpu", 2, False),
        ("vision_ahead", "cuda", 1, False),
    ],
)
def test_overlapping_collectives_on_shared_gpus_are_warned_of(
    schedule: str, device: str, tensor: int, warns: bool
) -> None:
    graph = make_graph(Degrees(ulysses=tensor), Degrees(tensor=tensor))
    config: Any = SimpleNamespace(training=SimpleNamespace(schedule=schedule))
    warning = overlap_warning(config, graph, device)
    assert (warning is not None) == warns and (not warns or "training.schedule=vision_ahead" in warning)


def test_adapters_that_are_not_compiled_are_named() -> None:
    asked = ["text.compile=true", "text.lora.rank=2", "text.lora.dropout=0.1"]
    config = compose_config("tiny", overrides=[*asked, "vision.lora.rank=2", "vision.lora.dropout=0.2"])
    assert compile_notes(config) == [
        "text.compile=true does not compile matrices with adapters where text.lora.dropout=0.1: what is dropped is "
        "drawn by code that is not compiled. Set text.lora.dropout=0 to compile them"
    ]
    for left in range(3):
        assert not compile_notes(compose_config("tiny", overrides=asked[:left] + asked[left + 1 :]))
