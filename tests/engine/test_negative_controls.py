"""Each mistake that others shipped, planted on purpose: the parity tests must see it.

The loss alone sees few of them; that is how they went unnoticed elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle, StepData, StepInfo, TextInput, VisionInput
from dhp.core.reports import StageReport
from dhp.parallel.optim import fsdp
from dhp.parallel.tensor import loss
from tests.helpers.batches import mixed_step
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, InspectedVision, compare

CASE = Case(Degrees(ulysses=2), Degrees(tensor=2))
ZERO = Case(Degrees(ulysses=2), Degrees(), dtype="float32", zero_stage=1)
ZERO_2 = Case(Degrees(ulysses=2), Degrees(data=2), dtype="float32", zero_stage=2, text_zero_stage=2)
ZERO_3 = Case(Degrees(ulysses=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=3)
PACKED = replace(CASE, packing=True)
SHARDED = Case(Degrees(), Degrees(data=2, tensor=2), text_zero_stage=3, fsdp=True)
REPLICAS = Case(Degrees(data=2), Degrees(data=2), micro_batches=1)


class HeadWithoutAllReduce(InspectedText):
    """The gradient that leaves the vocabulary-sharded head stays this rank's part of it."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        whole = loss._TokenLossSum.backward

        def partial(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
            ctx.group = None
            return whole(ctx, scale)

        loss._TokenLossSum.backward = staticmethod(partial)


class GradientsOfAllTensorRanks(InspectedText):
    """Gradients of the same tokens summed over tensor replicas."""

    def backward_step(self, *arguments: Any) -> tuple[Bundle, ...]:
        tensor = self.spec.degrees.tensor
        return tuple(Bundle({n: g * tensor for n, g in b.tensors.items()}) for b in super().backward_step(*arguments))


class RowsAsTheyCome(InspectedText):
    """Embeddings put in the order in which ranks send them."""

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        if "vision" in work.placements:
            order = torch.arange(len(work.placements["vision"]))
            work = replace(work, placements={**work.placements, "vision": order})
        return super().forward_step(micro_batch, chunk, work, *received)


class MeanOverReplicas(InspectedText):
    """Gradients averaged over data replicas."""

    def backward_step(self, *arguments: Any) -> tuple[Bundle, ...]:
        result = super().backward_step(*arguments)
        self.optimizer._take_sums()
        for local in self.optimizer._masters:
            local.grad /= self.spec.degrees.data
        return result


class NoReduction(InspectedVision):
    """Each vision rank keeps the gradient of its own windows."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.optimizer._gradients._group = dist.new_group([dist.get_rank()], use_local_synchronization=True)


class NoExchange(InspectedVision):
    """Full-attention layers see this rank's windows alone."""

    def forward_step(self, micro_batch: int, chunk: int, work: VisionInput, *received: Bundle) -> tuple[Bundle, ...]:
        return super().forward_step(micro_batch, chunk, replace(work, **_each_rank_alone(work)), *received)


def _each_rank_alone(work: VisionInput) -> dict[str, Any]:
    """Every span a segment of its own."""
    lengths = [count for shard in work.shards for _, _, count in shard]
    numbers = iter(range(len(lengths)))
    shards = tuple(tuple((next(numbers), 0, count) for _, _, count in shard) for shard in work.shards)
    return {"segment_lengths": tuple(lengths), "shards": shards}


class NoNorm(InspectedVision):
    """Clipping that does not see the vision part."""

    def grad_norm_sq(self, info: StepInfo) -> float:
        super().grad_norm_sq(info)
        return 0.0


class OneSegment(InspectedText):
    """Samples of a packed row see the ones before them."""

    def forward_step(self, micro_batch: int, chunk: int, work: TextInput, *received: Bundle) -> tuple[Bundle, ...]:
        return super().forward_step(micro_batch, chunk, replace(work, lengths=(sum(work.lengths),)), *received)


class _NoDecay:
    """Weight decay silently off."""

    def __init__(self, settings: Any):
        super().__init__(replace(settings, update=replace(settings.update, weight_decay=0.0)))


class NoDecay(_NoDecay, InspectedText):
    pass


class NoDecayUnderZero(_NoDecay, InspectedVision):
    pass


class MeanOverZeroRanks(InspectedText):
    """DeepSpeed's own average over ranks."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        engine = self.optimizer._engine
        engine.gradient_average = engine.optimizer.gradient_average = True


class BesideTheEngine(InspectedText):
    """Forward passes that ZeRO-3 does not count, so that micro-batches overwrite one another."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.optimizer._engine.optimizer.clear_backward_seen_flag = lambda: None


class MeanOverShards(InspectedText):
    """FSDP's own factor: gradients divided by the ranks that share the states."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        for unit in fsdp._units(self.optimizer._root):
            unit.set_gradient_divide_factor(float(settings.spec.degrees.data))


class NormOfOwnRows(InspectedText):
    """The norm of what this rank holds, not of the whole."""

    def grad_norm_sq(self, info: StepInfo) -> float:
        super().grad_norm_sq(info)
        self._norm_sq = float(fsdp.sum_of_squares([s.weight.grad for s in self.optimizer._trained]))
        return self._norm_sq


class RateOfTheNextStep(InspectedText):
    """The learning rate one step ahead."""

    def optimizer_step(self, info: StepInfo, *norms_sq: float) -> StageReport:
        return super().optimizer_step(replace(info, step=info.step + 1), *norms_sq)


def own_token_count(data: StepData) -> StepData:
    """Each micro-batch divided by its own number of targets."""
    count = lambda work: int((work.tensors["targets"] != -100).sum())
    text = tuple(tuple(replace(work, total_weight=count(work)) for work in row) for row in data.work["text"])
    return replace(data, work={**data.work, "text": text})


def same_data_everywhere(data: StepData) -> StepData:
    """All replicas train on the first one's rows."""
    text = tuple((row[0],) * len(row) for row in data.work["text"])
    return replace(data, work={**data.work, "text": text})


FAULTS: list[tuple[str, Case, Fault, Callable[[Errors], bool]]] = [
    ("head gradient not summed", CASE, Fault(text=HeadWithoutAllReduce), lambda e: e.loss < 1e-9 < 0.1 < e.gradient),
    ("sum over tensor ranks", CASE, Fault(text=GradientsOfAllTensorRanks), lambda e: 0.9 < e.gradient < 1.1),
    ("rows in the order of arrival", CASE, Fault(text=RowsAsTheyCome), lambda e: e.loss > 1e-6 and e.gradient > 1e-2),
    ("vision gradients not reduced", CASE, Fault(vision=NoReduction), lambda e: e.loss < 1e-9 < 0.1 < e.gradient),
    ("no exchange in full attention", CASE, Fault(vision=NoExchange), lambda e: e.loss > 1e-7 and e.gradient > 1e-2),
    ("clipping without vision", CASE, Fault(vision=NoNorm), lambda e: e.gradient < 1e-9 < 1e-3 < e.norm),
    ("no weight decay", CASE, Fault(text=NoDecay), lambda e: e.gradient < 1e-9 < 1e-5 < e.update),
    ("no weight decay under ZeRO", ZERO, Fault(vision=NoDecayUnderZero), lambda e: e.gradient < 1e-4 < 5e-3 < e.update),
    ("no weight decay under ZeRO-3", ZERO_3, Fault(text=NoDecay), lambda e: e.gradient < 1e-4 < 5e-3 < e.update),
    ("clipping without vision under ZeRO-2", ZERO_2, Fault(vision=NoNorm), lambda e: e.gradient < 1e-4 < 1e-3 < e.norm),
    ("mean over ZeRO's ranks", ZERO_2, Fault(text=MeanOverZeroRanks), lambda e: e.loss < 1e-5 < 0.4 < e.gradient),
    ("ZeRO-3 beside the engine", ZERO_3, Fault(text=BesideTheEngine), lambda e: e.loss < 1e-5 < 0.1 < e.gradient),
    ("rate of the next step", CASE, Fault(text=RateOfTheNextStep), lambda e: e.gradient < 1e-9 < 0.05 < e.update),
    ("packed samples see each other", PACKED, Fault(text=OneSegment), lambda e: e.loss > 1e-4 and e.gradient > 1e-2),
    ("own token count", CASE, Fault(edit=own_token_count), lambda e: e.loss > 0.1 and e.gradient > 0.1),
    ("mean over FSDP's ranks", SHARDED, Fault(text=MeanOverShards), lambda e: e.loss < 1e-9 < 0.4 < e.gradient),
    ("norm of own rows", SHARDED, Fault(text=NormOfOwnRows), lambda e: e.gradient < 1e-9 < 1e-3 < e.norm),
    ("mean over replicas", REPLICAS, Fault(text=MeanOverReplicas), lambda e: e.loss < 1e-9 < 0.4 < e.gradient),
]


@pytest.mark.parametrize(("case", "fault", "seen"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_mistake_is_seen(case: Case, fault: Fault, seen: Callable[[Errors], bool], made_model: str) -> None:
    errors = compare(made_model, case, [mixed_step()], fault)
    assert seen(errors), errors


def test_replicas_with_the_same_data_are_seen(made_model: str) -> None:
    # Without images, so that rows can be swapped freely between replicas.
    from tests.helpers.batches import step_without_image

    errors = compare(made_model, REPLICAS, [step_without_image()], Fault(edit=same_data_everywhere))
    assert errors.loss > 1e-3, errors
