"""Videos beside images, through every kind of sharding: equal to the plain model that runs each sample alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from dhp.core.axes import Degrees
from dhp.data.sample.sample import Sample
from tests.engine.test_parity import assert_exact
from tests.helpers.layouts import Case, Fault, compare, make_reader
from tests.helpers.rows import on_demand
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
CASES = [
    on_demand(Case(ONE, ONE)),
    Case(Degrees(ulysses=2), Degrees(tensor=2)),
    on_demand(Case(Degrees(ring=2), Degrees(data=2), micro_batches=1, packing=True)),
    on_demand(Case(Degrees(data=2, tensor=2), ONE, micro_batches=1, packing=True)),
    Case(Degrees(ulysses=2), Degrees(ring=2), micro_batches=2),
]


def _samples() -> list[Sample]:
    """An image and a video in either order, a video alone, an image alone, and text alone."""
    make = lambda grids, seconds, tokens, targets, seed: make_sample(
        grids, tokens, targets, seed, IMAGE_TOKEN, seconds=seconds
    )
    return [
        make([(1, 4, 6), (3, 4, 4), (1, 2, 2)], (None, 1.0, None), 6, 4, 41),
        make([(2, 6, 4), (5, 2, 4)], (0.5, 2.4), 5, 2, 42),
        make([(1, 4, 4)], (None,), 4, 3, 43),
        make([], (), 6, 5, 44),
    ]


STEPS = [_samples(), _samples()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_videos_equal_the_plain_model(made_model: str, case: Case) -> None:
    assert_exact(compare(made_model, case, STEPS))


@pytest.mark.parametrize("vision", [Degrees(ulysses=2, ring=2), on_demand(Degrees(ulysses=4))], ids=str)
def test_frames_of_one_video_that_are_divided_equal_the_plain_model(made_model: str, vision: Degrees) -> None:
    """Four ranks share a video of two frames: each frame is divided, and is a segment of its own."""
    samples = [make_sample([(2, 12, 12)], 5, 3, 45, IMAGE_TOKEN, seconds=(1.0,))]
    assert_exact(compare(made_model, Case(vision, ONE, micro_batches=1), [samples]))


def test_a_wrong_pace_would_be_noticed(made_model: str) -> None:
    """The seconds between two steps in time reach the rotary positions: with others, the loss is another."""

    def faster(data):
        first, *others = data.work["text"]
        moved = [replace(work, tensors=work.tensors | {"position_ids": _hurried(work.tensors)}) for work in first]
        return replace(data, work={**data.work, "text": (tuple(moved), *others)})

    assert compare(made_model, Case(ONE, ONE), STEPS[:1], Fault(edit=faster)).loss > 1e-6


def _hurried(tensors: dict[str, Tensor]) -> Tensor:
    positions = tensors["position_ids"].clone()
    positions[0][tensors["mm_token_type_ids"] == 2] += 1
    return positions


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("published", [False, True])
def test_positions_are_those_of_transformers_up_to_the_first_video(
    made_model: str, packing: bool, published: bool
) -> None:
    """And behind it one further than its greatest position, where they are to be the publishers'."""
    samples = _samples()
    feed = make_reader(made_model, Case(ONE, ONE, micro_batches=1, packing=packing), [samples], published)
    (work,) = feed.step(0).work["text"][0]
    model = Qwen2_5_VLModel(AutoConfig.from_pretrained(made_model))
    found = work.tensors["position_ids"]
    lengths = work.lengths or [len(s.input_ids) for s in samples]
    rows = list(found[:, 0].split(lengths, dim=-1)) if packing else [found[:, n, :p] for n, p in enumerate(lengths)]
    for sample, row in zip(samples, rows, strict=True):
        seen = list(zip(sample.grids, sample.video_seconds, strict=True))
        images = [grid for grid, seconds in seen if seconds is None]
        videos = [(grid, seconds) for grid, seconds in seen if seconds is not None]
        expected, _ = model.get_rope_index(
            torch.from_numpy(sample.input_ids)[None],
            torch.from_numpy(sample.mm_token_type_ids)[None],
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor([grid for grid, _ in videos]) if videos else None,
            second_per_grid_ts=torch.tensor([seconds for _, seconds in videos]) if videos else None,
        )
        own = expected[:, 0]
        moving = torch.from_numpy(sample.mm_token_type_ids) == 2
        for end in (moving.long().diff() == -1).nonzero().flatten().tolist() if published else []:
            own[:, end + 1 :] += own[:, : end + 1].max() + 1 - own[:, end + 1 :].min()
        assert torch.equal(row, own)
