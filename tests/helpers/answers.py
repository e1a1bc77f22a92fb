"""Prompts answered on local ranks, and by the plain model in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.core.batch import IGNORED, Answer, Batch, Sampling, StepData
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.answer_tokens import Generator
from dhp.models.registry import load_family
from dhp.step.step import answer_batch
from tests.helpers.layouts import Case, Fault, InspectedText, Running, make_sharder
from tests.helpers.oracle import model_inputs
from tests.helpers.tiny import IMAGE_TOKEN, make_sample


class Recording(Generator):
    """Keeps the logits of all tokens."""

    def __init__(self, *told: Any):
        super().__init__(*told)
        self.kept: list[Tensor] = []

    def logits(self, states: Tensor) -> Tensor:
        self.kept.append(super().logits(states))
        return self.kept[-1]


class RecordingText(InspectedText):
    generator = Recording

    def take_logits(self) -> Tensor | None:
        """Of what was answered since the last time, [tokens, vocabulary]."""
        kept, self._answering.kept = self._answering.kept, []
        return torch.stack(kept) if kept else None


def make_prompt(
    grids: Sequence[tuple[int, int, int]], tokens: int, seed: int, seconds: Sequence[float | None] = (), **more: Any
) -> Sample:
    """Text, pictures and text again, without labels."""
    return make_sample(grids, tokens, 0, seed, more.pop("image_token", IMAGE_TOKEN), seconds=seconds, **more)


def make_text(tokens: int, seed: int) -> Sample:
    """So many tokens of text."""
    whole = make_prompt([], tokens, seed)
    cut = {name: getattr(whole, name)[:tokens] for name in ("input_ids", "labels", "mm_token_type_ids")}
    return replace(whole, **cut)


@dataclass(frozen=True)
class Told:
    """What all ranks told of one prompt. logits: of the first rank."""

    answers: list[Answer]
    logits: Tensor

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.answers[0].token_ids


def deal(model: str, case: Case, sample: Sample, sampling: Sampling) -> StepData:
    """One prompt for the first replica."""
    others: list[tuple[Sample, ...]] = [()] * (case.text.data - 1)
    return make_sharder(model, case).shard_prompts(StepSamples(0, 0, (((sample,), *others),), ()), sampling)


def answer(
    model: str, case: Case, samples: Sequence[Sample], sampling: Sampling, fault: Fault | None = None, **changes: Any
) -> list[Told]:
    """Each prompt answered by the case's ranks."""
    fault = fault or Fault(text=RecordingText)
    told = []
    with Running(model, replace(case, micro_batches=1), fault, **changes) as running:
        for number, sample in enumerate(samples):
            sample = replace(sample, position=number + 1)
            data = fault.edit(deal(model, case, sample, sampling))
            refs = answer_batch(running.stages, running.graph, Batch(data.info, data.work, data.routes))
            logits = running.groups["text"].execute_all("take_logits")
            told.append(Told([one for of_replica in refs.replicas for one in of_replica], logits[0]))
    return told


@cache
def plain_model(model: str, dtype: str) -> Any:
    """The unmodified model."""
    made = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    if dtype == "float64":
        made.set_experts_implementation("eager")
        for parameter in made.parameters():
            parameter.data = parameter.data.double()
    return made


def plain_inputs(model: str, sample: Sample, dtype: str) -> dict[str, Tensor]:
    """A prompt as the plain model takes it; it counts positions itself."""
    plain = plain_model(model, dtype)
    found = model_inputs(sample, load_family(model), plain)
    return {"attention_mask": torch.ones_like(found["input_ids"]), **found}


@torch.no_grad()
def plain_answer(model: str, sample: Sample, sampling: Sampling, dtype: str = "float32") -> tuple[int, ...]:
    """What plain transformers' generate says, greedily."""
    given = plain_inputs(model, sample, dtype)
    prompt = given["input_ids"].shape[1]
    stop = {"eos_token_id": list(sampling.stop)} if sampling.stop else {"eos_token_id": -1}
    told = {"max_new_tokens": sampling.max_new_tokens, "do_sample": False, "pad_token_id": 0, **stop}
    found = plain_model(model, dtype).generate(**given, **told)
    return tuple(found[0, prompt:].tolist())


@torch.no_grad()
def plain_logits(model: str, sample: Sample, tokens: Sequence[int]) -> Tensor:
    """The plain model's logits of each of the new tokens, in float64: all in one forward, [tokens, vocabulary]."""
    more = np.array(tokens[:-1], dtype=np.int64)
    longer = replace(
        sample,
        input_ids=np.concatenate([sample.input_ids, more]),
        labels=np.concatenate([sample.labels, np.full_like(more, IGNORED)]),
        mm_token_type_ids=np.concatenate([sample.mm_token_type_ids, np.zeros_like(more)]),
    )
    given = plain_inputs(model, longer, "float64")
    return plain_model(model, "float64")(**given, use_cache=False).logits[0, len(sample.input_ids) - 1 :]


def first_divergence(told: Told, wanted: Sequence[int]) -> str:
    """Where the tokens part from the wanted ones, and how far apart the two likeliest tokens were there."""
    for number, (own, other) in enumerate(zip(told.tokens, wanted, strict=False)):
        if own != other:
            best = told.logits[number].topk(2).values
            return f"token {number}: {own} where {other} was wanted; gap of the two likeliest {best[0] - best[1]:.1e}"
    return f"{len(told.tokens)} tokens, {len(wanted)} wanted"
