"""Experts and their balancing loss equal the plain model."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from dhp.core.axes import Degrees
from dhp.data.sample.sample import Sample
from dhp.parallel.expert import expert_shares
from dhp.parallel.expert.expert_modules import balance_losses
from dhp.parallel.optim import fsdp
from dhp.parallel.tensor.slices import AdapterCut
from tests.engine.test_families import equal_pictures as steps
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, compare, compare_rounding, train
from tests.helpers.norms import ROUTERS, exact_norms, use_exact_norms
from tests.helpers.oracle import Oracle
from tests.helpers.rows import slow
from tests.helpers.tiny import EXPERTS, IMAGE_TOKEN, make_sample, save_llava_with_experts

ONE = Degrees()


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    with exact_norms():
        yield


class ExactText(InspectedText):
    """On ranks, without the float32 of norms and routers."""

    def __init__(self, *given: Any):
        use_exact_norms(setattr)
        super().__init__(*given)


EXACT = [
    Case(ONE, Degrees(data=4, expert=2), micro_batches=1, packing=True, checkpointing=True),
    # Replicas without any sample.
    slow(Case(Degrees(data=2), Degrees(data=4, expert=4), micro_batches=2, packing=True)),
    # Each tensor rank has slices of the experts that its replica has.
    Case(ONE, Degrees(data=2, expert=2, tensor=2), 1, packing=True, recompute="light", sharded_norms=True),
    Case(ONE, Degrees(data=4, expert=2, tensor=2), 1, text_zero_stage=3, fsdp=True),
    slow(Case(ONE, Degrees(data=4, expert=4, tensor=2), 1)),  # a replica has fewer experts than tensor ranks
    slow(Case(ONE, Degrees(data=2, expert=2, ulysses=2, tensor=2), 1, text_zero_stage=2, fsdp=True, packing=True)),
    slow(Case(ONE, Degrees(data=2, expert=2, tensor=2), 2, stages=2, schedule="1f1b")),
    # Rows that ranks share: each exchanges the tokens that it has.
    Case(Degrees(data=2), Degrees(data=2, expert=2, ulysses=2), micro_batches=1, packing=True, checkpointing=True),
    Case(ONE, Degrees(data=2, expert=2, ring=2), micro_batches=2),
    # Weights of experts are cut over the ranks that hold the same ones, all else over all replicas.
    Case(Degrees(data=2), Degrees(data=4, expert=2), 2, zero_stage=2, text_zero_stage=3, fsdp=True, recompute="light"),
    slow(Case(ONE, Degrees(data=2, expert=2, ulysses=2), 1, text_zero_stage=2, fsdp=True, packing=True)),
    slow(Case(ONE, Degrees(data=2, expert=2), 2, text_zero_stage=3, fsdp=True, checkpointing=True)),
    Case(ONE, Degrees(data=2, expert=2), micro_batches=2, frozen=("text",)),  # a replica without image goes back too
]
# The gradients of the tower's key biases are rounding alone, and Adafactor divides them by their size.
STILL = ("vision", "projector")
OPTIMIZERS = [
    Case(ONE, Degrees(data=2, expert=2), frozen=STILL, optimizer="adafactor"),
    Case(ONE, Degrees(data=2, expert=2, tensor=2), frozen=STILL, optimizer="adafactor"),
    Case(
        ONE, Degrees(data=4, expert=2, tensor=2), 1, text_zero_stage=3, fsdp=True, frozen=STILL, optimizer="adafactor"
    ),
    Case(ONE, Degrees(tensor=2), frozen=STILL, optimizer="adafactor"),
    Case(ONE, Degrees(data=2, tensor=2), text_zero_stage=3, fsdp=True, frozen=STILL, optimizer="adafactor"),
    Case(ONE, Degrees(data=2, expert=2), optimizer="muon"),
    Case(ONE, Degrees(data=2, expert=2, tensor=2), optimizer="muon"),
    Case(ONE, Degrees(data=4, expert=2), 1, text_zero_stage=3, fsdp=True, optimizer="muon"),
    Case(ONE, Degrees(tensor=2), optimizer="muon"),
    Case(ONE, Degrees(data=2, tensor=2), text_zero_stage=3, fsdp=True, optimizer="muon"),
]
SINGLE = [
    Case(ONE, Degrees(data=2, expert=2), dtype="float32", packing=True)  # products in groups
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_the_plain_model_in_double_precision(case: Case, experts_model: str) -> None:
    assert_exact(compare(experts_model, case, steps(), Fault(text=ExactText)))


@pytest.mark.grid
@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizers_that_need_whole_weights(case: Case, experts_model: str) -> None:
    """Of a stack of experts' matrices too, shared out or cut by their width."""
    assert_exact(compare(experts_model, case, steps(), Fault(text=ExactText)))


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_equals_the_plain_model_in_single_precision(case: Case, experts_model: str) -> None:
    assert_exact_in_single_precision(compare(experts_model, case, steps(), Fault(text=ExactText)))


