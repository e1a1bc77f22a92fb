"""Models without weights, their digests and their slices."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config

from dhp.core.errors import ConfigError, ModelError
from dhp.data.sample.sample import Sample
from dhp.models import empty
from dhp.models.empty import decoder_sizes, digest_tower, part_shape
from dhp.models.load import load_part
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes, PartShape
from dhp.models.types import Chunk, DecoderInputs, held_layers
from dhp.objectives.objective import Chosen
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from dhp.parallel.tensor.slices import cut_of, use_local_slices
from dhp.parallel.tensor.styles import with_fused
from dhp.parallel.tensor.tensor_plan import local_plan
from tests.helpers.cut_model import CutModel, cut_layers, largest_difference
from tests.helpers.layouts import UPDATE
from tests.helpers.norms import exact_norms
from tests.helpers.oracle import Oracle, Step
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import IMAGE_TOKEN, make_sample, save_llava, save_model

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
    counted = part_shape(few_keys_model, family.tower.modules, 4, whole_modules=tuple(family.decoder.shared_heads(4)))
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


PARTS = ("vision", "text")


@pytest.fixture(scope="module")
def digest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("digest"))


def changed_weight(folder: Path, piece: str) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(name for name in tensors if piece in name)[0]
    tensors[name].view(-1)[0] += 0.001
    save_file(tensors, file, {"format": "pt"})


def changed_config(folder: Path, **vision: float) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= vision
    file.write_text(json.dumps(config))


def digest_of(folder: Path, dtype: str = "bfloat16") -> str:
    return digest_tower(str(folder), dtype, PARTS)


@pytest.mark.parametrize(
    "change, same",
    [
        (lambda folder: None, True),
        (lambda folder: changed_weight(folder, "visual.blocks"), False),
        (lambda folder: changed_weight(folder, "visual.merger"), False),
        (lambda folder: changed_weight(folder, "layers.0.mlp"), True),
        (lambda folder: changed_config(folder, window_size=112), False),
    ],
    ids=["a copy", "a weight of the tower", "of the projector", "of the decoder", "the tower's configuration"],
)
def test_it_changes_with_the_tower_alone(
    change: Callable[[Path], None], same: bool, digest_model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(digest_model, tmp_path / "copy"))
    change(copy)
    assert (digest_of(copy) == digest_of(digest_model)) is same


def test_it_changes_with_the_number_format(digest_model: Path) -> None:
    assert len({digest_of(digest_model, dtype) for dtype in ("bfloat16", "float32", "float64")}) == 3


def test_a_tower_that_draws_lots_is_refused(digest_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = empty.load_part

    def dropping(*arguments: object) -> torch.nn.Module:
        found = load(*arguments)
        found.model.visual.add_module("dropout", torch.nn.Dropout(0.1))
        return found

    monkeypatch.setattr(empty, "load_part", dropping)
    with pytest.raises(ConfigError, match=r"model\.visual\.dropout of the tower, which drops .* chance of 0\.1"):
        digest_of(digest_model)


EXACT = 1e-9
SLICE_CUTS = {  # layers of each chunk, and the group that holds it
    "whole": ((4,), (0,)),
    "two stages": ((1, 3), (0, 1)),
    "three stages": ((2, 1, 1), (0, 1, 2)),
    "four stages": ((1, 1, 1, 1), (0, 1, 2, 3)),
    "two groups of two chunks": ((1, 1, 1, 1), (0, 1, 0, 1)),
    "first and last in one group": ((1, 2, 1), (0, 1, 0)),
}


class Known:
    """A model with four decoder layers, samples, and what the plain model makes of them."""

    def __init__(self, name: Path, samples: list[Sample]):
        self.name, self.samples = str(name), samples
        self.step: Step = Oracle(self.name, torch.float64, UPDATE).step(samples)

    def difference(self, cut_model: CutModel) -> float:
        return largest_difference(cut_model.step(self.samples), self.step)


def qwen_samples() -> list[Sample]:
    make = lambda *given, **more: make_sample(*given, IMAGE_TOKEN, **more)
    return [make([(1, 4, 6)], 9, 4, 1), make([(1, 4, 4), (2, 4, 6)], 7, 5, 2, seconds=(None, 1.0)), make([], 8, 5, 3)]


def llava_samples() -> list[Sample]:
    make = lambda images, *given: make_sample([(1, 4, 4)] * images, *given, IMAGE_TOKEN, unit=1, values=3 * 14 * 14)
    return [make(1, 9, 4, 1), make(2, 7, 5, 2), make(0, 8, 5, 3)]


LAYERS = {"num_hidden_layers": 4}
MADE = {
    "qwen2_5_vl": lambda folder: Known(save_model(folder, text=LAYERS), qwen_samples()),
    "qwen2_5_vl, tied": lambda folder: Known(save_model(folder, tied=True, text=LAYERS), qwen_samples()),
    "llava": lambda folder: Known(save_llava(folder, **LAYERS), llava_samples()),
    "llava of qwen3": lambda folder: Known(save_llava(folder, Qwen3Config, head_dim=8, **LAYERS), llava_samples()),
}
CASES = [
    *(("qwen2_5_vl", cut) for cut in SLICE_CUTS),
    ("qwen2_5_vl, tied", "two stages"),
    ("qwen2_5_vl, tied", "first and last in one group"),
    ("llava", "three stages"),
    ("llava of qwen3", "two groups of two chunks"),
]


@pytest.fixture(scope="module")
def known_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Known]]:
    with exact_norms():
        yield cache(lambda name: MADE[name](tmp_path_factory.mktemp("slices") / "model"))


@pytest.mark.parametrize(("model", "cut"), CASES)
def test_chunks_equal_the_plain_model(known_models: Callable[[str], Known], model: str, cut: str) -> None:
    known, (counts, owners) = known_models(model), SLICE_CUTS[cut]
    assert known.difference(CutModel(known.name, cut_layers(counts), owners)) < EXACT


class Sharded(CutModel):
    """Groups on several ranks that recompute their layers: cut by heads, or with states sharded over the ranks."""

    def __init__(self, model_name: str, chunks: Sequence[Chunk], owners: Sequence[int], tensor: bool):
        self.mesh, self.tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",)), tensor
        super().__init__(model_name, chunks, owners)
        self.updates = [self._wrap(part, held) for part, held in zip(self.groups, self.held, strict=True)]

    def load(self, model_name: str, dropped: tuple[str, ...]) -> PreTrainedModel:
        if not self.tensor:
            return super().load(model_name, dropped)
        part = load_part(model_name, dropped, torch.float64, self.mesh, {}, local_plan)
        use_local_slices(part)
        return part

    def _wrap(self, part: PreTrainedModel, held: Sequence[Chunk]) -> FullySharded | None:
        parts = self.family.decoder.layers
        layers = list(part.get_submodule(parts.path))
        RecomputedLayers(layers, parts, ("linear", "all")[: len(layers)])
        if self.tensor:
            return None
        return FullySharded(part, layers, torch.optim.AdamW, self.mesh, tensor_rank=0, stage=3, dtype=torch.float64)

    def run(self, owner: int, chunk: Chunk, inputs: DecoderInputs) -> Tensor:
        compute = lambda: super(Sharded, self).run(owner, chunk, inputs)
        return compute() if self.tensor else self.updates[owner].forward(compute)

    def objective(self, hidden: Tensor, targets: Chosen, total: int) -> Tensor:
        compute = lambda: super(Sharded, self).objective(hidden, targets, total)
        return compute() if self.tensor else self.updates[self.owners[-1]].forward(compute)

    def gradient(self, parameter: Tensor, owner: nn.Module, own: str) -> Tensor:
        """Whole; both ranks have the same samples, so a sum over them is twice."""
        if not self.tensor:
            return parameter.grad.full_tensor() / 2
        cut = cut_of(owner, own)
        return parameter.grad if cut is None else cut.around(parameter.grad).full_tensor()


def _sharded_difference(model: str, samples: list[Sample], wanted: Step, tensor: bool) -> float:
    with exact_norms():
        return largest_difference(Sharded(model, cut_layers((1, 1, 1, 1)), (0, 1, 0, 1), tensor).step(samples), wanted)


ON_RANKS = [("qwen2_5_vl, tied", True), ("qwen2_5_vl", False)]


@pytest.mark.parametrize(("model", "tensor"), ON_RANKS, ids=["tensor", "fsdp"])
def test_two_chunks_a_group_on_ranks_that_recompute(
    known_models: Callable[[str], Known], model: str, tensor: bool
) -> None:
    known = known_models(model)
    assert max(run_on_ranks(_sharded_difference, 2, known.name, known.samples, known.step, tensor)) < EXACT


class LostHidden(CutModel):
    """What goes wrong: the first chunk gets no gradient of its states."""

    def hidden_gradient(self, number: int, gradient: Tensor) -> Tensor:
        return gradient if number else torch.zeros_like(gradient)


def test_a_lost_gradient_of_states_shows(known_models: Callable[[str], Known]) -> None:
    known = known_models("qwen2_5_vl")
    assert known.difference(LostHidden(known.name, cut_layers((2, 2)), (0, 1))) > 0.9


def test_a_layer_run_twice_shows(known_models: Callable[[str], Known]) -> None:
    known = known_models("qwen2_5_vl")
    overlapping = (Chunk(range(0, 2), True, False), Chunk(range(1, 4), False, True))
    assert known.difference(CutModel(known.name, overlapping, (0, 1))) > 1e-3


def test_half_of_a_tied_gradient_shows(known_models: Callable[[str], Known]) -> None:
    """The weight is held by the group with the first chunk and by that with the last, and each has a part."""
    known = known_models("qwen2_5_vl, tied")
    cut_model = CutModel(known.name, cut_layers((2, 2)), (0, 1))
    found = cut_model.step(known.samples)
    name = "model.language_model.embed_tokens.weight"
    parts = [dict(group.named_parameters())[name].grad for group in cut_model.groups]
    wanted = known.step.gradients[name]
    assert all(float((part - wanted).norm() / wanted.norm()) > 1e-2 for part in parts)
    torch.testing.assert_close(found.gradients[name], wanted, rtol=1e-9, atol=1e-12)


def test_each_group_holds_its_layers_under_their_own_names(made_model: str) -> None:
    first, second = cut_layers((1, 1))
    family = load_family(made_model)
    whole = dict(load_part(made_model, family.tower.modules, torch.float32).named_parameters())
    held = []
    for chunk in (first, second):
        part = load_part(made_model, (*family.tower.modules, *family.decoder.absent([chunk])), torch.float32)
        assert len(part.get_submodule(family.decoder.layers.path)) == 1
        held.append(dict(part.named_parameters()))
        assert all(torch.equal(weight, whole[name]) for name, weight in held[-1].items())
    path = "model.language_model."
    ends = {f"{path}embed_tokens.weight"}, {f"{path}norm.weight", "lm_head.weight"}
    for number, (names, end) in enumerate(zip(held, ends, strict=True)):
        assert names.keys() == {name for name in whole if name.startswith(f"{path}layers.{number}.")} | end


def test_a_tied_head_brings_the_embedding_along(few_keys_model: str) -> None:
    family = load_family(few_keys_model)
    (first, last), name = cut_layers((1, 1)), "model.language_model.embed_tokens"
    assert name not in family.decoder.absent([first]) + family.decoder.absent([last])
    part = load_part(few_keys_model, (*family.tower.modules, *family.decoder.absent([last])), torch.float32)
    assert part.lm_head.weight is part.get_submodule(name).weight
    assert "lm_head.weight" not in dict(part.named_parameters())


def test_what_is_absent_refuses_to_run(made_model: str) -> None:
    family = load_family(made_model)
    first, last = cut_layers((1, 1))
    part = load_part(made_model, (*family.tower.modules, *family.decoder.absent([last])), torch.float32)
    inputs = DecoderInputs(torch.zeros(1, 3, dtype=torch.long), torch.zeros(3, 1, 3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="model.language_model.embed_tokens is not in this part"):
        family.decoder.run(part, first, inputs)


def test_cuts() -> None:
    assert cut_layers((2, 1, 3)) == (
        Chunk(range(0, 2), True, False), Chunk(range(2, 3), False, False), Chunk(range(3, 6), False, True),
    )  # fmt: skip
    assert cut_layers((5,)) == (Chunk(range(5), True, True),)
    assert held_layers([Chunk(range(4, 6), False, False), Chunk(range(1, 2), False, False)]) == (1, 4, 5)
    for counts in ((), (2, 0, 1)):
        with pytest.raises(ValueError, match="each needs at least one"):
            cut_layers(counts)
