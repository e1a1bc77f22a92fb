"""The peak speed of a run's devices, as the ranks report it at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dhp.base.messages import DeviceInfo
from dhp.base.stages import StageGraph
from dhp.cluster.actor_group import ActorGroup
from dhp.cluster.dispatch import PerRank, per_rank
from dhp.config.schema import Config
from dhp.observe.kernels import kernel_lines
from dhp.observe.mfu import TABLE, peak_flops, unknown_devices, who_measures


def find_peak(groups: Mapping[str, ActorGroup], timeout_s: float, say: Callable[[str], None]) -> float | None:
    """Operations a second of all devices together. None, and a line that says so, when one of them is not known."""

    def ask(wanted: Mapping[str, PerRank | bool]) -> list[DeviceInfo]:
        verb = "describe_device"
        return [d for name, group in groups.items() for d in group.execute_all(verb, wanted[name], timeout_s=timeout_s)]

    devices = ask(dict.fromkeys(groups, False))
    measuring = iter(who_measures(devices))
    if any(who_measures(devices)):
        say("timing how fast the CPUs multiply, for mfu")
        wanted = {name: per_rank([next(measuring) for _ in range(group.size)]) for name, group in groups.items()}
        devices = ask(wanted)
    peak = peak_flops(devices)
    if peak is None:
        unknown = ", ".join(unknown_devices(devices))
        say(
            f"mfu is not reported: no peak of {unknown} is known. Add it to configs/{TABLE}, from the vendor's data "
            "sheet"
        )
    return peak


def name_kernels(groups: Mapping[str, ActorGroup], timeout_s: float) -> list[str]:
    """A line a stage: which kernel serves each kind of layer there, by its first rank, and what would be faster."""
    return [
        line
        for name, group in groups.items()
        for line in kernel_lines(name, group.execute_all("describe_kernels", timeout_s=timeout_s)[0])
    ]


def device_memory(groups: Mapping[str, ActorGroup], timeout_s: float) -> int | None:
    """Bytes of the device that has least. None where one is no GPU: a host's memory is shared with whatever else runs
    there."""
    found = [
        device
        for group in groups.values()
        for device in group.execute_all("describe_device", False, timeout_s=timeout_s)
    ]
    sizes = [device.memory_bytes for device in found]
    return None if None in sizes else min(size for size in sizes if size is not None)


def overlap_warning(config: Config, graph: StageGraph, device: str) -> str | None:
    """A warning where stages on one GPU go on at once and both exchange: each spins on parts of the GPU that the
    other one computes on. The results are the same."""
    schedule = config.training.schedule
    sharing = device == "cuda" and graph.sharing() > 1 and schedule != "sequential"
    if not sharing or sum(stage.degrees.world > 1 for stage in graph.stages) < 2:
        return None
    return (
        f"warning: training.schedule={schedule} with cluster.collocate=true lets collectives of several stages run at "
        "once on the same GPUs, where they take each other's time. Compare with training.schedule=sequential, or with "
        "cluster.collocate=false"
    )
