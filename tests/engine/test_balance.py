"""The load-balancing loss of decoders with experts: each sample's own, however samples are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from dhp.core.axes import Degrees
from dhp.data.sample.sample import Sample
from dhp.parallel.expert.expert_modules import balance_losses
from tests.engine.test_experts import ONE, ExactText
from tests.engine.test_families import steps
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.layouts import Case, Fault, compare
from tests.helpers.norms import exact_norms
from tests.helpers.oracle import Oracle
from tests.helpers.rows import slow
from tests.helpers.tiny import EXPERTS, save_llava_with_experts

COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def balanced_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Experts with a load-balancing loss that weighs as much as some tokens."""
    folder = Path(tmp_path_factory.mktemp("models")) / "balanced"
    return str(save_llava_with_experts(folder, output_router_logits=True, router_aux_loss_coef=COEFFICIENT))


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    with exact_norms():
        yield


class BalancedOracle(Oracle):
    """Each sample alone, with its own loss by its targets' share: written anew, from all layers' logits at once."""

    def prepare(self, model_name: str) -> None:
        self.heard: list[Tensor] = []
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
    Case(ONE, Degrees(tensor=2), micro_batches=1),
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
        from dataclasses import replace

        return super()._share_of_balance(
            logits, replace(work, samples=(sum(work.samples),), weights=(sum(work.weights),))
        )


class NoLoss(ExactText):
    """The wish is not heard."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._routers = None


@pytest.mark.parametrize("fault", [OneLossARow, NoLoss])
def test_a_planted_mistake_is_seen(fault: type[ExactText], balanced_model: str) -> None:
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
