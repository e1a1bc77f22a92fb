"""Prompts over replicas, answered between steps of training: each its own, and training goes on as if there were
none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Batch, Sampling
from dhp.core.parameters import AdapterSettings
from dhp.data.sampling.dataset import StepSamples
from dhp.step.step import answer_batch
from tests.helpers.answers import RecordingText, make_prompt, make_text, plain_answer
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Fault, Running, make_reader, make_sharder
from tests.helpers.rows import slow_but

ONE = Degrees()
NEW = Sampling(5)
LORA = (("text", AdapterSettings(2, 4.0, dropout=0.4)),)
CASES = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True, recompute="light"),
    Case(Degrees(data=2), Degrees(data=2, ring=2), 2, checkpointing=True, mlp_chunks=3),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", zero_stage=1, text_zero_stage=2),
    Case(ONE, Degrees(data=2), 2, "float32", text_zero_stage=1),
    Case(ONE, Degrees(ulysses=2), 2, lora=LORA, recompute="offload"),
    Case(ONE, ONE, 2, frozen=("text",)),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[3], CASES[5]), ids=str)
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
