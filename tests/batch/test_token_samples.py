"""dhp.batch.token_samples: token ids and patches as they are given, or refused by sample and place."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dhp.batch.token_samples import TokenBatcher, TokenSample, with_marks
from dhp.core.axes import Degrees
from dhp.core.batch import Sampling
from dhp.core.errors import ConfigError, DataError
from dhp.core.preferences import CHOSEN, REJECTED
from dhp.objectives.objectives import find_loss
from tests.helpers.layouts import Case
from tests.helpers.tiny import IMAGE_TOKEN, VIDEO_TOKEN, make_sample
from tests.helpers.token_loops import batcher, token_sample, without_tokenizer

CASE = Case(Degrees(), Degrees(data=2))
PICTURE = token_sample([(1, 6, 10)], 9, 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, made_model: str) -> TokenBatcher:
    without_tokenizer(monkeypatch.setattr, CASE)
    return batcher(made_model, CASE, 2)


def test_nothing_is_tokenised_or_scaled(made: TokenBatcher) -> None:
    (sample,) = made.read([PICTURE])
    assert sample.input_ids.tolist() == list(PICTURE.token_ids)
    assert np.array_equal(np.concatenate(sample.pixels), PICTURE.pixel_values) and sample.grids == ((1, 6, 10),)
    assert np.array_equal(sample.labels >= 0, PICTURE.targets)
    assert np.array_equal(sample.columns["advantages"], PICTURE.columns["advantages"])


def test_images_and_videos_stand_where_their_placeholders_do(made: TokenBatcher) -> None:
    whole = make_sample([(1, 4, 4), (2, 4, 6), (1, 2, 4)], 5, 3, 8, IMAGE_TOKEN, seconds=(None, 0.5, None))
    video, images = whole.pixels[1], np.concatenate([whole.pixels[0], whole.pixels[2]])
    given = TokenSample(
        whole.input_ids,
        pixel_values=images,
        image_grid_thw=[(1, 4, 4), (1, 2, 4)],
        pixel_values_videos=video,
        video_grid_thw=np.array([[2, 4, 6]]),
        second_per_grid_ts=[0.5],
    )
    (sample,) = made.read([given])
    assert (sample.grids, sample.seconds) == (whole.grids, whole.seconds)
    assert all(map(np.array_equal, sample.pixels, whole.pixels))
    assert np.array_equal(sample.mm_token_type_ids, whole.mm_token_type_ids)
    assert np.array_equal(sample.labels >= 0, (whole.mm_token_type_ids == 0) & (np.arange(len(whole.labels)) > 0))


def test_a_sample_of_dhps_is_taken_as_it_is(made: TokenBatcher) -> None:
    whole = replace(make_sample([(1, 4, 4)], 5, 3, 8, IMAGE_TOKEN), columns={"advantages": np.arange(12.0)})
    (sample,) = made.read([whole])
    assert sample.labels is whole.labels and sample.columns["weights"].tolist() == [1.0] * 12


def column(name: str, place: int, value: float) -> TokenSample:
    changed = np.array(PICTURE.columns[name])
    changed[place] = value
    return replace(PICTURE, columns={**PICTURE.columns, name: changed})


LAST = len(PICTURE.token_ids) - 1
REFUSED: list[tuple[Any, str]] = [
    (
        replace(PICTURE, token_ids=list(PICTURE.token_ids)[1:] + [IMAGE_TOKEN]),
        "have 16 placeholders of images, .* 15 to",
    ),
    (replace(PICTURE, image_grid_thw=[(1, 6, 8)]), "says 48 patches of 1176 .* pixels have the shape .60, 1176."),
    (replace(PICTURE, pixel_values=PICTURE.pixel_values[:, 1:]), "60 patches of 1176 .* the shape .60, 1175."),
    (replace(PICTURE, image_grid_thw=np.array([1, 6, 10])), r"image_grid_thw has the shape \(3,\)"),
    (
        replace(PICTURE, pixel_values=PICTURE.pixel_values * np.nan),
        "its pixels of image_grid_thw have numbers that are",
    ),
    (TokenSample([5, 6.5, 3]), "its token_ids are float64. They are whole numbers"),
    ({"token_ids": [5, 6]}, "it is a dict. Give TokenSamples"),
    (TokenSample([5] * 40000), "40000 tokens.* are more than the 32768 positions that the model knows"),
    (replace(PICTURE, pixel_values=None, image_grid_thw=None), "have 15 placeholders of images, .* become 0 tokens"),
    (TokenSample([5, VIDEO_TOKEN, 7]), "have 1 placeholders of videos, .* become 0 tokens"),
    (TokenSample([]), r"have the shape \(0,\)"),
    (TokenSample([5, 9999, 3]), "have 9999 at 1. They are one row, each from 0 to 511"),
    (TokenSample([5, 6], [True, True]), r"targets\[0\] of its 2 tokens: of 2 tokens all but the first"),
    (TokenSample([5, 6], [True]), "1 targets: of 2 tokens"),
    (column("weights", LAST, float("nan")), f"its column weights is nan at token {LAST}, a target"),
    (column("advantages", LAST, float("inf")), f"its column advantages is inf at token {LAST}, a target"),
    (replace(PICTURE, columns={"weights": [1.0]}), "its column weights has 1 values for 27 tokens"),
    (replace(PICTURE, columns={"weights": "heavy"}), "its column weights is no row of numbers"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED, ids=[said[:24] for _, said in REFUSED])
def test_what_does_not_fit_is_refused_by_sample_and_place(wrong: Any, said: str, made: TokenBatcher) -> None:
    with pytest.raises(DataError, match=f"^sample 1: .*{said}"):
        made.read([PICTURE, wrong])


def test_a_column_that_is_no_number_where_nothing_counts_it_is_taken(made: TokenBatcher) -> None:
    made.read([column("old_logps", 0, float("nan"))])


def test_columns_that_a_loss_reads_must_be_there(made: TokenBatcher) -> None:
    with pytest.raises(DataError, match="sample 0 has no column old_logps, which the loss reads. It has weights"):
        made.read([replace(PICTURE, columns={})], ["old_logps"])
    with pytest.raises(DataError, match="no sample is nothing to compute"):
        made.read([])
    with pytest.raises(DataError, match="a TokenSample is nothing to compute. Give a list"):
        made.read(PICTURE)  # type: ignore[arg-type]


@pytest.mark.parametrize("normalizer", [0, -1.0, float("nan")])
def test_what_losses_are_divided_by_is_above_0(normalizer: float, made: TokenBatcher) -> None:
    with pytest.raises(DataError, match=f"normalizer={normalizer} divides the losses"):
        made.make(made.read([PICTURE]), find_loss("cross_entropy", {}, ())[0], normalizer, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 2.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"seed": None},
    ],
)
def test_sampling_that_draws_nothing_sensible_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens is above 0, top_k 0 or more"):
        Sampling(4, **wrong)
    for count in (0, -2, 2.5):
        with pytest.raises(ConfigError, match="max_new_tokens is above 0"):
            Sampling(count)  # type: ignore[arg-type]


def test_pairs_stay_together_in_rows_and_have_sums_of_the_reference(made: TokenBatcher) -> None:
    read = made.read([token_sample([], 5 + number, number) for number in range(6)], ["reference"])
    marked = with_marks(read)
    assert [(one.mark.side, one.mark.first) for one in marked if one.mark] == [(CHOSEN, True), (REJECTED, False)] * 3
    targets = read[2].labels >= 0
    assert marked[2].mark is not None and marked[2].mark.reference == read[2].columns["reference"][targets].sum()
    data = made.make(marked, find_loss("dpo", {}, ())[0], None, 1)
    assert [[[place for _, place in of] for of in row] for row in data.info.order] == [[[0, 1, 2, 3], [4, 5]]]
    assert data.info.total_weight == 3.0
    with pytest.raises(DataError, match="dpo takes pairs, .* 5 samples are no pairs"):
        with_marks(read[:5])


def test_prompts_go_one_to_a_replica_and_end_as_the_model_does(made: TokenBatcher) -> None:
    steps = list(
        made.prompts(made.read([token_sample([], 5, 1), PICTURE, token_sample([], 6, 2)]), Sampling(4, seed=3))
    )
    prompts = [one for step in steps for one in step.work["text"][0]]
    assert [one.last is not None for one in prompts] == [True, True, True, False]
    assert [one.sampling.seed for one in prompts[:3]] == [3, 4, 5] and prompts[0].sampling.stop == (1,)
    assert prompts[1].last == PICTURE.token_ids[-1]
