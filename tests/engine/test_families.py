"""Towers of all kinds in layouts equal their models."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dhp.cluster.transport import shared_memory
from dhp.cluster.worker import GIVEN, GroupSettings, Worker
from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import StageSettings
from dhp.parallel.attention.segment_plan import GATHER_TOKENS
from dhp.parallel.tensor.styles import PARTIAL_OVER
from tests.helpers import ranks
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps, mixed_step, step_with_one_window
from tests.helpers.layouts import Case, Fault, InspectedText, InspectedVision, compare, compare_rounding, make_reader
from tests.helpers.norms import exact_norms, use_exact_norms
from tests.helpers.rows import slow, slow_but
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
CASES = [
    Case(ONE, ONE, 2, stages=2, schedule="1f1b"),
    slow(Case(ONE, ONE, 2, packing=True, stages=4, schedule="1f1b")),  # a feature a stage
    Case(Degrees(data=2), ONE, 2, frozen=("vision", "projector"), packing=True),
]


def _make(grids: list[tuple[int, int, int]], seed: int, seconds: tuple = ()) -> Sample:
    return make_sample(grids, 5 + seed, 3, seed, IMAGE_TOKEN, seconds=seconds, stamped=True)


@cache
def steps() -> list[list[Sample]]:
    """An image; two of unequal sizes; a video beside an image; text alone. Then a large image, then no image at all."""
    mixed = [
        _make([(1, 4, 6)], 1),
        _make([(1, 4, 6), (1, 8, 2)], 2),
        _make([(1, 4, 4), (2, 4, 6)], 3, (None, 1.0)),
        _make([], 4),
    ]
    return [
        mixed,
        [_make([(1, 12, 10)], 5), *(_make([], seed) for seed in (6, 7, 8))],
        [_make([], n) for n in range(4)],
    ]


class ExactText(InspectedText):
    def __init__(self, settings: Any):
        use_exact_norms(setattr)
        super().__init__(settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_model(case: Case, qwen3_vl_model: str) -> None:
    with exact_norms():
        assert_exact(compare(qwen3_vl_model, case, steps(), Fault(text=ExactText)))


class FeatureDropped(InspectedVision):
    """The last feature never leaves."""

    def forward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.2", torch.zeros_like) for b in super().forward_step(*given))


class FeaturesOfImagesExchanged(InspectedVision):
    """The first feature's rows come in another order: those of two images that lie side by side."""

    def forward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.0", lambda rows: rows.roll(6, 0)) for b in super().forward_step(*given))


class GradientLost(ExactText):
    """The gradient of a feature that enters the second stage goes no further."""

    def backward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.2", torch.zeros_like) for b in super().backward_step(*given))


def _changed(bundle: Bundle, name: str, change: Any) -> Bundle:
    tensors = dict(bundle.tensors)
    if name in tensors:
        tensors[name] = change(tensors[name])
    return Bundle(tensors)


@pytest.mark.parametrize(
    ("fault", "loss"),
    [
        (Fault(FeatureDropped, ExactText), True),
        (Fault(FeaturesOfImagesExchanged, ExactText), True),
        (Fault(text=GradientLost), False),
    ],
    ids=["feature dropped", "features exchanged", "gradient lost"],
)
def test_a_planted_mistake_is_seen(fault: Fault, loss: bool, qwen3_vl_model: str) -> None:
    with exact_norms():
        errors = compare(qwen3_vl_model, CASES[0], steps()[:1], fault)
    assert (errors.loss > 1e-7) == loss and errors.gradient > 1e-3, errors


IMAGE = (1, 4, 4)

LLAVA = [Case(ONE, ONE)]


def make(images: int, tokens: int, targets: int, seed: int) -> Sample:
    return make_sample([IMAGE] * images, tokens, targets, seed, IMAGE_TOKEN, unit=1, values=3 * 14 * 14)


def equal_pictures() -> list[list[Sample]]:
    """Images in uneven numbers, several in a sample, none at all, fewer than ranks."""
    return [
        [make(1, 5, 3, 1), make(3, 9, 8, 2), make(0, 6, 1, 3), make(1, 4, 2, 4)],
        [make(0, n, n - 2, 10 + n) for n in (5, 9, 4, 7)],
        [make(0, 8, 5, 21), make(1, 5, 4, 22), make(0, 6, 3, 23), make(0, 4, 1, 24)],
    ]


@pytest.mark.parametrize("case", LLAVA, ids=str)
def test_llava_equals_the_plain_model(case: Case, llava_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(llava_model, case, equal_pictures()))


HEAD_NORMS = [
    Case(ONE, Degrees(tensor=2), micro_batches=2),  # with one micro-batch, summing sums again would not show
    slow(
        Case(ONE, Degrees(tensor=8), micro_batches=3)
    ),  # ranks share key heads, and so parts of the gradient of their norm
]


def _norm(self: Qwen3RMSNorm, states: Tensor) -> Tensor:
    """Qwen3's norm without its detour through float32, whose rounding jumps by 1e-7 for a difference of 1e-16."""
    return self.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon))


class ExactNorms(InspectedText):
    def __init__(self, settings: Any):
        Qwen3RMSNorm.forward = _norm
        super().__init__(settings)


