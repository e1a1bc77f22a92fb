"""The adapter of a tower with several outputs against the model's own, one process, plain numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, AutoConfig, AutoModelForImageTextToText

from dhp.core.axes import Degrees
from dhp.data.sample.sample import Sample
from dhp.models.empty import check_tensor_plan, part_shape
from dhp.models.family import Family
from dhp.models.load import load_part, model_class
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention
from dhp.parallel.tensor.slices import use_local_slices
from dhp.parallel.tensor.styles import with_fused
from dhp.parallel.tensor.tensor_plan import local_plan
from tests.helpers.alike import assert_exact
from tests.helpers.cut_model import CutModel, cut_layers, largest_difference
from tests.helpers.layouts import UPDATE, Case, Fault, InspectedText, compare
from tests.helpers.norms import exact_norms, use_exact_norms
from tests.helpers.oracle import Oracle, Step
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow_but
from tests.helpers.tiny import IMAGE_TOKEN, VIDEO_TOKEN, make_sample

CPU = torch.device("cpu")
GRIDS = [(1, 2, 2), (1, 6, 10), (1, 4, 4), (1, 12, 14), (2, 6, 4)]  # the last one is a video's: two frames
NAMES = ("embeddings", "deepstack.0", "deepstack.1", "deepstack.2")


@pytest.fixture(scope="module")
def family(qwen3_vl_model: str) -> Family:
    return load_family(qwen3_vl_model)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_layout_covers_the_image_once(family: Family, grid: tuple[int, int, int]) -> None:
    layout = family.tower.image_layout(grid)
    t, h, w = grid
    assert layout.patches == t * h * w == sum(layout.window_lengths) == sum(layout.frame_lengths)
    assert layout.patch_order().tolist() == list(range(t * h * w))
    assert layout.positions.shape == (t * h * w, family.tower.position_columns)
    assert len(layout.order) == family.processor.image_tokens(grid)
    assert set(layout.window_lengths) == {2 * w}  # a row of tokens


def test_the_table_is_resampled_as_the_adapter_does(qwen3_vl_model: str) -> None:
    """Canary: the tower's own settings for it. `linear` is tested in tests/models/test_tower.py."""
    tower = AutoModelForImageTextToText.from_pretrained(qwen3_vl_model).model.visual
    assert (tower.interpolation_mode, tower.interpolation_align_corners) == ("bilinear", True)
    assert tower.num_grid_per_side == 5


def _encode(family: Family, model: str, grids: list, pixels: list[Tensor]) -> list[dict[str, Tensor]]:
    """Of all at once, by picture."""
    part = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    AttentionInterface.register("flash_dhp_test", segment_attention)
    family.tower.use_attention(part, "flash_dhp_test")
    layouts = [family.tower.image_layout(grid) for grid in grids]
    windows, frames = (
        plan_segments([n for layout in layouts for n in getattr(layout, kind)], CPU)
        for kind in ("window_lengths", "frame_lengths")
    )
    positions = torch.cat([layout.positions for layout in layouts])
    found = family.tower.encode(part, TowerInputs(torch.cat(pixels), positions, windows, frames))
    split = {name: rows.split([len(layout.order) for layout in layouts]) for name, rows in found.items()}
    return [{name: rows[number] for name, rows in split.items()} for number in range(len(grids))]


@pytest.mark.parametrize("grids", [GRIDS[1:2], GRIDS], ids=["one image", "all"])
def test_encode_equals_the_models_own_features(family: Family, qwen3_vl_model: str, grids: list) -> None:
    model = AutoModelForImageTextToText.from_pretrained(qwen3_vl_model, dtype=torch.float64)
    pixels = [torch.randn(t * h * w, family.tower.patch_dim, dtype=torch.float64) for t, h, w in grids]
    output = model.model.get_image_features(torch.cat(pixels), torch.tensor(grids))
    wanted = dict(zip(NAMES, (output.pooler_output, *output.deepstack_features), strict=True))
    found = _encode(family, qwen3_vl_model, grids, pixels)
    assert family.tower.tensors == NAMES
    for number, picture in enumerate(found):
        assert tuple(picture) == NAMES
        for name, rows in picture.items():
            torch.testing.assert_close(rows, wanted[name][number], rtol=1e-10, atol=1e-12)


