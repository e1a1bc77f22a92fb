"""What an export says besides its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from dhp.data.sample.lengths import tile_arguments
from dhp.data.sample.sample import area_bounds
from dhp.models.pretrained import load_image_processor
from dhp.models.processor_files import find_frame_size
from dhp.tiny.tiny_model import make_family
from dhp.trainer.checkpoint_export import _write_pictures, _write_stops, picture_settings

OTHER = "<|vision_pad|>"  # in the place of the tokenizer's eos


def folder_of(tiny_assets: Path, folder: Path, end: str, known: object) -> tuple[Path, list[int]]:
    """A model whose template ends answers with `end`; the numbers of its own end and of that."""
    shutil.copytree(tiny_assets / "model", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", end))
    (folder / "generation_config.json").write_text(json.dumps(known))
    return folder, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_end|>", OTHER])


@pytest.mark.parametrize("listed", [False, True])
def test_others_stop_where_the_answers_that_were_learned_end(tiny_assets: Path, tmp_path: Path, listed: bool) -> None:
    first, _ = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})[1]
    folder, (_, end) = folder_of(
        tiny_assets, tmp_path / "b", OTHER, {"eos_token_id": [first] if listed else first, "top_k": 3}
    )
    assert f"has {OTHER} among the tokens that stop" in _write_stops(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": [first, end], "top_k": 3}
    assert _write_stops(folder) == ""


def test_an_end_that_only_the_tokenizer_names_is_written_too(tiny_assets: Path, tmp_path: Path) -> None:
    """`generate` of transformers looks at generation_config.json alone."""
    folder, (end, other) = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": other}))
    assert _write_stops(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [other, end]


def test_a_model_without_a_tokenizer_stays_as_it_is(tiny_assets: Path, tmp_path: Path) -> None:
    folder, _ = folder_of(tiny_assets, tmp_path / "a", OTHER, {"eos_token_id": 1})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert _write_stops(folder) == ""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("qwen2_5_vl", {"max_pixels": 2048, "min_pixels": 512}),
        ("qwen3_vl", {"max_pixels": 2048}),
        ("internvl", {"max_tiles": 2}),
    ],
)
def test_the_librarys_processor_sees_pictures_as_training_did(
    tmp_path: Path, family: str, asked: dict[str, int], nested: bool
) -> None:
    folder = make_family(family, tmp_path / "m")
    if nested:
        file = folder / "preprocessor_config.json"
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(file.read_text())}))
        file.unlink()
    images = load_image_processor(str(folder))
    arguments = area_bounds(images, asked.get("min_pixels"), asked.get("max_pixels"))
    arguments |= tile_arguments(images, asked.get("max_tiles"))
    pictures = [Image.new("RGB", size) for size in ((300, 300), (8, 20), (400, 100))]
    wanted = [images(one, return_tensors="np", **arguments)["pixel_values"].shape for one in pictures]
    assert wanted != [images(one, return_tensors="np")["pixel_values"].shape for one in pictures]
    assert "processor_config.json" in _write_pictures(folder, asked)
    own = load_image_processor(str(folder))
    assert [own(one, return_tensors="np")["pixel_values"].shape for one in pictures] == wanted


def test_frames_are_bounded_in_the_video_processors_file_or_it_is_said(tmp_path: Path) -> None:
    of_frames, of_clip = (make_family(name, tmp_path / name) for name in ("qwen2_5_vl", "qwen3_vl"))
    asked = {"video_fps": 1.0, "video_max_pixels": 2048}
    assert "video_preprocessor_config.json read pictures as" in _write_pictures(of_frames, asked)
    rule = find_frame_size(str(of_frames), AutoConfig.from_pretrained(of_frames))
    assert rule is not None and (rule.clip, rule.shortest, rule.longest) == (False, 1024, 2048)
    told = "Qwen3VLVideoProcessor bounds all frames of a clip (1024 to 5000 pixels of all frames of a clip), and"
    own = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 1024, "longest_edge": 5000}}
    (of_clip / "video_preprocessor_config.json").write_text(json.dumps(own))
    assert f"{told} training had shortest_edge=1024, longest_edge=2048 for" in _write_pictures(of_clip, asked)
    assert json.loads((of_clip / "video_preprocessor_config.json").read_text()) == own | {"fps": 1.0}


def test_what_a_run_set_is_in_its_recipe() -> None:
    recipe = {"data.max_pixels": 7, "data.video_fps": 2.0, "data.max_tiles": None, "data.video_max_frames": 8}
    assert picture_settings({"settings": {"recipe": recipe}}) == {"max_pixels": 7, "video_max_frames": 8}
    assert picture_settings({"settings": {}}) == {} and _write_pictures(Path("none"), {}) == ""
