"""Patches, frames and positions of towers and decoders."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaConfig, Qwen2_5_VLConfig, Qwen2Config
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from dhp.core.batch import PositionRange
from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.errors import ConfigError, ModelError
from dhp.models.config_file import _changed, change_positions, find_positions
from dhp.models.lora import TokenDropout
from dhp.models.processor_files import _KINDS, FrameSize, find_frame_size
from dhp.models.registry import load_family
from dhp.models.tower import Kernel, cubic, interpolate, linear, project_as_product
from dhp.tiny.tiny_model import make_family
from tests.helpers.tiny_families import SIDE, make_config

CASES = [
    (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),  # patches that arrive one by one
    (nn.Conv2d(3, 8, 4, 4), (2, 3, 12, 8)),  # whole images
    (nn.Conv2d(3, 8, (4, 2), (4, 2)), (2, 3, 8, 8)),
]


@pytest.mark.parametrize(("convolution", "shape"), CASES, ids=["one patch", "images", "oblong"])
def test_the_product_is_the_convolution_and_so_are_its_gradients(convolution: nn.Module, shape: tuple) -> None:
    convolution = convolution.double()
    pixels = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(2):
        output = convolution(pixels)
        gradients = torch.autograd.grad((output * output.detach().cos()).sum(), [pixels, *convolution.parameters()])
        found.append((output.detach(), *gradients))
        project_as_product(convolution)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_names_and_parameters_stay() -> None:
    convolution = nn.Conv2d(3, 8, 4, 4)
    before = {name: id(p) for name, p in convolution.named_parameters()}
    project_as_product(convolution)
    assert {name: id(p) for name, p in convolution.named_parameters()} == before
    assert type(convolution) is nn.Conv2d


@pytest.mark.parametrize("more", [{"stride": 2}, {"padding": 1}, {"dilation": 2}])
def test_patches_that_overlap_or_leave_gaps_are_refused(more: dict) -> None:
    with pytest.raises(ValueError, match="its stride must be its kernel"):
        project_as_product(nn.Conv2d(3, 8, **({"kernel_size": 4, "stride": 4} | more)))


IMAGES, VIDEOS = [(1, 6, 10), (1, 4, 4)], [(3, 4, 8), (1, 2, 2)]
GRIDS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "kimi_k25"), IMAGES + VIDEOS)
GRIDS["llava_clip"] = [(1, SIDE // 7, SIDE // 7)]


@pytest.mark.parametrize("name", GRIDS)
def test_they_are_those_of_the_layout(name: str, tmp_path: Path) -> None:
    make_config(name).save_pretrained(tmp_path)
    family = load_family(str(tmp_path))
    for grid in GRIDS[name]:
        layout, found = family.tower.image_layout(grid), family.processor.frame_patches(grid)
        assert found == layout.frame_lengths and sum(found) == layout.patches


BOUNDS = {"shortest_edge": 4096, "longest_edge": 2_000_000}
KINDS = {"qwen3_vl": "Qwen3VLVideoProcessor", "glm4v": "Glm4vVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


def with_video_file(folder: Path, kind: str, nested: bool = False, **more: Any) -> Path:
    content = {"video_processor_type": kind, "size": BOUNDS, **more}
    name, content = ("processor", {"video_processor": content}) if nested else ("video_preprocessor", content)
    (folder / f"{name}_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The library's class of a kind, which imports torchvision and does not run it here; its resize says the size."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = ModuleType("functional")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2.functional", ModuleType("functional"))
    monkeypatch.setattr(BaseVideoProcessor, "resize", lambda self, image, size, resample: size)

    def find(kind: str) -> Any:
        family = {"Qwen3VLVideoProcessor": "qwen3_vl", "Qwen2VLVideoProcessor": "qwen2_vl"}.get(
            kind, kind[:-14].lower()
        )
        return getattr(import_module(f"transformers.models.{family}.video_processing_{family}"), kind)

    return find


def theirs(kind: Any, rule: FrameSize, frames: int, size: tuple[int, int]) -> tuple[int, int] | str:
    """What the library's class resizes to."""
    own = object.__new__(kind)
    own.max_video_tokens = rule.capped
    bounds = SizeDict(shortest_edge=rule.shortest, longest_edge=rule.longest)
    capped = {"cap_pixels_per_frame": True} if rule.capped else {}
    clip = torch.empty(1, frames, 3, size[1], size[0], device="meta")
    try:
        found = kind.resize(own, clip, bounds, None, factor=rule.side, temporal_factor=rule.group, **capped)
    except ValueError as error:
        return str(error)
    return found.width, found.height


