"""Prompts answered by ranks that share the row: the plain model's tokens, and its logits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Answer, Bundle, PromptInput, Sampling
from dhp.data.sample.sample import Sample
from dhp.parallel.attention.row_decode import ShardedCacheIndex, ShardedKVCache
from tests.helpers.answers import (
    Recording,
    RecordingText,
    answer,
    first_divergence,
    make_prompt,
    make_text,
    plain_answer,
    plain_logits,
)
from tests.helpers.layouts import Case, Fault
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import IMAGE_TOKEN

ONE = Degrees()
NEW = Sampling(12)


@cache
def prompts() -> list[Sample]:
    """A photograph, several images, a video beside an image, and text."""
    return [
        make_prompt([(1, 20, 18)], 15, 1),
        make_prompt([(1, 8, 6), (1, 4, 12)], 5, 2),
        make_prompt([(3, 4, 6), (1, 8, 6)], 8, 3, seconds=(0.5, None)),
        make_text(61, 4),
    ]


LAYOUTS = [
    ONE,
    Degrees(ring=2),
    Degrees(ulysses=2),
    Degrees(tensor=2),
    Degrees(data=2),
    Degrees(ring=3),
    Degrees(ring=2, ulysses=2),
    Degrees(ring=4),
    Degrees(ring=2, tensor=2),
    Degrees(ulysses=2, tensor=2),
]


@pytest.mark.parametrize("text", slow_but(LAYOUTS, LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]), ids=str)
def test_greedy_tokens_are_those_of_plain_transformers(text: Degrees, attending_model: str) -> None:
    vision = Degrees(ulysses=2) if text == Degrees(ring=2) else ONE
    found = answer(attending_model, Case(vision, text, 1, "float32"), prompts(), NEW)
    for sample, told in zip(prompts(), found, strict=True):
        wanted = plain_answer(attending_model, sample, NEW)
        assert told.tokens == wanted, first_divergence(told, wanted)
        assert {one.token_ids for one in told.answers} == ({wanted} if text.data == 1 else {wanted, ()})
        assert len(set(wanted)) > 3  # or a mistake could go unseen


@pytest.mark.parametrize("text", [ONE, Degrees(ring=2), slow(Degrees(ulysses=2, tensor=2))], ids=str)
def test_logits_are_the_plain_models(text: Degrees, attending_model: str) -> None:
    found = answer(attending_model, Case(ONE, text, 1), prompts(), NEW)
    for sample, told in zip(prompts(), found, strict=True):
        wanted = plain_logits(attending_model, sample, told.tokens)
        assert float((told.logits - wanted).abs().max() / wanted.abs().max()) < 1e-12


@pytest.mark.parametrize("text", [Degrees(ring=3), slow(Degrees(ulysses=3)), ONE], ids=str)
def test_prompts_of_few_tokens(text: Degrees, attending_model: str) -> None:
    samples = [make_text(tokens, tokens) for tokens in (1, 2, 3, 4, 7)]
    found = answer(attending_model, Case(ONE, text, 1, "float32"), samples, NEW)
    for sample, told in zip(samples, found, strict=True):
        assert told.tokens == plain_answer(attending_model, sample, NEW)
        assert told.answers[0].prompt_tokens == len(sample.input_ids)


def test_an_answer_ends_with_any_of_the_tokens_that_end_one(attending_model: str) -> None:
    sample = prompts()[0]
    wanted = plain_answer(attending_model, sample, NEW)
    assert wanted[5] not in wanted[:5]
    sampling = Sampling(12, stop=(511, wanted[5]))
    for text in (Degrees(ring=2), Degrees(tensor=2)):
        (told,) = answer(attending_model, Case(ONE, text, 1, "float32"), [sample], sampling)
        assert told.tokens == wanted[:6] == plain_answer(attending_model, sample, sampling)
        assert all(one.token_ids == told.tokens for one in told.answers)


@pytest.mark.slow
def test_drawn_tokens_are_the_same_in_every_layout(attending_model: str) -> None:
    drawn = [
        [
            told.tokens
            for told in answer(attending_model, Case(ONE, text, 1), prompts()[:2], Sampling(12, **more, seed=seed))
        ]
        for text, seed in ((ONE, 3), (Degrees(ring=2), 3), (Degrees(ulysses=2, tensor=2), 3), (ONE, 4))
        for more in ({"temperature": 1.5}, {"temperature": 3.0, "top_p": 0.7, "top_k": 40})
    ]
    of_one, of_ring, of_cut, of_another = drawn[:2], drawn[2:4], drawn[4:6], drawn[6:]
    assert of_one == of_ring == of_cut
    assert of_one[0] != of_another[0] and of_one[1] != of_another[1] and of_one[0] != of_one[1]


def test_each_rank_keeps_its_share_of_keys_and_values(attending_model: str) -> None:
    sample = prompts()[0]
    for text in (ONE, Degrees(ring=2, tensor=2), Degrees(ulysses=2)):
        (told,) = answer(attending_model, Case(ONE, text, 1, "float32"), [sample], NEW)
        kept = [one.cache_bytes for one in told.answers]
        tokens, layers, heads, width = len(sample.input_ids) + 11, 4, 8, 8
        assert sum(kept) == 2 * tokens * layers * heads * width * 4
        assert max(kept) - min(kept) <= 2 * 2 * layers * heads * width * 4


class CountsTokens(RecordingText):
    """New positions go on from the number of tokens, as if pictures had as many positions as tokens."""

    def generate(self, micro_batch: int, chunk: int, work: PromptInput, *received: Bundle) -> Answer:
        return super().generate(micro_batch, chunk, replace(work, next_position=work.tokens + 1), *received)


class _EveryoneTakes(ShardedCacheIndex):
    @property
    def takes(self) -> bool:
        return True


class _Doubled(Recording):
    def make_cache(self, prompt: PromptInput) -> ShardedKVCache:
        cache = super().make_cache(prompt)
        cache.held.__class__ = _EveryoneTakes
        cache.held.most += prompt.sampling.max_new_tokens
        return cache


class KeepsTwice(RecordingText):
    """Each rank keeps each new token."""

    generator = _Doubled


class _Mean(Recording):
    def answer(self, *given: Any) -> Answer:
        with patch("dhp.parallel.attention.row_decode.merge", lambda outputs, lses: outputs.mean(0)):
            return super().answer(*given)


class MergesWithoutWeights(RecordingText):
    """The mean of what ranks found, as if each had seen as much."""

    generator = _Mean


class _Own(Recording):
    def answer(self, *given: Any) -> Answer:
        with patch("dhp.parallel.attention.row_decode.merge_over_ranks", lambda output, lse, group: output):
            return super().answer(*given)


class SeesItsOwn(RecordingText):
    """A new token sees what is on its rank."""

    generator = _Own


@pytest.mark.parametrize("mistake", [CountsTokens, KeepsTwice, MergesWithoutWeights, SeesItsOwn])
def test_a_planted_mistake_is_seen(mistake: type, attending_model: str) -> None:
    sample = prompts()[0]
    (told,) = answer(attending_model, Case(ONE, Degrees(ring=2), 1), [sample], NEW, Fault(text=mistake))
    (right,) = answer(attending_model, Case(ONE, Degrees(ring=2), 1), [sample], NEW)
    assert told.tokens != right.tokens == plain_answer(attending_model, sample, NEW)
    assert first_divergence(told, right.tokens).startswith("token ")


def test_a_picture_that_the_model_says_is_a_token_like_any_other(attending_model: str) -> None:
    """No encoder is asked again, and what it made of the prompt's pictures is not looked at."""
    sample = prompts()[0]
    forced = replace(sample, input_ids=np.append(sample.input_ids, IMAGE_TOKEN))
    forced = replace(
        forced, labels=np.append(sample.labels, IGNORED), mm_token_type_ids=np.append(sample.mm_token_type_ids, 0)
    )
    (told,) = answer(attending_model, Case(ONE, Degrees(ring=2), 1), [forced], Sampling(3))
    assert len(told.tokens) == 3


FAMILIES = [
    ("qwen3_vl_model", Degrees(ring=2)),
    ("qwen3_vl_model", Degrees(ulysses=2, tensor=2)),
    ("few_keys_model", Degrees(ulysses=4)),  # two key/value heads for four ranks
    ("few_keys_model", Degrees(tensor=4)),
]


@pytest.mark.parametrize(("fixture", "text"), slow_but(FAMILIES, FAMILIES[0], FAMILIES[2]), ids=str)
def test_other_families(fixture: str, text: Degrees, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    samples = [make_prompt([(1, 8, 6), (1, 4, 12)], 9, 5), make_text(20, 6)]
    for sample, told in zip(samples, answer(model, Case(ONE, text, 1), samples, NEW), strict=True):
        wanted = plain_logits(model, sample, told.tokens)
        assert float((told.logits - wanted).abs().max() / wanted.abs().max()) < 1e-12
