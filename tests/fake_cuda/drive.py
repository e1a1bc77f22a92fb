"""A step of dhp's trainers on fake CUDA tensors: trainers, autograd and its threads are real, weights have no values.

Collectives are torch's fake backend's, which answers at once. An operation on tensors of two devices raises, as on a
GPU."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dhp.core.batch import Bundle, StepData
from dhp.core.graph import HIDDEN_STATES, Edge, StageSpec
from dhp.engine.engines import make_rank
from tests.fake_cuda.device import as_if_cuda
from tests.fake_cuda.layout import Layout
from tests.fake_cuda.stand_ins import stand_ins
from tests.fake_cuda.watch import Watch

START = "start"  # the phase in which trainers are made


@contextmanager
def fake_device(watch: Watch, more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Inside, tensors on "cuda" have no values, and `watch` sees what is done to them. more: further stand-ins, by the
    dotted names of what they replace."""
    with ExitStack() as stack:
        stack.enter_context(as_if_cuda())
        for target, stand_in in {**stand_ins(), **more}.items():
            stack.enter_context(mock.patch(target, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield


def drive(
    layout: Layout, data: StepData, watch: Watch, micro_batches: int = 2, parts: Collection[str] = ("vision", "text")
) -> None:
    """A step of the first rank of each stage of these parts, one stage behind another; inside `fake_device`. Phases of
    `watch`: "text forward 0" and so on for each micro-batch, all of the same data, "text norm" and "text update"."""
    for stage in (one for one in layout.graph.stages if one.part in parts):
        with _joined(stage.degrees.world):
            watch.phase = START
            trainer = make_rank(layout.settings(stage))
            work = data.work[stage.part][0][0]
            for number in range(micro_batches):
                _micro_batch(trainer, stage, work, number, number == micro_batches - 1, watch)
            watch.phase = f"{stage.name} norm"
            trainer.grad_norm_sq(data.info)
            watch.phase = f"{stage.name} update"
            trainer.optimizer_step(data.info, 1.0)
    watch.phase = ""


def _micro_batch(trainer: Any, stage: StageSpec, work: Any, number: int, last: bool, watch: Watch) -> None:
    received = [_handed_over(trainer, work, edge) for edge in trainer.edges_in(0)]
    watch.phase = f"{stage.name} forward {number}"
    sent = trainer.forward_step(number, 0, work, *received)
    gradients = [_on_host(bundle) for bundle in sent]
    watch.phase = f"{stage.name} backward {number}"
    back = trainer.backward_step(number, 0, last, *gradients)
    for bundle in (*sent, *back):
        elsewhere = {name: rows.device for name, rows in bundle.tensors.items() if rows.device.type != "cuda"}
        if elsewhere:
            raise AssertionError(f"{watch.phase} hands over {elsewhere}, where only the worker's hand-over may wait")


def _handed_over(trainer: Any, work: Any, edge: Edge) -> Bundle:
    """What crosses an edge to the decoder, on the host."""
    ids, placement = work.tensors["input_ids"], work.placements.get("vision")
    rows = ids.shape if edge.tensors == (HIDDEN_STATES,) else (0 if placement is None else len(placement),)
    hidden = trainer.family.config.get_text_config().hidden_size
    return Bundle({name: torch.empty(*rows, hidden, dtype=trainer.dtype) for name in edge.tensors})


def _on_host(bundle: Bundle) -> Bundle:
    return Bundle({name: torch.empty_like(rows, device="cpu") for name, rows in bundle.tensors.items()})


@contextmanager
def _joined(world: int) -> Iterator[None]:
    """The first of so many ranks, of which there are no others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