@pytest.mark.parametrize(("name", "capped"), [*product(KINDS, [None]), ("qwen3_vl", 20), ("qwen2_5_vl", 20)])
def test_sizes_are_those_of_the_librarys_classes(
    name: str, capped: int | None, tmp_path: Path, library: Callable[[str], Any]
) -> None:
    more = {} if capped is None else {"cap_pixels_per_frame": True, "max_video_tokens": capped}
    folder = with_video_file(make_family(name, tmp_path / "m"), KINDS[name], **more)
    rule = find_frame_size(str(folder), AutoConfig.from_pretrained(folder))
    assert rule is not None and (rule.shortest, rule.longest, rule.capped) == (4096, 2_000_000, capped)
    sizes = [(1280, 720), (64, 64), (3, 500), (300, 200), (1920, 1080), (5, 4000)]
    for frames, size in product((2, 5, 16, 79, 80, 400), sizes):
        try:
            found: Any = rule(frames, size)
        except ValueError as error:
            found = str(error)
        assert found == theirs(library(rule.kind), rule, frames, size), (frames, size)


@pytest.mark.parametrize(("kind", "known"), _KINDS.items())
def test_what_a_file_does_not_say_is_the_librarys(kind: str, known: Any, library: Callable[[str], Any]) -> None:
    own = library(kind)
    bounds = (own.size["shortest_edge"], own.size["longest_edge"], getattr(own, "max_video_tokens", 0))
    assert known[1:] == bounds


def test_where_the_rule_is_read(tmp_path: Path) -> None:
    folder = make_family("qwen3_vl", tmp_path / "m")
    find = lambda: find_frame_size(str(folder), AutoConfig.from_pretrained(folder))
    assert find() is None
    with_video_file(folder, "OtherVideoProcessor")
    assert find() is None
    with_video_file(folder, "Qwen3VLVideoProcessor", min_pixels=8192)
    assert str(find()) == "8192 to 2000000 pixels of all frames of a clip"
    with_video_file(folder, "Qwen2VLVideoProcessor", nested=True)
    assert find() == FrameSize("Qwen2VLVideoProcessor", False, 4096, 2_000_000, 8, 2)


@pytest.mark.parametrize("file", ["processor_config.json", "video_preprocessor_config.json"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{broken")
    with pytest.raises(ModelError, match=f"{file} is no JSON .*Copy the file again"):
        find_frame_size(str(tmp_path), AutoConfig.for_model("qwen3_vl"))


SQUARE_GRIDS = torch.tensor([(1, 2, 2), (1, 6, 10), (1, 12, 14), (2, 6, 4), (1, 2, 30), (3, 8, 6)])
KERNELS = [
    pytest.param(linear, {"mode": "bilinear", "align_corners": True}, id="linear"),
    pytest.param(cubic, {"mode": "bicubic", "align_corners": False}, id="cubic"),
]


def positions() -> torch.Tensor:
    sizes = [grid[1:].expand(int(grid.prod()), 2) for grid in SQUARE_GRIDS]
    return torch.cat([get_vision_position_ids(SQUARE_GRIDS, 2), torch.cat(sizes)], dim=1)


@pytest.mark.parametrize("side", [5, 48])
@pytest.mark.parametrize(("kernel", "mode"), KERNELS)
def test_it_equals_the_librarys_to_the_bit(kernel: Kernel, mode: dict[str, Any], side: int) -> None:
    theirs = get_vision_interpolation_indices_and_weights(SQUARE_GRIDS, side, spatial_merge_size=2, **mode)
    assert all(torch.equal(mine, other) for mine, other in zip(interpolate(positions(), side, kernel), theirs))


@pytest.mark.parametrize("kernel", [linear, cubic])
def test_a_dummy_has_a_place_in_the_table(kernel: Kernel) -> None:
    indices, weights = interpolate(torch.zeros(4, 4, dtype=torch.long), 5, kernel)
    assert indices.min() >= 0 and indices.max() < 25
    assert torch.allclose(weights.sum(1), torch.ones(4))


def llava(**rotary: Any) -> LlavaConfig:
    return LlavaConfig(
        text_config=Qwen2Config(max_position_embeddings=1000, rope_parameters={"rope_theta": 1e4, **rotary})
    )


@pytest.mark.parametrize(
    ("rotary", "count"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}, 1000),
    ],
)
def test_a_factor_stretches_them(rotary: dict[str, Any], count: int) -> None:
    assert find_positions(llava(**rotary)) == PositionRange(count, of_pictures=True)


def test_those_that_turn_by_the_length_have_no_end() -> None:
    assert find_positions(llava(rope_type="dynamic", factor=2.0)) is None


def test_rows_and_columns_share_positions() -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(text_config={"max_position_embeddings": 300, "rope_parameters": rotary})
    assert find_positions(config) == PositionRange(300, of_pictures=False)


def test_layers_of_several_kinds_know_what_the_furthest_knows() -> None:
    config = llava()
    config.text_config.rope_parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    assert find_positions(config) == PositionRange(8000, of_pictures=True)


@pytest.fixture
def folder(made_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_model, tmp_path / "model"))


