"""Sizes of frames by a model's own video processor: those of the library's classes, and of what is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor

from dhp.core.errors import ModelError
from dhp.models.processor_files import _KINDS, FrameSize, find_frame_size
from dhp.tiny.tiny_model import make_family

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
