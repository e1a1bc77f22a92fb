"""Counting a model without its weights: by hand, by what ranks really load, and by the published numbers."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dhp.core.errors import ModelError
from dhp.models.empty import decoder_sizes, part_shape
from dhp.models.load import load_part
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes, PartShape
from dhp.parallel.tensor.styles import with_fused
from tests.helpers.cut_model import cut_layers
from tests.helpers.ranks import run_on_ranks

# A decoder layer of 64 hidden, 8 query heads of 8, 96 intermediate; weights and biases.
QUERY, OUT, FEED_FORWARD, NORMS = 64 * 64 + 64, 64 * 64, 3 * 64 * 96, 2 * 64
VOCABULARY = 512 * 64


def test_text_parameters_by_hand(made_model: str) -> None:
    keys = values = 64 * 32 + 32  # 4 heads of 8
    layer = QUERY + keys + values + OUT + FEED_FORWARD + NORMS
    total = 2 * VOCABULARY + 2 * layer + 64
    whole = 2 * NORMS + 64
    dropped = load_family(made_model).tower.modules
    assert part_shape(made_model, dropped) == PartShape(total, total, total, small=total)
    each = (total - whole) // 2 + whole
    assert part_shape(made_model, dropped, tensor=2) == PartShape(total, each, whole, small=each)


def test_shared_keys_are_whole_on_every_rank_and_a_tied_head_counts_once(few_keys_model: str) -> None:
    keys = values = 64 * 16 + 16  # 2 heads of 8
    total = VOCABULARY + 2 * (QUERY + keys + values + OUT + FEED_FORWARD + NORMS) + 64
    whole = 2 * (NORMS + keys + values) + 64
    family = load_family(few_keys_model)
    counted = part_shape(few_keys_model, family.tower.modules, 4, whole_modules=family.decoder.kv_projections)
    each = (total - whole) // 4 + whole
    assert counted == PartShape(total, each, whole, small=each)


def test_vision_parameters_by_hand(made_model: str) -> None:
    patches = 3 * 2 * 14 * 14 * 32
    block = (32 * 96 + 96) + (32 * 32 + 32) + 2 * (32 * 48 + 48) + (48 * 32 + 32) + 2 * 32
    merger = 32 + (128 * 128 + 128) + (128 * 64 + 64)
    total = patches + 4 * block + merger
    assert part_shape(made_model, load_family(made_model).decoder.modules) == PartShape(
        total, total, total, small=total
    )


def _held(model: str) -> int:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tensor",))
    part = load_part(model, load_family(model).tower.modules, torch.float32, mesh)
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in part.parameters())


def test_the_count_is_what_ranks_load(made_model: str) -> None:
    """Three ranks, so that no matrix splits evenly."""
    counted = part_shape(made_model, load_family(made_model).tower.modules, tensor=3)
    held = run_on_ranks(_held, 3, made_model)
    assert counted.per_rank == max(held) == held[0]


def _held_of_tower(model: str) -> int:
    mesh, family = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), load_family(model)
    plan = with_fused(family.tower.tensor_plan, family.tower.fused)
    part = load_part(model, family.decoder.modules, torch.float32, mesh, plan)
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in part.parameters())


def test_the_count_of_the_tower_is_what_ranks_load(made_model: str) -> None:
    family = load_family(made_model)
    plan = with_fused(family.tower.tensor_plan, family.tower.fused)
    counted = part_shape(made_model, family.decoder.modules, 2, added_plan=plan)
    assert run_on_ranks(_held_of_tower, 2, made_model) == [counted.per_rank] * 2
    assert counted.per_rank == (counted.total - counted.replicated) // 2 + counted.replicated


def test_the_sizes_of_a_decoders_pieces_by_hand(made_model: str, few_keys_model: str) -> None:
    layer = QUERY + 2 * (64 * 32 + 32) + OUT + FEED_FORWARD + NORMS
    assert decoder_sizes(made_model) == DecoderSizes(VOCABULARY, (layer, layer), 64, VOCABULARY, False)
    layer -= 2 * (64 * 16 + 16)  # half as many keys and values
    assert decoder_sizes(few_keys_model) == DecoderSizes(VOCABULARY, (layer, layer), 64, VOCABULARY, True)


CUTS = [((1, 1), (0, 1)), ((2,), (0,)), ((1, 1), (0, 0)), ((1, 1), (1, 0))]


@pytest.mark.parametrize(("counts", "owners"), CUTS, ids=str)
@pytest.mark.parametrize("model", ["made_model", "few_keys_model", "llava_model", "head_norms_model"])
def test_the_stages_of_a_cut_add_up(
    model: str, counts: tuple[int, ...], owners: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """To the whole part, and a tied embedding once more where its two places are in two stages."""
    source = request.getfixturevalue(model)
    family, sizes = load_family(source), decoder_sizes(source)
    totals = []
    for group in sorted(set(owners)):
        chunks = [chunk for chunk, owner in zip(cut_layers(counts), owners, strict=True) if owner == group]
        totals.append(part_shape(source, (*family.tower.modules, *family.decoder.absent(chunks))).total)
        assert totals[-1] == sizes.held(chunks)
    twice = sizes.embedding if sizes.tied and owners[0] != owners[-1] else 0
    assert sum(totals) == part_shape(source, family.tower.modules).total + twice


def _held_of_stage(model: str, stage: int) -> int:
    mesh, family = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), load_family(model)
    dropped = (*family.tower.modules, *family.decoder.absent([cut_layers((1, 1))[stage]]))
    part = load_part(model, dropped, torch.float32, mesh)
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in part.parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_the_count_of_a_stage_is_what_tensor_ranks_load(few_keys_model: str, stage: int) -> None:
    family = load_family(few_keys_model)
    dropped = (*family.tower.modules, *family.decoder.absent([cut_layers((1, 1))[stage]]))
    counted = part_shape(few_keys_model, dropped, tensor=2)
    assert run_on_ranks(_held_of_stage, 2, few_keys_model, stage) == [counted.per_rank] * 2
    assert 0 < counted.replicated < counted.per_rank < counted.total


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen2.5-VL-3B", 3754622976),
        ("Qwen2.5-VL-7B", 8292166656),
        ("Qwen2.5-VL-32B", 33452718336),
        ("Qwen2.5-VL-72B", 73410777344),
        ("Qwen3-VL-4B", 4437815808),
        ("Qwen3-VL-8B", 8767123696),
        ("Qwen3-VL-32B", 33357390064),
    ],
)
def test_shipped_shapes_have_the_published_number_of_parameters(name: str, published: int) -> None:
    source = config_source(f"Qwen/{name}-Instruct")
    family = load_family(source)
    vision, text = part_shape(source, family.decoder.modules), part_shape(source, family.tower.modules)
    assert vision.total + text.total == published
    assert family.processor.image_token_id == 151655


def test_a_directory_is_its_own_source_and_an_unknown_id_is_refused(made_model: str) -> None:
    assert config_source(made_model) == made_model
    with pytest.raises(ModelError, match="nobody/nothing: its configuration cannot be read .*Qwen/Qwen2.5-VL-7B"):
        config_source("nobody/nothing")