def test_a_raised_base_turns_slower_and_nothing_else_changes(folder: Path, made_model: str) -> None:
    before = AutoConfig.from_pretrained(made_model).to_dict()
    change_positions(folder, rope_theta=5e5, max_positions=1 << 16)
    after = AutoConfig.from_pretrained(folder).to_dict()
    text = after["text_config"]
    assert (text["rope_parameters"]["rope_theta"], text["max_position_embeddings"]) == (5e5, 1 << 16)
    for told in (before, after):
        told["text_config"]["rope_parameters"].pop("rope_theta"), told["text_config"].pop("max_position_embeddings")
        told.pop("_name_or_path", None), told["text_config"].pop("_name_or_path", None)
    assert after == before
    plain, raised = (AutoModelForImageTextToText.from_pretrained(path) for path in (made_model, folder))
    slow, fast = (model.model.language_model.rotary_emb.inv_freq for model in (raised, plain))
    width = 2 * len(slow)
    assert torch.allclose(slow, 5e5 ** (-torch.arange(0, width, 2) / width)) and (slow[1:] < fast[1:]).all()


def test_what_is_not_named_stays(folder: Path) -> None:
    change_positions(folder, max_positions=9000)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    assert (text.rope_parameters["rope_theta"], text.max_position_embeddings) == (10000.0, 9000)


def test_layers_with_a_window_keep_their_base() -> None:
    both = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    changed = _changed(Path("m"), both, 1e7, None)
    assert changed["sliding_attention"] == both["sliding_attention"]
    assert changed["full_attention"]["rope_theta"] == 1e7


def test_yarn_goes_on_from_what_the_model_was_trained_with() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert _changed(Path("m"), yarn, None, 32768)["original_max_position_embeddings"] == 32768
    told = {**yarn, "original_max_position_embeddings": 4096}
    assert _changed(Path("m"), told, None, 32768) == told


def test_a_decoder_without_rotary_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="m: its decoder has no rotary positions"):
        _changed(Path("m"), None, 1e6, None)


KEYS = TokenKeys(keys_of([(5, 0, 200), (6, 0, 200)]))


def test_it_is_torchs_dropout_of_the_elements_that_it_draws() -> None:
    """Zeros, the others scaled so that the mean stays, and the gradient likewise."""
    states = torch.randn(2, 200, 64, dtype=torch.float64, requires_grad=True)
    module = TokenDropout(0.25, "a")
    with drawing(KEYS):
        output = module(states)
    kept = output != 0
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(output, states * kept / 0.75, rtol=1e-15, atol=0)
    gradient = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, states, gradient)
    torch.testing.assert_close(found, gradient * kept / 0.75, rtol=1e-15, atol=0)
    torchs = nn.Dropout(0.25)(torch.ones(1, dtype=torch.float64).expand(1000))
    assert torchs.unique().tolist() == [0, 1 / 0.75] == module_values(module)


def module_values(module: TokenDropout) -> list[float]:
    with drawing(KEYS):
        return module(torch.ones(400, 16, dtype=torch.float64)).unique().tolist()


def test_a_slice_of_columns_drops_what_the_whole_does() -> None:
    states, whole = torch.ones(400, 48), TokenDropout(0.5, "a")
    part, unmoved = TokenDropout(0.5, "a"), TokenDropout(0.5, "a")
    part.first_column = 32
    with drawing(KEYS):
        wanted = whole(states)[:, 32:]
        assert torch.equal(part(states[:, 32:]), wanted)
        assert not torch.equal(unmoved(states[:, 32:]), wanted)
        assert not torch.equal(TokenDropout(0.5, "b")(states), whole(states))


def test_neither_evaluation_nor_its_memory_draws() -> None:
    states, module = torch.ones(3, 8), TokenDropout(0.5, "a")
    assert module(states.to("meta")).shape == states.shape
    with drawing(KEYS), pytest.raises(ConfigError, match="is given 3 rows"):  # which shapes alone show
        module(states.to("meta"))
    assert module.eval()(states) is states


def test_tokens_that_are_not_known_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"of which nothing is known.*dhp\.core\.draws\.drawing"):
        TokenDropout(0.5, "a")(torch.ones(3, 8))
    with (
        drawing(KEYS),
        pytest.raises(
            ConfigError,
            match=r"lora\.dropout=0\.5 of a: it is given 3 rows where the part has 400 tokens.*lora\.dropout=0$",
        ),
    ):
        TokenDropout(0.5, "a")(torch.ones(3, 8))


def test_it_makes_no_copy_of_what_it_keeps_for_backward() -> None:
    """A byte an element, as torch's: whose mask it is."""
    saved: list[torch.Tensor] = []
    states = torch.ones(400, 64, requires_grad=True)
    with drawing(KEYS), torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one), lambda one: one):
        TokenDropout(0.5, "a")(states)
    assert sum(one.nbytes for one in saved) == states.numel()
