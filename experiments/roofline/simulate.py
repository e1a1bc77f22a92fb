"""One simulated step on fake CUDA tensors, and rows of what its kernels would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.fake_cuda.drive import START, drive, fake_device
from experiments.fake_cuda.layout import Sizes, lay_out
from experiments.roofline.costs import ELEMENTWISE, KINDS, PRODUCT, Costs, Kernel
from experiments.roofline.device import Device
from experiments.roofline.fused import keys as keys_of
from experiments.roofline.fused import stand_ins


@dataclass(frozen=True)
class Step:
    """The kernels of a step of one rank of each stage. useful_flops: of the model, by part, however it is computed; of
    the ranks of a stage one's even share."""

    kernels: tuple[Kernel, ...]
    useful_flops: dict[str, int]
    patches: int
    tokens: int


def simulate(model: str, sizes: Sizes, fused: str, keys: Sequence[str] = ()) -> Step:
    """One micro-batch forward and backward, norm and update, of the layout that `keys` say. The guard is loaded."""
    layout = lay_out(model, [*keys_of(fused), *keys])
    data = layout.shard(sizes)
    costs = Costs(layout.family.config.get_text_config().vocab_size)
    with fake_device(costs, stand_ins(costs, fused)):
        drive(layout, data, costs, micro_batches=1)
    kernels = tuple(one for one in costs.launched if one.phase != START and not _makes_states(one))
    ranks = {stage.part: stage.degrees.world for stage in layout.graph.stages}
    useful = {part: flops // ranks[part] for part, flops in data.info.flops.items()}
    return Step(kernels, useful, data.info.vision_tokens, data.info.tokens)


def _makes_states(kernel: Kernel) -> bool:
    """Whether it makes the optimizer's moments, which only the first update of a run does."""
    return kernel.phase.endswith("update") and kernel.name in ("zeros", "zeros_like")


def rows_of(step: Step, device: Device) -> list[dict[str, Any]]:
    """A row for each phase of each part, one for each assumed kernel of it, and one for the step."""
    phases = list(dict.fromkeys(one.phase for one in step.kernels))
    rows = [row for phase in phases for row in _of_phase(phase, step.kernels, device)]
    spent = {phase: sum(row["ms"] for row in rows if row["phase"] == phase) for phase in phases}
    passes = sum(ms for phase, ms in spent.items() if phase.split()[-2] in ("forward", "backward"))
    useful = sum(step.useful_flops.values())
    total = {
        "phase": "step",
        "ms": round(sum(spent.values()), 2),
        "passes_ms": round(passes, 2),
        "kernels": sum(row["kernels"] for row in rows),
        "elementwise_bytes": sum(row["elementwise_bytes"] for row in rows),
        "useful_flops": useful,
        "counted_flops": sum(one.flops for one in step.kernels),
        "mfu": round(useful / (passes * 1e-3) / (device.peak_tflop_s * 1e12), 4),
        "patches": step.patches,
        "tokens": step.tokens,
    }
    return [*rows, total]


def _of_phase(phase: str, kernels: Sequence[Kernel], device: Device) -> Iterator[dict[str, Any]]:
    own = [one for one in kernels if one.phase == phase]
    written = [one for one in own if not one.assumed]
    row: dict[str, Any] = {"phase": phase, "ms": _ms(written, device)}
    for kind in KINDS:
        row[f"{kind}_ms"] = _ms([one for one in written if one.kind == kind and not one.vocabulary], device)
    row["vocabulary_ms"] = _ms([one for one in written if one.vocabulary], device)
    elementwise = [one for one in written if one.kind == ELEMENTWISE]
    row["elementwise_bytes"] = sum(one.nbytes for one in elementwise)
    row["product_flops"] = sum(one.flops for one in written if one.kind == PRODUCT)
    yield row | {"kernels": len(written)}
    for name in dict.fromkeys(one.name for one in own if one.assumed):
        some = [one for one in own if one.assumed and one.name == name]
        nbytes = sum(one.nbytes for one in some)
        counted = {"elementwise_bytes": nbytes, "kernels": len(some) if nbytes > 0 else 0}
        yield {"phase": phase, "assumed": name, "ms": _ms(some, device)} | counted


def _ms(kernels: Sequence[Kernel], device: Device) -> float:
    """What is spared takes a negative time."""
    spent = 0.0
    for one in kernels:
        if one.nbytes < 0:
            spent += one.nbytes / (device.bandwidth_tb_s * 1e12)
        else:
            spent += device.seconds(one.kind, one.nbytes, one.flops)
    return round(spent * 1e3, 3)
