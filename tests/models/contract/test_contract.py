"""The contract of families, and towers of each."""

import inspect
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Glm4vMoeConfig,
    LlavaConfig,
    Qwen3VLConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from dhp.config.data import DataConfig
from dhp.config.layout import resolve_part
from dhp.config.schema import PartConfig
from dhp.core.batch import ProcessorOutput
from dhp.core.errors import ConfigError, ModelError
from dhp.core.graph import HIDDEN_STATES
from dhp.data.read.records import Record, Turn
from dhp.data.sample.picture_inputs import ModelMedia
from dhp.data.sample.preprocess import Preprocessor
from dhp.models.contract.contract import (
    CONTRACT,
    WITHOUT_CONTRACT,
    Handover,
    find_structure,
    with_called,
    without_weights,
)
from dhp.models.contract.find import _matrices, experts_of, find_contract, find_text_parts, find_vision_parts
from dhp.models.contract.generic_parts import ContractDecoder, WholeTower
from dhp.models.contract.random_pictures import arrays_of, frame_patches, joined, pack, unpack
from dhp.models.contract.random_rows import find_prefixes, token_types
from dhp.models.contract.shrink import MOST_EXPERTS, MOST_LAYERS, VOCABULARY, shrink
from dhp.models.families.glm4v import glm4v
from dhp.models.family import Family
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.registry import load_family
from dhp.models.tower import TowerInputs
from dhp.models.types import Chunk, chunks_of
from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import segment_attention
from tests.helpers.tiny_families import BEGIN, END, FAMILIES, IMAGE, SIDE, VIDEO, make_config, save_family
from tests.helpers.tiny_processors import MAKERS, save_processor


def test_lists_and_levels_are_rows_by_name() -> None:
    first, second = torch.randn(2, 4), torch.randn(3, 4)
    deep = [(torch.randn(2, 4), torch.randn(3, 4)) for _ in range(2)]
    handover = Handover(more=(("deep", 2),))
    rows = handover.take({"pooler_output": (first, second), "deep": deep})
    assert list(rows) == ["embeddings", "deep.0", "deep.1"] == list(handover.names)
    assert torch.equal(rows["embeddings"], torch.cat([first, second]))
    assert torch.equal(rows["deep.1"], torch.cat(deep[1]))
    given = handover.give(rows)
    assert torch.equal(given.pooler_output[0], rows["embeddings"])
    assert [torch.equal(level[0], rows[f"deep.{n}"]) for n, level in enumerate(given["deep"])] == [True, True]
    assert given.read == ["pooler_output", "deep"] and given.last_hidden_state is None


def test_one_tensor_stays_one() -> None:
    rows = Handover(listed=False).take({"pooler_output": torch.randn(2, 3, 4)})
    assert rows["embeddings"].shape == (6, 4)
    assert Handover(listed=False).give(rows).pooler_output.shape == (6, 4)


def test_rows_that_all_pictures_share_get_the_sum_of_their_gradients() -> None:
    """Two decoders, with two pictures and with one, of four tokens each; five shared rows travel in two tensors."""
    shared = torch.randn(5, 3, requires_grad=True)
    handover = Handover(shared=(("indicators", 5, 2),))
    output = {"pooler_output": (torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)), "indicators": shared}
    rows = handover.take(output, [4, 4, 4])
    weights = torch.randn(2, 5, 3)
    for weight, own in zip(weights, (slice(0, 8), slice(8, 12)), strict=True):
        found = handover.give({name: tensor[own] for name, tensor in rows.items()}).indicators
        assert torch.equal(found, shared)
        (found * weight).sum().backward(retain_graph=True)
    assert torch.allclose(shared.grad, weights.sum(0))