def test_a_feature_is_no_other(family: Family, qwen3_vl_model: str) -> None:
    (picture,) = _encode(family, qwen3_vl_model, [(1, 4, 6)], [torch.randn(24, family.tower.patch_dim).double()])
    for first, second in zip(NAMES, NAMES[1:]):
        assert not torch.allclose(picture[first], picture[second], rtol=1e-2)


ROWS = {
    "an image": [make_sample([(1, 4, 6)], 5, 3, 1, IMAGE_TOKEN)],
    "several images": [make_sample([(1, 4, 6), (1, 2, 8)], 5, 3, 2, IMAGE_TOKEN)],
    "a video": [make_sample([(3, 4, 6)], 5, 3, 3, IMAGE_TOKEN, seconds=(0.5,), stamped=True)],
    "text": [make_sample([], 9, 3, 4, IMAGE_TOKEN)],
    "two rows": [
        make_sample([(1, 2, 2), (2, 4, 4)], 3, 2, 5, IMAGE_TOKEN, seconds=(None, 1.0), stamped=True),
        make_sample([(1, 6, 2)], 4, 2, 6, IMAGE_TOKEN),
    ],
}


@pytest.mark.parametrize("rows", ROWS)
def test_positions_equal_the_models_own(family: Family, qwen3_vl_model: str, rows: str) -> None:
    from dhp.batch.collate import GRIDS, VIDEO_GRIDS, Collator

    model = AutoModelForImageTextToText.from_pretrained(qwen3_vl_model)
    named = Collator(family, 0, packing=False).padded(tuple(ROWS[rows]))
    lengths = [len(sample.input_ids) for sample in ROWS[rows]]
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    wanted, _ = model.model.get_rope_index(
        named["input_ids"], named["mm_token_type_ids"], named.get(GRIDS), named.get(VIDEO_GRIDS), inside.long()
    )
    assert torch.equal(named["position_ids"], wanted)
    assert rows == "text" or not torch.equal(wanted[0], wanted[1])


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """An image; two images beside a video; text alone."""
    make = lambda *given, **more: make_sample(*given, IMAGE_TOKEN, stamped=True, **more)
    return [
        make([(1, 4, 6)], 9, 4, 1),
        make([(1, 4, 4), (2, 4, 6), (1, 4, 4)], 7, 5, 2, seconds=(None, 1.0, None)),
        make([], 8, 5, 3),
    ]


@pytest.fixture(scope="module")
def plain(qwen3_vl_model: str, samples: list[Sample]) -> Iterator[Step]:
    """What the whole model makes of the samples, without the float32 of its norms; so long as it is in use."""
    with exact_norms():
        yield Oracle(qwen3_vl_model, torch.float64, UPDATE).step(samples)


SPLITS = {"whole": ((4,), (0,)), "three stages": ((2, 1, 1), (0, 1, 2)), "two groups": ((1, 1, 1, 1), (0, 1, 0, 1))}


@pytest.mark.parametrize("split", SPLITS)
def test_parts_equal_the_plain_model(split: str, qwen3_vl_model: str, samples: list[Sample], plain: Step) -> None:
    counts, owners = SPLITS[split]
    assert largest_difference(CutModel(qwen3_vl_model, cut_layers(counts), owners).step(samples), plain) < 1e-9


class ExactText(InspectedText):
    """On ranks, without the float32 of norms."""

    def __init__(self, *given: Any):
        use_exact_norms(setattr)
        super().__init__(*given)


LAYOUTS = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), micro_batches=2),
    Case(Degrees(ring=2, tensor=2), Degrees(tensor=8), micro_batches=1, packing=True, checkpointing=True),
    # Features enter both stages, and both chunks of the first.
    Case(Degrees(data=2), Degrees(tensor=2), micro_batches=4, schedule="interleaved", stages=2, chunks=2),
]


@pytest.mark.parametrize("case", slow_but(LAYOUTS, LAYOUTS[0]), ids=str)
def test_layouts_equal_the_plain_model(case: Case, qwen3_vl_model: str, samples: list[Sample]) -> None:
    """Ranks that divide an image, ranks without one, ranks that share key heads; a step without any image."""
    steps = [
        [*samples, make_sample([(1, 16, 20)], 8, 5, 4, IMAGE_TOKEN)],
        [make_sample([], 5 + seed, 3, seed, IMAGE_TOKEN) for seed in (31, 32, 33, 34)],
    ]
    with exact_norms():
        assert_exact(compare(qwen3_vl_model, case, steps, Fault(text=ExactText)))