@pytest.mark.parametrize("text", [Degrees(data=2, expert=2)], ids=str)
@pytest.mark.slow
def test_16_bits_round_as_one_process_does(text: Degrees, experts_model: str) -> None:
    case = Case(ONE, text, dtype="bfloat16", packing=True)
    ratios = compare_rounding(experts_model, case, steps(), together=True)
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


@pytest.mark.slow
def test_the_same_run_twice_is_the_same_to_the_bit(experts_model: str) -> None:
    """However rows arrive; and ranks with the same experts have the same weights."""
    case = Case(ONE, Degrees(data=4, expert=2), dtype="float32", micro_batches=1)
    first, second = (train(experts_model, case, steps()) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    for ours, theirs in zip(first.weights, second.weights, strict=True):
        for name, weight in ours[0].items():
            assert all(torch.equal(weight, of_rank[name]) for of_rank in (*ours, *theirs)), name


def qwen_steps() -> list[list[Sample]]:
    """Images of several sizes, two in a sample, none; a step without any."""
    make = lambda *given: make_sample(*given, IMAGE_TOKEN)
    return [
        [
            make([(1, 4, 6)], 9, 4, 1),
            make([(1, 4, 4), (1, 6, 2)], 7, 5, 2),
            make([], 8, 5, 3),
            make([(1, 4, 4)], 8, 5, 4),
        ],
        [make([], 5 + seed, 3, seed) for seed in (31, 32, 33, 34)],
    ]


QWEN = [slow(Case(Degrees(data=2), Degrees(data=2, expert=2), packing=True))]


@pytest.mark.parametrize("case", QWEN, ids=str)
def test_qwen3_vl_with_experts_equals_the_plain_model(case: Case, qwen3_vl_moe_model: str) -> None:
    assert_exact(compare(qwen3_vl_moe_model, case, qwen_steps(), Fault(text=ExactText)))


def bias_routers(model: nn.Module) -> None:
    """Nobody visits the second half of the experts."""
    for module in model.modules():
        if isinstance(module, ROUTERS):
            module.forward = partial(_biased, module, module.forward)


def _biased(router: Any, forward: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, _ = forward(states)
    weights, visited = torch.topk(logits[:, : router.num_experts // 2].softmax(-1), router.top_k, dim=-1)
    return logits, weights, visited


class BiasedText(ExactText):
    def load_slice(self) -> Any:
        model = super().load_slice()
        bias_routers(model)
        return model


class BiasedOracle(Oracle):
    def prepare(self, model_name: str) -> None:
        bias_routers(self.model)


@pytest.mark.parametrize("packing", [True, slow(False)])
def test_a_rank_whose_experts_nobody_visits(packing: bool, experts_model: str) -> None:
    case = Case(ONE, Degrees(data=2, expert=2), packing=packing)
    assert_exact(compare(experts_model, case, steps(), Fault(text=BiasedText), BiasedOracle))


class SummedOverAll(ExactText):
    """Gradients of experts summed over all replicas, though these hold different ones."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        for bucket in self.optimizer._gradients._buckets:
            bucket.group = None


class NotSummed(ExactText):
    """Gradients of experts that no other copy of them adds to."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        for bucket in self.optimizer._gradients._buckets:
            if bucket.group is not None:
                bucket.group = dist.new_group([dist.get_rank()], use_local_synchronization=True)


class _Stays(torch.autograd.Function):
    """Of the rows that should go to other ranks and come from them, own ones alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.own = send, receive, dist.get_rank(group)
        return _own_block(rows, send, receive, ctx.own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_block(grad, ctx.receive, ctx.send, ctx.own), None, None, None


def _own_block(rows: Tensor, send: list[int], receive: list[int], own: int) -> Tensor:
    blocks = [rows.new_zeros(count, *rows.shape[1:]) for count in receive]
    blocks[own] = rows.split(send)[own]
    return torch.cat(blocks)


class NoReturn(ExactText):
    """What experts of other ranks answer does not come back."""

    def __init__(self, *given: Any):
        goes, calls = expert_shares.AllToAll, iter(range(10**9))

        class Way:
            @staticmethod
            def apply(*arguments: Any) -> Tensor:
                return (_Stays if next(calls) % 2 else goes).apply(*arguments)

        expert_shares.AllToAll = Way
        super().__init__(*given)


class NoGradientBack(ExactText):
    """Rows go and come, and their gradients stay with the experts of other ranks."""

    def __init__(self, *given: Any):
        expert_shares.AllToAll.backward = staticmethod(_Stays.backward)
        goes = expert_shares.AllToAll.forward

        def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
            ctx.own = dist.get_rank(group)
            return goes(ctx, rows, send, receive, group)

        expert_shares.AllToAll.forward = staticmethod(forward)
        super().__init__(*given)


def _only_gradients(errors: Errors) -> bool:
    return errors.loss < 1e-9 < 0.1 < errors.gradient


class SumsOfOthers(ExactText):
    """States of experts are cut over all replicas, as if these held the same ones."""

    def __init__(self, *given: Any):
        fsdp.summed_over = lambda module: {}
        super().__init__(*given)


class CutTwice(ExactText):
    """The norm counts each expert as often as replicas share them out."""

    def __init__(self, *given: Any):
        AdapterCut.tensor_ranks = property(lambda cut: cut.mesh.get_group())
        super().__init__(*given)


class NormOfSome(ExactText):
    """Of experts that are shared out and cut, the norm counts one replica's alone."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        DeviceMesh.get_all_groups = lambda mesh: [mesh.get_group(mesh.ndim - 1)]


FAULTS = {
    "experts summed over all replicas": (4, SummedOverAll, _only_gradients),
    "experts not summed over their copies": (4, NotSummed, _only_gradients),
    "experts cut over all replicas": (4, SumsOfOthers, lambda errors: errors.gradient > 0.1),
    "experts counted twice": (4, CutTwice, lambda errors: errors.gradient < 1e-9 < 1e-4 < errors.norm),
    "experts of a replica alone": (2, NormOfSome, lambda errors: errors.gradient < 1e-9 < 1e-4 < errors.norm),
    "no way back": (2, NoReturn, lambda errors: errors.loss > 1e-6 and errors.gradient > 0.1),
    "no gradients back": (2, NoGradientBack, _only_gradients),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_mistake_is_seen(fault: str, experts_model: str) -> None:
    replicas, text, seen = FAULTS[fault]
    case = Case(ONE, Degrees(data=replicas, expert=2), micro_batches=1, packing=True)
    if text in (SumsOfOthers, CutTwice):
        case = replace(case, text_zero_stage=3, fsdp=True)
    if text is NormOfSome:
        case = replace(case, text=Degrees(data=replicas, expert=2, tensor=2))
    errors = compare(experts_model, case, steps()[:1], Fault(text=text))
    assert seen(errors), errors


GRID = [
    pytest.param(text, packing, micro, again, stages, id=f"{text}-{packing}-{micro}-{again}-{stages}".replace(" ", ""))
    for text, packing, micro, again, stages in product(
        (
            Degrees(data=2), Degrees(tensor=2), Degrees(data=2, tensor=2), Degrees(data=2, expert=2),
            Degrees(data=4, expert=2), Degrees(data=4, expert=4), Degrees(data=2, expert=2, tensor=2),
            Degrees(data=2, expert=2, ulysses=2), Degrees(data=2, expert=2, ring=2),
        ),
        (True, False), (1, 3), ("none", "all"), (1, 2),
    )
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(("text", "packing", "micro", "again", "stages"), GRID)
def test_the_grid(text: Degrees, packing: bool, micro: int, again: str, stages: int, experts_model: str) -> None:
    schedule = "1f1b" if stages > 1 else "sequential"
    case = Case(ONE, text, micro, schedule=schedule, packing=packing, recompute=again, stages=stages)
    assert_exact(compare(experts_model, case, steps(), Fault(text=ExactText)))


COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def balanced_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Experts with a load-balancing loss that weighs as much as some tokens."""
    folder = Path(tmp_path_factory.mktemp("models")) / "balanced"
    return str(save_llava_with_experts(folder, output_router_logits=True, router_aux_loss_coef=COEFFICIENT))


class BalancedOracle(Oracle):
    """Each sample alone, with its own loss by its targets' share: written anew, from all layers' logits at once."""

    def prepare(self, model_name: str) -> None:
        self.heard: list[Tensor] = []
        # transformers 5.24 hands the decoder's logits of experts on to an output of LLaVA that has no place for them.
        self.model.config.text_config.output_router_logits = False
        for module in self.model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.register_forward_hook(lambda _, __, output: self.heard.append(output[0]))

    def _loss_sum(self, sample: Sample) -> Tensor:
        self.heard.clear()
        tokens = super()._loss_sum(sample)
        probabilities = torch.cat(self.heard).softmax(-1)
        visits = probabilities.topk(EXPERTS["num_experts_per_tok"]).indices
        visited = torch.nn.functional.one_hot(visits, EXPERTS["num_experts"]).sum(1).to(probabilities)
        loss = EXPERTS["num_experts"] * (visited.mean(0) * probabilities.mean(0)).sum()
        return tokens + sample.target_tokens * COEFFICIENT * loss


CASES = [
    Case(ONE, ONE, micro_batches=1, packing=True),
    Case(Degrees(ulysses=2), Degrees(data=2, expert=2), micro_batches=2, checkpointing=True),
    slow(Case(ONE, Degrees(tensor=2), micro_batches=1)),
    slow(Case(ONE, Degrees(data=2), micro_batches=2, text_zero_stage=3, fsdp=True)),
    slow(Case(ONE, Degrees(data=2), micro_batches=2, dtype="float32", text_zero_stage=3, packing=True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_model_with_each_samples_own_loss(case: Case, balanced_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(balanced_model, case, steps(), Fault(text=ExactText), BalancedOracle))


class OneLossARow(ExactText):
    """What the library's function gives where samples share a row: one loss of all of them."""

    def _share_of_balance(self, logits: Any, work: Any) -> Tensor:
        return super()._share_of_balance(
            logits, replace(work, samples=(sum(work.samples),), weights=(sum(work.weights),))
        )


class NoLoss(ExactText):
    """The wish is not heard."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._routers = None


@pytest.mark.parametrize("fault", [OneLossARow, NoLoss])
def test_a_planted_mistake_is_seen_of_balance(fault: type[ExactText], balanced_model: str) -> None:
    errors = compare(balanced_model, CASES[0], steps()[:1], Fault(text=fault), BalancedOracle)
    assert errors.loss > 1e-5 and errors.gradient > 1e-3, errors


def test_the_loss_of_a_sample_is_the_librarys() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(11, 6, generator=generator) for _ in range(3)]
    found = balance_losses(logits, [range(0, 4), range(4, 9)], 2)
    for loss, tokens in zip(found, (slice(0, 4), slice(4, 9)), strict=True):
        alone = load_balancing_loss_func(tuple(of_layer[tokens] for of_layer in logits), 6, 2)
        torch.testing.assert_close(loss, alone)
    together = load_balancing_loss_func(tuple(logits), 6, 2)
    assert not torch.isclose(found.mean(), together, rtol=1e-3)