@pytest.mark.slow
def test_unused_layers_are_those_of_the_whole_tower() -> None:
    """CLIP's last layer, whose states LLaVA passes over, though the twin's tower has four layers."""
    config = LlavaConfig()
    contract = find_contract(config)
    layers = config.vision_config.num_hidden_layers
    assert contract.structure.vision_depth == layers > 20
    last = f"model.vision_tower.encoder.layers.{layers - 1}."
    assert sum(name.startswith(last) for name in contract.unused) == 16
    others = {name for name in contract.unused if not name.startswith(last)}
    assert others == {"model.vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.bias"}
    assert contract.dummy.tokens == (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def test_what_is_handed_over_and_how() -> None:
    assert find_contract(make_config("qwen3_omni")).handover.more == (("deepstack_features", 2),)
    assert find_contract(make_config("ovis2")).handover.shared == (("visual_indicator_features", 5, 2),)
    assert find_contract(make_config("internvl")).handover.listed is False
    assert "model.image_newline" in find_contract(make_config("llava_next")).structure.vision


def test_ranks_that_share_pictures_have_even_shares() -> None:
    """Whatever the heads: so a planned layout may have them."""
    config = make_config("internvl")
    asked = resolve_part("vision", PartConfig("model", "sequence", 3))
    assert asked.ulysses == 3 and WholeTower(config, find_contract(config)).uneven_axes(asked) == ()


def test_styles_that_plans_leave_out() -> None:
    norms = {f"model.language_model.layers.*.self_attn.{p}_norm" for p in "qk"}
    assert set(find_contract(make_config("qwen3_omni")).tensor_plan or ()) == norms
    assert find_contract(make_config("internvl")).tensor_plan == {}
    assert find_contract(make_config("minicpmv4_6")).tensor_plan == {}


@pytest.mark.families
def test_families_without_the_contract_are_known_by_name() -> None:
    """Canary: whether another version of transformers gives one of them the contract, or takes it from one."""
    found = set()
    for kind, model in AutoModelForImageTextToText._model_mapping.items():
        if CONTRACT not in inspect.signature(model.forward).parameters:
            found.add(kind.model_type)
    assert found == WITHOUT_CONTRACT & set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


SIZES = ((90, 40), (50, 64), (28, 28))


def make_preprocessor(folder: Path) -> Preprocessor:
    processor = load_family(str(folder)).processor
    media = ModelMedia(
        load_image_processor(str(folder)),
        processor.image_token_id,
        processor.image_tokens,
        processor.patches,
        written=(processor.placeholder, processor.written),
        about=processor.about(),
        image_arguments=processor.image_arguments,
        frame_patches=processor.frame_patches,
    )
    return Preprocessor(load_tokenizer(str(folder)), media, DataConfig())


def make_pictures(folder: Path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(len(SIZES))]
    for path, (width, height) in zip(paths, SIZES, strict=True):
        Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_and_pixels_are_those_of_the_familys_processor(name: str, tmp_path: Path) -> None:
    library = save_processor(name, tmp_path)
    paths = make_pictures(tmp_path)
    shown = tuple(path for path in paths)
    turns = (Turn("user", (shown[0], "What is in", *shown[1:], " the picture?")), Turn("assistant", ("A red square.",)))
    sample = make_preprocessor(tmp_path)(Record("set", 1, "line 1", turns))
    placeholder = MAKERS[name][2]
    text = (
        f"<|im_start|>user\n{placeholder}What is in{placeholder}{placeholder} the picture?<|im_end|>\n"
        "<|im_start|>assistant\nA red square.<|im_end|>\n"
    )
    pictures = [Image.open(path).convert("RGB") for path in paths]
    wanted = library(images=pictures, text=text, return_tensors="pt", add_special_tokens=False)
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    kinds = (sample.input_ids == load_family(str(tmp_path)).processor.image_token_id).astype(int)
    assert np.array_equal(sample.mm_token_type_ids, kinds)
    forms = [form for form in sample.grids if isinstance(form, ProcessorOutput)]
    assert sum(form.tokens for form in forms) == kinds.sum()
    pairs = zip(forms, sample.pixels, strict=True)
    found = joined([unpack(form, torch.from_numpy(pixels), torch.float32) for form, pixels in pairs])
    for argument, tensor in found.items():
        assert torch.equal(tensor, wanted[argument].to(tensor.dtype)), argument
    assert sample.target_tokens > 0


@pytest.mark.parametrize("name", MAKERS)
def test_lengths_come_from_headers(name: str, tmp_path: Path) -> None:
    save_processor(name, tmp_path)
    shown = tuple(path for path in make_pictures(tmp_path))
    record = Record("set", 1, "line 1", (Turn("user", (*shown, "What?")), Turn("assistant", ("Red.",))))
    preprocess = make_preprocessor(tmp_path)
    sample, length = preprocess(record), preprocess.measure(record)
    assert (length.text, length.vision) == (len(sample.input_ids), int(sample.mm_token_type_ids.sum()))
    assert (length.targets, length.pictures) == (sample.target_tokens, len(SIZES))
    assert length.encoded_bytes == sum(path.stat().st_size for path in shown)
    layouts = [load_family(str(tmp_path)).tower.image_layout(form) for form in sample.grids]
    tiles = sum(prod(form.pixels[0][1][:-3]) for form in sample.grids)
    assert length.patches == tiles * (SIDE // 7) ** 2 == sum(layout.patches for layout in layouts)
    assert length.squares == tiles * (SIDE // 7) ** 4
    if tiles == len(SIZES):  # a layout takes a picture whole, whatever its tiles
        assert length.squares == sum(patches**2 for layout in layouts for patches in layout.frame_lengths)


def test_a_processor_that_lacks_what_it_needs_is_told(tmp_path: Path) -> None:
    save_processor("llava_next", tmp_path)
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="image processor"):
        make_preprocessor(tmp_path)(Record("set", 1, "line 1", (Turn("user", ("Hi",)), Turn("assistant", ("Ho",)))))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the library's processor can be made here")
def test_a_processor_that_needs_another_package_is_named(tmp_path: Path) -> None:
    save_processor("llava_next", tmp_path)
    make_config("mistral3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"PixtralProcessor cannot be made from this directory: ImportError: .*Torchv"):
        load_family(str(tmp_path)).processor.load()


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_some_of_each(name: str) -> None:
    config = make_config(name)
    model = without_weights(config)
    structure = find_structure(model)
    for parts in (find_text_parts(model, structure, config.get_text_config()), find_vision_parts(model, structure)):
        layers = list(model.get_submodule(parts.path).children())
        assert len(parts.kinds) == len(layers)
        for layer in layers:
            inside = dict(layer.named_modules()).keys()
            assert inside & set(parts.projections) and inside & set(parts.mlp)
            assert not any("down_proj" in name or "fc2" in name for name in parts.mlp)


def test_layers_of_one_kind_do_the_same_work() -> None:
    config = make_config("qwen3_5_moe")
    model = without_weights(config)
    parts = find_text_parts(model, find_structure(model), config.get_text_config())
    assert parts.kinds == ("linear_attention with experts",) * 3 + ("full_attention with experts",)
    assert {"linear_attn.in_proj_qkv", "self_attn.q_proj"} <= set(parts.projections)
    assert "mlp.experts" in parts.mlp
    assert experts_of(parts, model) == tuple(f"model.language_model.layers.{n}.mlp.experts" for n in range(4))


def test_layers_that_have_no_such_modules_keep_nothing() -> None:
    with torch.device("meta"):
        some = nn.ModuleDict({"self_attn": nn.ModuleDict({"q": nn.Linear(2, 2)})})
    assert _matrices([some, nn.ModuleDict({"conv": nn.Identity()})]) == ((), ())


def test_arguments_come_back_as_they_were() -> None:
    random = np.random.default_rng(0)
    picture = {
        "pixel_values": random.standard_normal((1, 3, 5, 7)).astype(np.float32),
        "image_sizes": np.array([[5, 7]]),
        "pixel_attention_mask": random.integers(0, 2, (1, 5, 7)).astype(bool),
        "high_resolution": random.standard_normal((2, 11)).astype(np.float32),
        "left_out": None,
    }
    rows, form = pack(picture, tokens=4, values=8, written="<image>")
    assert rows.shape == (-(-(3 * 5 * 7 + 22) // 8), 8) and rows.dtype == np.float32
    assert (form.rows, form.tokens, form.written) == (len(rows), 4, "<image>")
    assert hash(form) == hash(pack(picture, tokens=4, values=8, written="<image>")[1])
    back = unpack(form, torch.from_numpy(rows), torch.float64)
    assert back.keys() == picture.keys() - {"left_out"}
    for name, tensor in back.items():
        assert np.array_equal(tensor.numpy(), picture[name]), name
    assert back["pixel_values"].dtype == torch.float64 and back["image_sizes"].dtype == torch.int64
    assert set(arrays_of(form)) == {"image_sizes", "pixel_attention_mask"}


def test_a_mask_that_hides_nothing_takes_no_room() -> None:
    pixels = np.zeros((1, 2, 3, 64, 64), np.float32)
    _, form = pack({"pixel_values": pixels, "pixel_attention_mask": np.ones((1, 2, 64, 64), np.int64)}, 4, 8)
    assert sum(len(raw) for *_, raw in form.arrays) == 8
    assert np.array_equal(arrays_of(form)["pixel_attention_mask"], np.ones((1, 2, 64, 64), np.int64))


@pytest.mark.parametrize(
    ("picture", "patches"),
    [
        ({"pixel_values": (1, 5, 3, 28, 28)}, (16,) * 5),
        ({"pixel_values": (1, 3, 14, 49)}, (14,)),
        ({"pixel_values": (1, 3, 30, 28)}, (16,)),  # as convolutions do, without what is less than a patch
        ({"pixel_values": (1, 3, 28, 28), "pixel_values_local": (2, 3, 14, 14)}, (16, 4, 4)),
        ({"pixel_values": (24, 147), "image_grid_thw": [[1, 4, 6]]}, (24,)),
        ({"pixel_values": (24, 3, 7, 7), "image_grid_hw": [[4, 6]]}, (24,)),
        ({"pixel_values": (24, 147), "image_grid_thw": [[2, 2, 4], [1, 2, 4]]}, (8, 8, 8)),
        ({"pixel_values": (1, 16, 147), "spatial_shapes": [[4, 2]]}, (16,)),  # filled up to as many rows
        ({"pixel_values": (1, 6, 28, 28)}, (32,)),
    ],
)
def test_patches_of_each_tile(picture: dict[str, tuple[int, ...] | list[list[int]]], patches: tuple[int, ...]) -> None:
    """Patches of 3 × 7 × 7 values."""
    arrays = {n: np.zeros(v, np.float32) if isinstance(v, tuple) else np.array(v) for n, v in picture.items()}
    _, form = pack(arrays, tokens=4, values=147)
    assert frame_patches(form, 3, 7) == patches


def test_a_prefix_ends_before_the_first_token_that_is_learned() -> None:
    """The token that predicts the first of an answer is the last before it. A sample without answers is all prefix."""
    targets = torch.tensor([-100, -100, 7, 8, -100, 9, -100, -100, -100, 5, -100])
    found = find_prefixes(targets, [6, 2, 3])
    assert found.tolist() == [True, True, True, False, False, False, True, True, True, True, False]


def test_the_plain_models_prefix_is_the_same() -> None:
    """Also where a label is the sample's first token, which nothing predicts."""
    config, targets = SimpleNamespace(model_type="paligemma"), torch.tensor([-100, -100, 7, -100, 9, -100])
    for first in (-100, 5):
        types = token_types(config, torch.zeros(1, 6), torch.cat([torch.tensor([first]), targets[:-1]])[None])
        assert types.tolist() == [[0, 0, 0, 1, 1, 1]]
        assert (types[0] == 0).tolist() == find_prefixes(targets, [6]).tolist()


def test_what_is_small_stays_as_it_is() -> None:
    for name in FAMILIES:
        given = make_config(name)
        found = shrink(given).to_dict()
        for section in ("text_config", "vision_config"):
            before = given.to_dict()[section]
            assert {key: found[section][key] for key in before} == before, name


def test_a_large_decoder_keeps_a_layer_of_each_kind() -> None:
    config = Glm4vMoeConfig()
    text, small = config.text_config, shrink(config).text_config
    assert text.num_hidden_layers > 40 and small.num_hidden_layers == MOST_LAYERS
    assert small.first_k_dense_replace == 1 < small.num_hidden_layers
    assert small.n_routed_experts == MOST_EXPERTS and small.vocab_size == VOCABULARY
    assert small.hidden_size == small.num_attention_heads * (text.hidden_size // text.num_attention_heads)


def test_special_tokens_move_into_the_small_vocabulary_each_to_its_own() -> None:
    config = Qwen3VLConfig()
    small = shrink(config)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    moved = [getattr(small, name) for name in names]
    assert len(set(moved)) == 4 and max(moved) < VOCABULARY
    assert small.vision_config.out_hidden_size == small.text_config.hidden_size
    assert small.vision_config.depth == config.vision_config.depth


def test_a_tower_is_cut_where_that_is_asked_for() -> None:
    config = Qwen3VLConfig()
    small = shrink(config, towers=True)
    assert small.vision_config.depth == MOST_LAYERS < config.vision_config.depth
    chosen = small.vision_config.deepstack_visual_indexes
    assert len(chosen) == len(config.vision_config.deepstack_visual_indexes) and max(chosen) < MOST_LAYERS
    assert shrink(LlavaConfig(vision_feature_layer=[-2, 20]), towers=True).vision_feature_layer == [-2, 3]


@pytest.mark.parametrize(
    ("name", "library"), [("glm4v", Glm4vProcessor), ("glm4v_moe", Glm4vProcessor), ("glm46v", Glm46VProcessor)]
)
def test_the_prompt_of_a_step_is_the_librarys(name: str, library: Any) -> None:
    processor = glm4v(make_config(name)).processor
    assert processor.step_tokens == (BEGIN, END)
    for first in (0.0, 0.96, 12.5):
        before, behind = processor.step_text(first + 0.25, first)
        theirs = library.replace_frame_token_id(SimpleNamespace(image_token="I"), first, 3)
        assert f"{before}<|begin_of_image|>III<|end_of_image|>{behind}" == theirs


def test_the_plain_model_has_one_placeholder_for_both() -> None:
    inputs = {"input_ids": torch.tensor([[5, IMAGE, VIDEO, 7]]), "second_per_grid_ts": torch.tensor([1.0])}
    plain = glm4v(make_config("glm4v")).processor.plain_inputs(inputs)
    assert plain.keys() == {"input_ids"} and plain["input_ids"].tolist() == [[5, IMAGE, IMAGE, 7]]


GRIDS = [(1, 6, 10), (1, 4, 4)]
DIVISIBLE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni",
    "glm4v", "glm46v", "glm4v_moe",
)  # fmt: skip


def _cut(chunks: tuple[Chunk, ...], family, model, inputs: TowerInputs) -> dict[str, Tensor]:  # noqa: ANN001
    """What all chunks make one behind another, each with the states of the one before alone."""
    found: dict[str, Tensor] = {}
    hidden = None
    for chunk in chunks:
        own = family.tower.run(model, chunk, TowerInputs(inputs.pixels, inputs.positions, inputs.windows, inputs.frames,
                                                         hidden=hidden))  # fmt: skip
        hidden = own.pop(HIDDEN_STATES, None)
        assert not found.keys() & own.keys()
        found |= own
    return found


@pytest.mark.parametrize("name", DIVISIBLE)
def test_chunks_one_behind_another_make_what_the_whole_makes(name: str, tmp_path: Path) -> None:
    """Canary as well: a forward that is left at the end of a chunk leaves nothing behind in the library, so that the
    whole tower runs afterwards as before."""
    source = str(save_family(name, tmp_path / "model"))
    family = load_family(source)
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    AttentionInterface.register("flash_dhp_test", segment_attention)
    family.tower.use_attention(model, "flash_dhp_test")
    layouts = [family.tower.image_layout(grid) for grid in GRIDS]
    windows, frames = (
        plan_segments([n for layout in layouts for n in getattr(layout, kind)], torch.device("cpu"))
        for kind in ("window_lengths", "frame_lengths")
    )
    positions = torch.cat([layout.positions for layout in layouts])
    inputs = TowerInputs(torch.randn(len(positions), family.tower.patch_dim), positions, windows, frames)
    config = deepcopy(model.config.to_dict())
    whole = family.tower.encode(model, inputs)
    layers = len(family.tower.layers.kinds)
    for cuts in [(at,) for at in range(1, layers)] + [tuple(range(1, layers))]:
        ranges = [range(first, end) for first, end in pairwise((0, *cuts, layers))]
        found = _cut(chunks_of(ranges, family.tower.whole), family, model, inputs)
        assert found.keys() == whole.keys()
        for key, rows in whole.items():
            assert torch.equal(found[key], rows), (cuts, key)
    after = family.tower.encode(model, inputs)
    assert all(torch.equal(after[key], rows) for key, rows in whole.items())
    assert model.config.to_dict() == config


@pytest.mark.parametrize("name", ["llava_clip", "internvl", "kimi_k25"])
def test_a_tower_that_runs_as_a_whole_alone_is_not_cut(name: str, tmp_path: Path) -> None:
    """Of its own family, by contract, and of this kind but for its embedding."""
    tower = load_family(str(save_family(name, tmp_path / "model"))).tower
    whole, cut = (
        resolve_part("vision", PartConfig("a/model", kind, actors)) for kind, actors in (("none", 1), ("pipeline", 2))
    )
    tower.check(whole)
    ways = "data, sequence or tensor" if tower.tensor_plan else "data or sequence"
    told = rf"vision\.pipeline=2 with a .* are not known here.* and vision\.parallelism={ways}$"
    with pytest.raises(ConfigError, match=told):
        tower.check(cut)


def test_a_row_of_the_embedding_that_the_model_itself_reads_is_in_each_slice(tmp_path: Path) -> None:
    decoder = load_family(str(save_family("gemma4", tmp_path / "model"))).decoder
    tensor, text = resolve_part("text", PartConfig("a/model", "tensor", 2)), decoder.config.text_config
    rows = text.vocab_size // 2
    for pad in (0, rows - 1):
        text.pad_token_id = pad
        decoder.check(tensor)
    text.pad_token_id = rows
    with pytest.raises(ConfigError, match=rf"pad_token_id={rows}: its code takes that row"):
        decoder.check(tensor)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_each_weight_of_the_tower_is_in_one_stage(name: str, tmp_path: Path) -> None:
    source = str(save_family(name, tmp_path / "model"))
    tower = load_family(source).tower
    model = AutoModelForImageTextToText.from_pretrained(source)
    layers = len(tower.layers.kinds)
    chunks = chunks_of([range(0, 1), range(1, layers)], tower.whole)
    own = [name for name, _ in model.named_parameters() if any(name.startswith(f"{m}.") for m in tower.modules)]
    for weight in own:
        holders = [c for c in chunks if not any(weight.startswith(f"{m}.") for m in tower.absent((c,)))]
        assert len(holders) == 1, (weight, len(holders))


def test_patches_are_the_image_cut_up_and_put_together_again(llava_model: str) -> None:
    family = load_family(llava_model)
    images = np.random.default_rng(0).standard_normal((2, 3, 56, 56)).astype(np.float32)
    rows, grid = family.processor.patches({"pixel_values": images})
    assert rows.shape == (2 * 16, 3 * 14 * 14) and grid == (2, 4, 4)
    assert np.array_equal(rows[0], images[0, :, :14, :14].reshape(-1))
    assert np.array_equal(rows[16 + 5], images[1, :, 14:28, 14:28].reshape(-1))
    back = family.processor.plain_inputs({"pixel_values": torch.from_numpy(rows)})["pixel_values"]
    assert torch.equal(back, torch.from_numpy(images))


def test_encode_equals_the_models_own_features(llava_model: str) -> None:
    family = load_family(llava_model)
    model = AutoModelForImageTextToText.from_pretrained(llava_model, dtype=torch.float64)
    images = torch.randn(3, 3, 56, 56, dtype=torch.float64)
    rows, _ = family.processor.patches({"pixel_values": images.numpy()})
    expected = torch.cat(model.model.get_image_features(images, return_dict=True).pooler_output)
    found = family.tower.encode(model, TowerInputs(torch.from_numpy(rows).double(), torch.empty(0)))["embeddings"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # rows are float32
    assert len(found) == 3 * family.processor.image_tokens((1, 4, 4))


def test_what_no_output_depends_on_is_frozen(llava_model: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(llava_model)
    load_family(llava_model).tower.freeze_unused(model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    model(
        input_ids=torch.tensor([[5, *[505] * 16, 7]]), pixel_values=torch.randn(1, 3, 56, 56), labels=None
    ).logits.sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert frozen == without and any("layers.2" in name for name in frozen)


def test_another_choice_of_features_is_left_to_the_contract(llava_model: str, tmp_path: Path) -> None:
    config = load_family(llava_model).config
    config.vision_feature_select_strategy = "full"
    config.save_pretrained(tmp_path)
    family = load_family(str(tmp_path))
    assert isinstance(family.tower, WholeTower)
    assert family.tower.dummy_form.tokens == 16 + 1  # the class token too


def test_a_processed_picture_has_the_towers_size(llava_model: str) -> None:
    from PIL import Image

    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    output = processor(images=[Image.new("RGB", (90, 70))], return_tensors="np")
    rows, grid = load_family(llava_model).processor.patches(output)
    assert grid == (1, 4, 4) and rows.shape == (16, 588)


QWEN_GRIDS = [(1, 2, 2), (1, 6, 10), (1, 4, 4), (1, 10, 14), (2, 6, 4)]  # the last one is a video's: two frames


@pytest.fixture(scope="module")
def family(made_model: str) -> Family:
    return load_family(made_model)


@pytest.mark.parametrize("grid", QWEN_GRIDS, ids=str)
def test_layout_covers_the_image_once(family: Family, grid: tuple[int, int, int]) -> None:
    layout = family.tower.image_layout(grid)
    t, h, w = grid
    assert layout.patches == t * h * w == sum(layout.window_lengths) == sum(layout.frame_lengths)
    assert sorted(layout.order.tolist()) == list(range(family.processor.image_tokens(grid)))
    assert sorted(layout.patch_order().tolist()) == list(range(t * h * w))
    assert max(layout.window_lengths) <= 16  # window_size 56 = 4 × 4 patches of 14


@pytest.mark.parametrize("grids", [QWEN_GRIDS[:1], QWEN_GRIDS[1:2], QWEN_GRIDS], ids=["one window", "one image", "all"])
def test_encode_equals_the_models_own_features_of_qwen_vl(family: Family, made_model: str, grids: list) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made_model, dtype=torch.float64)
    pixels = [torch.randn(t * h * w, family.tower.patch_dim, dtype=torch.float64) for t, h, w in grids]
    expected = model.model.get_image_features(torch.cat(pixels), torch.tensor(grids)).pooler_output

    AttentionInterface.register("flash_dhp_test", segment_attention)
    family.tower.use_attention(model, "flash_dhp_test")
    layouts = [family.tower.image_layout(grid) for grid in grids]
    ordered = torch.cat([p[layout.patch_order()] for p, layout in zip(pixels, layouts, strict=True)])
    plans = [
        plan_segments([n for layout in layouts for n in getattr(layout, kind)], torch.device("cpu"))
        for kind in ("window_lengths", "frame_lengths")
    ]
    positions = torch.cat([layout.positions for layout in layouts])
    found = family.tower.encode(model, TowerInputs(ordered, positions, *plans))
    rows = found["embeddings"].split([len(layout.order) for layout in layouts])
    for mine, layout, theirs in zip(rows, layouts, expected, strict=True):
        torch.testing.assert_close(mine[torch.argsort(layout.order)], theirs, rtol=1e-10, atol=1e-12)


def test_the_tower_calls_attention_once_a_layer_with_our_objects(family: Family, made_model: str) -> None:
    """Two canaries: a name with "flash" gives one call a layer, and the plan object arrives as it was given."""
    model = AutoModelForImageTextToText.from_pretrained(made_model)
    seen = []

    def spy(*arguments, **named):
        seen.append(named["cu_seq_lens_q"])
        return segment_attention(*arguments, **named)

    AttentionInterface.register("flash_dhp_spy", spy)
    family.tower.use_attention(model, "flash_dhp_spy")
    layout = family.tower.image_layout((1, 6, 10))
    windows, frames = (plan_segments(n, torch.device("cpu")) for n in (layout.window_lengths, layout.frame_lengths))
    family.tower.encode(model, TowerInputs(torch.randn(60, family.tower.patch_dim), layout.positions, windows, frames))
    assert [plan is frames for plan in seen] == [False, True, False, True]  # fullatt_block_indexes [1, 3]
    assert [plan is windows for plan in seen] == [True, False, True, False]


def test_positions_equal_the_models_own(family: Family, made_model: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(made_model)
    image = family.processor.image_token_id
    ids = torch.tensor([[5, 6, *[image] * 6, 7, 8, 9], [5, *[image] * 4, 6, 7, 0, 0, 0, 0]])
    kinds = (ids == image).long()
    grids = torch.tensor([[1, 4, 6], [1, 4, 4]])
    found = family.processor.position_ids(ids, kinds, grids, torch.tensor([11, 7]))
    for row, (length, grid) in enumerate(((11, grids[:1]), (7, grids[1:]))):
        alone, _ = model.model.get_rope_index(ids[row : row + 1, :length], kinds[row : row + 1, :length], grid)
        assert torch.equal(found[:, row, :length], alone[:, 0])
        assert not found[:, row, length:].any()


def test_head_counts_come_from_the_configuration(family: Family) -> None:
    assert (family.tower.heads, family.decoder.heads, family.decoder.kv_heads) == (4, 8, 4)
    assert family.tower.merge_unit == 4
    assert family.tower.patch_dim == 3 * 2 * 14 * 14


def test_what_the_decoder_runs_before_its_layers_is_its_first_stages() -> None:
    """A projector that stands between the tower and the decoder, as Llama 4's."""
    config, projector = make_config("internvl"), "model.multi_modal_projector"
    found = find_contract(config)
    structure = with_called(found.structure, [projector])
    assert projector in structure.text and projector not in structure.vision and projector in found.structure.vision
    decoder = ContractDecoder(config, replace(found, structure=structure, entrance=(projector,)))
    first, last = Chunk(range(1), True, False), Chunk(range(1, 3), False, True)
    assert projector not in decoder.absent([first]) and projector in decoder.absent([last])