@pytest.mark.parametrize("case", HEAD_NORMS, ids=str)
def test_norms_of_heads_get_the_gradient_of_all_heads(
    case: Case, head_norms_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", _norm)
    assert_exact(compare(head_norms_model, case, equal_pictures(), Fault(text=ExactNorms)))


@pytest.mark.slow
def test_norms_of_heads_in_bfloat16(head_norms_model: str) -> None:
    case = Case(ONE, Degrees(tensor=2), 3, dtype="bfloat16", packing=True)
    ratios = compare_rounding(head_norms_model, case, equal_pictures())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("vision", [Degrees(ulysses=4), Degrees(ring=2, ulysses=2)], ids=str)
def test_an_image_of_65536_patches_equals_the_plain_model(
    vision: Degrees, made_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 3600)  # minutes a pass on two cores
    step = [make_sample([(1, 256, 256)], 12, 8, 1, IMAGE_TOKEN)]
    case = Case(vision, Degrees(tensor=2), micro_batches=1, dtype="float32", packing=True)
    assert_exact_in_single_precision(compare(made_model, case, [step]))


@pytest.mark.parametrize("vision", [slow(Degrees(ring=4)), Degrees(ring=2, ulysses=2)], ids=str)
def test_keys_that_travel_around_the_ring_equal_the_plain_model(vision: Degrees, made_model: str) -> None:
    step = [make_sample([(1, 16, 48)], 12, 8, 1, IMAGE_TOKEN)]
    assert 16 * 48 > GATHER_TOKENS
    assert_exact(compare(made_model, Case(vision, Degrees(), micro_batches=1), [step]))


VIDEO_CASES = [Case(Degrees(ulysses=2), Degrees(tensor=2)), Case(Degrees(ulysses=2), Degrees(ring=2), micro_batches=2)]


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


@pytest.mark.parametrize("case", VIDEO_CASES, ids=str)
def test_videos_equal_the_plain_model(made_model: str, case: Case) -> None:
    assert_exact(compare(made_model, case, STEPS))


@pytest.mark.parametrize("vision", [Degrees(ulysses=2, ring=2)], ids=str)
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


VERBS = ("forward_step", "backward_step", "grad_norm_sq", "optimizer_step")


class ByParcel:
    """A trainer whose verbs run in a worker, and whose tensors all travel as parcels."""

    trainer: type

    def __init__(self, settings: StageSettings):
        shared_memory.SMALLEST_BYTES = 1
        self._worker = Worker(GroupSettings(settings.spec.name, dist.get_world_size(), "gloo", 1, 60.0, None, True), 0)
        self._worker.build(self.trainer, (settings,))

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            return getattr(self._worker._trainer, name)
        return lambda *arguments: (self._worker.call(((name, (GIVEN,) * len(arguments)),), *arguments) or (None,))[1:]


class Vision(ByParcel):
    trainer = InspectedVision


class Text(ByParcel):
    trainer = InspectedText


PARCEL_CASES = [
    slow(Case(Degrees(), Degrees(data=2), micro_batches=4, schedule="vision_ahead")),
    Case(Degrees(data=2), Degrees(data=2), micro_batches=2, packing=True),
    slow(Case(Degrees(data=2), Degrees(), micro_batches=4, packing=True, stages=2, schedule="1f1b")),
]


@pytest.mark.parametrize("case", PARCEL_CASES, ids=str)
def test_parts_that_hand_over_in_shared_memory_equal_the_plain_model(case: Case, made_model: str) -> None:
    """Two steps of many tensors each: rows out of order, or memory that is written again too early, would show."""
    steps = [[*mixed_step(), *mixed_step()[::-1]], [*step_with_one_window(), *mixed_step()]]
    assert_exact(compare(made_model, case, steps, Fault(Vision, Text)))


ALONE, TWO = Degrees(), Degrees(tensor=2)
NORMS = [
    Case(ALONE, TWO, 2, sharded_norms=True),
    Case(ALONE, TWO, 4, sharded_norms=True, stages=2, schedule="1f1b", packing=True, recompute="mlp:0,all:1-3"),
    Case(ALONE, TWO, 2, sharded_norms=True, mlp_chunks=3),
]


@pytest.mark.parametrize("case", slow_but(NORMS, NORMS[2]), ids=str)
def test_norms_over_tokens_equal_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


DEEPSTACK = [Case(TWO, TWO, 2, sharded_norms=True)]


@pytest.mark.parametrize("case", DEEPSTACK, ids=str)
def test_features_enter_between_layers(case: Case, qwen3_vl_model: str) -> None:
    assert_exact(compare(qwen3_vl_model, case, steps()))


class OwnTokensAlone(InspectedText):
    """Gradients of norms are left as each rank's own tokens give them."""

    def load_slice(self) -> Any:
        model = super().load_slice()
        for module in model.modules():
            if not isinstance(module, nn.Linear):
                module.__dict__.pop(PARTIAL_OVER, None)
        return model


def test_norms_that_are_not_summed_are_caught(four_layers_model: str) -> None:
    errors = compare(four_layers_model, NORMS[0], awkward_steps(), Fault(InspectedVision, OwnTokensAlone))
    assert errors.gradient > 0.1 and "norm" in errors.gradient_name
