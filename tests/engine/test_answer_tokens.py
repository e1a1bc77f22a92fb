"""Answers in any layout are the plain model's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Answer, Bundle, PromptInput, Sampling
from dhp.core.errors import ConfigError, ModelError
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import StageSettings
from dhp.models.contract.double import staying_double
from dhp.models.registry import load_family
from dhp.parallel.attention.row_decode import ShardedCacheIndex, ShardedKVCache
from tests.engine.test_declared_families import ExactVision
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
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import IMAGE_TOKEN
from tests.helpers.tiny_families import FAMILIES, IMAGE, save_family

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


@pytest.mark.parametrize("text", slow_but(LAYOUTS, LAYOUTS[1], LAYOUTS[3]), ids=str)
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


@pytest.mark.parametrize("text", [slow(Degrees(ring=3)), slow(Degrees(ulysses=3)), ONE], ids=str)
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


OTHER_FAMILIES = [
    ("qwen3_vl_model", Degrees(ring=2)),
    ("qwen3_vl_model", Degrees(ulysses=2, tensor=2)),
    ("few_keys_model", Degrees(ulysses=4)),  # two key/value heads for four ranks
    ("few_keys_model", Degrees(tensor=4)),
]


@pytest.mark.parametrize(("fixture", "text"), slow_but(OTHER_FAMILIES, OTHER_FAMILIES[0], OTHER_FAMILIES[2]), ids=str)
def test_other_families(fixture: str, text: Degrees, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(fixture)
    samples = [make_prompt([(1, 8, 6), (1, 4, 12)], 9, 5), make_text(20, 6)]
    for sample, told in zip(samples, answer(model, Case(ONE, text, 1), samples, NEW), strict=True):
        wanted = plain_logits(model, sample, told.tokens)
        assert float((told.logits - wanted).abs().max() / wanted.abs().max()) < 1e-12


NEW_TOKENS = Sampling(6)
REFUSED = {"paligemma2"}  # a prompt whose tokens all see each other


class ExactText(RecordingText):
    """Its process computes in float64 all through."""

    def __init__(self, settings: StageSettings):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


def _prompt(sample: Sample) -> Sample:
    return Sample(**{**vars(sample), "labels": np.full_like(sample.labels, IGNORED)})


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, list[Sample]]]]:
    """Models and prompts by the name of the case, as they are asked for."""

    class Models(dict[str, tuple[str, list[Sample]]]):
        def __missing__(self, name: str) -> tuple[str, list[Sample]]:
            folder = str(save_family(name, tmp_path_factory.mktemp(name)))
            with staying_double():
                maker = Maker(folder)
                self[name] = folder, [_prompt(maker.sample(pictures, 9, 7)) for pictures in ([0, 1], [2])]
            return self[name]

    return Models()


FAMILY_LAYOUTS = {"one": Degrees(), "ulysses": Degrees(ulysses=2), "ring": Degrees(ring=2), "tensor": Degrees(tensor=2)}
SOME = [slow("gemma3", "ulysses"), slow("gemma4", "tensor"), ("llava_clip", "ring"), ("qwen3_5", "ring")]


def check(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    folder, prompts = made[name]
    decoder, degrees = load_family(folder).decoder, FAMILY_LAYOUTS[layout]
    if name in REFUSED:
        with pytest.raises(ModelError, match="it can be trained, but not answer prompts"):
            decoder.check_answers()
        return
    decoder.check_answers()
    parallelism = "none" if layout == "one" else "tensor" if layout == "tensor" else "sequence"
    own = {axis: getattr(degrees, axis) for axis in ("ring", "ulysses", "tensor")}
    try:
        decoder.check(resolve_part("text", PartConfig(parallelism=parallelism, num_actors=degrees.world, **own)))
    except ConfigError:
        return
    with staying_double():
        found = answer(folder, Case(Degrees(), degrees, 1), prompts, NEW_TOKENS, Fault(ExactVision, ExactText))
        for sample, told in zip(prompts, found, strict=True):
            # Where the model says a placeholder, the plain one looks for a picture more.
            said = next((n for n, token in enumerate(told.tokens) if token >= IMAGE), len(told.tokens) - 1)
            wanted = plain_logits(folder, sample, told.tokens[: said + 1])
            assert float((told.logits[: said + 1] - wanted).abs().max() / wanted.abs().max()) < 1e-12


@pytest.mark.families
@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    check(name, layout, made)


@pytest.mark.parametrize(("name", "layout"), SOME)
def test_some_families(name: str, layout: str, made: dict[str, tuple[str, list[Sample]]]) -> None:
    check(name, layout, made)


@pytest.mark.parametrize(
    "text",
    [
        Degrees(),
        slow(Degrees(ring=2)),
        Degrees(ulysses=2),
        slow(Degrees(tensor=2)),
        Degrees(ring=3),
        slow(Degrees(ring=2, ulysses=2)),
    ],
    ids=str,
)
def test_state_begins_with_prompts_of_few_tokens(text: Degrees, made: dict[str, tuple[str, list[Sample]]]) -> None:
    """Fewer than ranks, none before the last one, fewer than its convolutions see."""
    folder, _ = made["qwen3_5"]
    prompts = [make_text(tokens, tokens) for tokens in (1, 2, 3, 4, 6)]
    with staying_double():
        found = answer(folder, Case(Degrees(), text, 1), prompts, NEW_TOKENS, Fault(ExactVision, ExactText))
        for sample, told in zip(prompts, found, strict=True):
            wanted = plain_logits(folder, sample, told.tokens)
            assert float((told.logits - wanted).abs().max() / wanted.abs().max()) < 1e-12
