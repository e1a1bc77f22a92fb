"""Prompts answered by ranks that share the row: the plain model's tokens, and its logits."""

from __future__ import annotations

from functools import cache

import pytest

from dhp.base.degrees import Degrees
from dhp.base.generation import Sampling
from dhp.data.sample import Sample
from tests.helpers.answers import answer, first_divergence, make_prompt, make_text, plain_answer, plain_logits
from tests.helpers.layouts import Case

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


@pytest.mark.parametrize("text", LAYOUTS, ids=str)
def test_greedy_tokens_are_those_of_plain_transformers(text: Degrees, attending_model: str) -> None:
    vision = Degrees(ulysses=2) if text == Degrees(ring=2) else ONE
    found = answer(attending_model, Case(vision, text, 1, "float32"), prompts(), NEW)
    for sample, told in zip(prompts(), found, strict=True):
        wanted = plain_answer(attending_model, sample, NEW)
        assert told.tokens == wanted, first_divergence(told, wanted)
        assert {one.token_ids for one in told.answers} == ({wanted} if text.data == 1 else {wanted, ()})
        assert len(set(wanted)) > 3  # or a mistake could go unseen


@pytest.mark.parametrize("text", [ONE, Degrees(ring=2), Degrees(ulysses=2, tensor=2)], ids=str)
def test_logits_are_the_plain_models(text: Degrees, attending_model: str) -> None:
    found = answer(attending_model, Case(ONE, text, 1), prompts(), NEW)
    for sample, told in zip(prompts(), found, strict=True):
        wanted = plain_logits(attending_model, sample, told.tokens)
        assert float((told.logits - wanted).abs().max() / wanted.abs().max()) < 1e-12