class DroppedFeature(CutModel):
    """What goes wrong: a feature does not arrive."""

    def given(self, name: str, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows) if name == "deepstack.1" else rows.clone()


class ExchangedImages(CutModel):
    """What goes wrong: two images of one size get each other's features."""

    def given(self, name: str, rows: Tensor) -> Tensor:
        if name != "deepstack.0" or len(rows) != 4 + 12 + 4:
            return rows.clone()
        return torch.cat([rows[-4:], rows[4:-4], rows[:4]])


class LostGradient(CutModel):
    """What goes wrong: the tower gets no gradient of a feature."""

    def image_gradient(self, name: str, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if name == "deepstack.2" else gradient


@pytest.mark.parametrize("fault", [DroppedFeature, ExchangedImages, LostGradient])
def test_a_fault_shows(fault: type[CutModel], qwen3_vl_model: str, samples: list[Sample], plain: Step) -> None:
    assert largest_difference(fault(qwen3_vl_model, cut_layers((4,)), (0,)).step(samples), plain) > 1e-3


def _plans(family: Family) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """What a part drops, and the plan that cuts it."""
    tower, decoder = family.tower, family.decoder
    return {
        "vision": (decoder.modules, with_fused(tower.tensor_plan, tower.fused)),
        "text": (tower.modules, dict(decoder.tensor_plan)),
        # Its plan names the embedding, which another stage has.
        "last stage": ((*tower.modules, *decoder.absent(cut_layers((2, 2))[1:])), dict(decoder.tensor_plan)),
    }


def _parameters_of_a_rank(model: str, part: str) -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    dropped, plan = _plans(load_family(model))[part]
    loaded = load_part(model, dropped, torch.float32, mesh, plan, local_plan)
    use_local_slices(loaded)
    return sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize("part", ["vision", "text", "last stage"])
def test_tensor_ranks_hold_their_slices(part: str, family: Family, qwen3_vl_model: str) -> None:
    dropped, plan = _plans(family)[part]
    check_tensor_plan(qwen3_vl_model, dropped, local_plan, plan)
    counted = part_shape(qwen3_vl_model, dropped, 2, added_plan=plan)
    assert run_on_ranks(_parameters_of_a_rank, 2, qwen3_vl_model, part) == [counted.per_rank] * 2
    assert counted.per_rank == (counted.total - counted.replicated) // 2 + counted.replicated
    assert 0 < counted.replicated < counted.total


def test_the_decoders_plan_is_that_of_qwen3(family: Family, qwen3_vl_model: str, head_norms_model: str) -> None:
    """Canary: of this decoder transformers plans the embedding and the head alone, and all of its twin without
    pictures."""
    with torch.device("meta"):
        own, twin = (
            model_class(name)(AutoConfig.from_pretrained(name)).tp_plan for name in (qwen3_vl_model, head_norms_model)
        )
    assert own == {"lm_head": "colwise_gather_output", "model.language_model.embed_tokens": "embedding_rowwise"}
    assert own | family.decoder.tensor_plan == twin


def test_features_enter_where_their_layer_is(family: Family) -> None:
    decoder, chunks = family.decoder, cut_layers((1, 2, 1))
    assert decoder.enters == {"deepstack.0": 0, "deepstack.1": 1, "deepstack.2": 2}
    assert [decoder.entering(chunk) for chunk in chunks] == [
        ("embeddings", "deepstack.0"), ("deepstack.1", "deepstack.2"), (),
    ]  # fmt: skip
    assert decoder.entering(decoder.whole) == NAMES


def test_counts_come_from_the_configuration(family: Family) -> None:
    assert (family.tower.heads, family.decoder.heads, family.decoder.kv_heads) == (4, 8, 4)
    assert (family.processor.image_token_id, family.processor.video_token_id) == (IMAGE_TOKEN, VIDEO_TOKEN)
    assert family.tower.merge_unit == family.processor.merge_unit == 4
    assert family.tower.patch_dim == family.processor.patch_dim == 3 * 2 * 14 * 14
