"""Objectives equal the plain model in every layout."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dhp.batch.collate import Collator
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Batch, Sampling
from dhp.core.errors import ConfigError
from dhp.data.sample.sample import Sample
from dhp.models.registry import load_family
from dhp.objectives.objective import Chosen, CrossEntropy, Head, Judged, Objective, find_targets, next_labels
from dhp.objectives.objectives import OBJECTIVES, find_objective
from dhp.parallel.tensor.loss import judge_tokens, token_loss_sum
from dhp.step.step import answer_batch
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.answers import deal, make_prompt
from tests.helpers.batches import awkward_steps, mixed_step
from tests.helpers.layouts import UPDATE, Case, Fault, InspectedText, Running, compare, make_reader
from tests.helpers.oracle import Oracle
from tests.helpers.rows import slow_but

ONE = Degrees()


class SampleMean(Objective):
    """Each sample's mean over its target tokens, and the mean over the samples that have any."""

    columns = {"targets": IGNORED, "shares": 0.0}

    def values(self, sample: Sample) -> dict[str, np.ndarray]:
        targets = next_labels(sample)
        return {"targets": targets, "shares": (targets != IGNORED) / max(1, sample.target_tokens)}

    def weight(self, sample: Sample) -> float:
        return 1.0 if sample.target_tokens else 0.0

    def choose(self, columns: Mapping[str, Tensor]) -> Chosen:
        positions, tokens = find_targets(columns["targets"])
        return positions, tokens, columns["shares"].flatten()[positions]

    def share(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Tensor:
        return token_loss_sum(head.matrix, *self._rows(states, chosen, total, head))

    def judge(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Judged:
        *rows, factor = self._rows(states, chosen, total, head)
        losses, right = judge_tokens(head.matrix, *rows)
        return Judged((losses * factor).sum(), right[: len(chosen[0])])

    def _rows(self, states: Tensor, chosen: Chosen, total: float, head: Head) -> tuple[Any, ...]:
        positions, tokens, shares = chosen
        if not len(tokens):  # one row, without a loss
            positions, tokens, shares = positions.new_zeros(1), tokens.new_zeros(1), shares.new_zeros(1)
        return states.index_select(0, positions), tokens, 5, head.rule, shares / (total or 1)


OBJECTIVES["sample_mean"] = SampleMean


class Text(InspectedText):
    """Of this module, which a rank imports with it: the objective is known there."""


class MeanOracle(Oracle):
    def weight(self, sample: Sample) -> float:
        return 1.0 if sample.target_tokens else 0.0

    def _loss_sum(self, sample: Sample) -> Tensor:
        return super()._loss_sum(sample) / max(1, sample.target_tokens)


CASES = [
    Case(ONE, ONE, objective="sample_mean"),
    Case(Degrees(ulysses=2), Degrees(data=2, tensor=2), packing=True, objective="sample_mean"),
    Case(Degrees(data=2), Degrees(ring=2, ulysses=2), micro_batches=1, objective="sample_mean"),
    Case(ONE, Degrees(data=2), micro_batches=4, schedule="1f1b", stages=2, recompute="full", objective="sample_mean"),
    Case(ONE, Degrees(data=2), text_zero_stage=3, fsdp=True, objective="sample_mean"),
    Case(Degrees(data=2), Degrees(data=2), 3, "float32", 1, text_zero_stage=2, packing=True, objective="sample_mean"),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[1], CASES[4]), ids=str)
def test_another_objective_equals_the_plain_model(case: Case, made_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(made_model, case, awkward_steps(), Fault(text=Text), MeanOracle))


@pytest.mark.parametrize("text", [Degrees(data=2), Degrees(tensor=2), Degrees(ring=2)], ids=str)
def test_evaluation_measures_it_and_counts_what_it_says(text: Degrees, made_model: str) -> None:
    case = Case(ONE, text, 1, packing=True, objective="sample_mean")
    wanted = MeanOracle(made_model, torch.float64, UPDATE).evaluate(mixed_step())
    with Running(made_model, case, Fault(text=Text)) as running:
        found = running.evaluate(make_reader(made_model, case, [mixed_step()]).step(0))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-9)
    assert (found.right, found.targets) == (wanted.right, wanted.targets)


def test_prompts_have_none_of_its_columns(made_model: str) -> None:
    """They are read for cross-entropy, whatever the run trains."""
    case, prompt = Case(ONE, Degrees(tensor=2), 1, packing=True), make_prompt([(1, 8, 8)], 5, 7)
    data = deal(made_model, case, prompt, Sampling(4))
    answers = []
    for objective in ("sft", "sample_mean"):
        with Running(made_model, replace(case, objective=objective), Fault(text=Text)) as running:
            refs = answer_batch(running.stages, running.graph, Batch(data.info, data.work, data.routes))
        answers.append([one.token_ids for of_replica in refs.replicas for one in of_replica])
    assert answers[0] == answers[1] and len(answers[0][0]) == 4


def test_a_column_of_another_length_is_an_error(made_model: str) -> None:
    class Short(SampleMean):
        def values(self, sample: Sample) -> dict[str, np.ndarray]:
            return {name: values[:-1] for name, values in super().values(sample).items()}

    with pytest.raises(RuntimeError, match="size"):
        Collator(load_family(made_model), 0, True, Short()).make((mixed_step()[0],))


def test_it_is_another_objective(made_model: str) -> None:
    assert compare(made_model, CASES[0], awkward_steps(), Fault(text=Text)).loss > 1e-3


def test_an_unknown_one_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"training\.objective=sfft does not exist\. Set one of sft.*[Dd]id you mean.*sft"
    ):
        find_objective("sfft")


torch.manual_seed(0)
HEAD = nn.Linear(4, 7, bias=False)
HIDDEN = torch.randn(2, 5, 4)


def test_sum_over_targets_divided_by_the_global_count() -> None:
    targets = torch.tensor([[-100, 3, 1, -100, -100], [6, -100, -100, -100, -100]])
    logp = HEAD(HIDDEN).log_softmax(-1)
    expected = -(logp[0, 1, 3] + logp[0, 2, 1] + logp[1, 0, 6]) / 11
    torch.testing.assert_close(
        CrossEntropy().share(Head(HEAD), HIDDEN.flatten(0, 1), find_targets(targets), 11), expected
    )


def test_rows_without_target_give_zero_and_zero_gradients() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    head = nn.Linear(4, 7, bias=False)
    CrossEntropy().share(Head(head), hidden.flatten(0, 1), find_targets(torch.full((2, 5), -100)), 3).backward()
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_targets_stand_at_the_position_that_predicts_them() -> None:
    positions, tokens = find_targets(torch.tensor([[-100, 3, 1, -100, -100], [6, -100, -100, 0, -100]]))
    assert positions.tolist() == [1, 2, 5, 8]
    assert tokens.tolist() == [3, 1, 6, 0]
