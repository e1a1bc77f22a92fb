"""Evaluations and answers between steps leave no trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Batch, Sampling
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.models import lora as adapters
from dhp.step.step import answer_batch
from tests.helpers.answers import RecordingText, make_prompt, make_text, plain_answer
from tests.helpers.batches import awkward_steps, mixed_step, step_without_image
from tests.helpers.layouts import FIRST_OUT, UPDATE, Case, Fault, Oracle, Running, make_reader, make_sharder
from tests.helpers.rows import slow_but

ONE = Degrees()
LORA = (("text", AdapterSettings(2, 4.0, dropout=0.4)),)
CASES = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, frozen=("text",)),
    Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, zero_stage=2, text_zero_stage=3, fsdp=True),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=2, fsdp=True, checkpointing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", zero_stage=1, text_zero_stage=2),
    Case(Degrees(data=2), Degrees(data=2), 1, "float32", zero_stage=3, text_zero_stage=3),
    Case(ONE, Degrees(data=2), 2, stages=2, chunks=2, schedule="interleaved", packing=True),
    Case(ONE, Degrees(tensor=2), 2, lora=LORA, checkpointing=True),
    Case(ONE, Degrees(ring=2, tensor=2), 1, sequence_groups="auto"),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0]), ids=str)
def test_the_plain_models_loss_and_no_trace_of_it(
    case: Case, four_layers_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    steps = awkward_steps()
    feed = make_reader(four_layers_model, case, [*steps, mixed_step(), step_without_image()])
    others = [feed.step(len(steps)), feed.step(len(steps) + 1)]
    ends = []
    for evaluates in (False, True):
        with Running(four_layers_model, case) as running:
            found = []
            for number in range(len(steps)):
                found += [running.evaluate(data) for data in others] if evaluates else []
                running.step(feed.step(number))
            ends.append(running.weights())
    for mine, theirs in zip(sum(ends[0], []), sum(ends[1], []), strict=True):
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
    oracle = Oracle(four_layers_model, getattr(torch, case.dtype), UPDATE, lora=dict(case.lora))
    exact = 1e-9 if case.dtype == "float64" else 1e-5
    wanted = [oracle.evaluate(mixed_step()), oracle.evaluate(step_without_image())]
    assert [one.loss for one in found[:2]] == pytest.approx([one.loss for one in wanted], rel=exact)
    assert [one.right for one in found[:2]] == [one.right for one in wanted]


def _half_right(oracle: Oracle) -> list[Sample]:
    """Samples of whose targets every other one is what the model finds likeliest."""
    found = []
    for sample in mixed_step():
        labels = sample.labels.copy()
        likeliest = oracle.predict(sample)[0].argmax(-1).numpy()
        chosen = np.flatnonzero(labels[1:] != IGNORED)[::2]
        labels[1 + chosen] = likeliest[chosen]
        found.append(replace(sample, labels=labels))
    return found


@pytest.mark.parametrize("text", [Degrees(data=2), Degrees(tensor=2), Degrees(ring=2)], ids=str)
def test_likeliest_tokens_are_counted_once(text: Degrees, four_layers_model: str) -> None:
    oracle = Oracle(four_layers_model, torch.float64, UPDATE)
    samples = _half_right(oracle)
    with Running(four_layers_model, case := Case(ONE, text, 1, packing=True)) as running:
        found = running.evaluate(make_reader(four_layers_model, case, [samples]).step(0))
    wanted = oracle.evaluate(samples)
    targets = sum(sample.target_tokens for sample in samples)
    assert (found.right, found.targets) == (wanted.right, targets) and targets / 3 < found.right < targets


def test_adapters_drop_nothing_out(four_layers_model: str) -> None:
    case = Case(ONE, ONE, 1, lora=LORA)
    feed = make_reader(four_layers_model, case, [mixed_step()])
    with Running(four_layers_model, case) as running:
        first, again = running.evaluate(feed.step(0)), running.evaluate(feed.step(0))
        trained, _ = running.step(feed.step(0))
    assert first == again and first.loss != trained
    plain = replace(case, lora=(("text", AdapterSettings(2, 4.0)),))
    with Running(four_layers_model, plain) as running:
        assert running.evaluate(feed.step(0)) == first


NEW = Sampling(5)
ANSWERED = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True, recompute="light"),
    Case(Degrees(data=2), Degrees(data=2, ring=2), 2, checkpointing=True, mlp_chunks=3),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", zero_stage=1, text_zero_stage=2),
    Case(ONE, Degrees(data=2), 2, "float32", text_zero_stage=1),
    Case(ONE, Degrees(ulysses=2), 2, lora=LORA, recompute="offload"),
    Case(ONE, ONE, 2, frozen=("text",)),
]


@pytest.mark.parametrize("case", slow_but(ANSWERED, ANSWERED[0]), ids=str)
def test_answers_between_steps(case: Case, four_layers_model: str) -> None:
    model, steps = four_layers_model, awkward_steps()[:2]
    samples = [make_prompt([(1, 8, 6)], 9, 1), make_text(20, 2), make_prompt([(1, 4, 4), (1, 4, 8)], 3, 3)]
    samples = samples[: case.text.data + 1]
    feed, dealer = make_reader(model, case, steps), make_sharder(model, case)
    ends, told = [], []
    for answers in (False, True):
        with Running(model, case, Fault(text=RecordingText)) as running:
            for number in range(len(steps)):
                for first in range(0, len(samples) if answers else 0, case.text.data):
                    held = samples[first : first + case.text.data]
                    rows = tuple((one,) for one in held) + ((),) * (case.text.data - len(held))
                    data = dealer.shard_prompts(StepSamples(0, 0, (rows,), ()), replace(NEW, seed=0))
                    batch = Batch(data.info, data.work, data.routes)
                    refs = answer_batch(running.stages, running.graph, batch)
                    told += [of_replica[0].token_ids for of_replica in refs.replicas] if number == 0 else []
                running.step(feed.step(number))
            ends.append(running.weights())
    for mine, theirs in zip(sum(ends[0], []), sum(ends[1], []), strict=True):
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
    if not case.lora:  # whose first values are not zero here
        wanted = [plain_answer(model, sample, NEW) for sample in samples]
        assert told[: len(wanted)] == wanted and not any(told[len(wanted) :])
