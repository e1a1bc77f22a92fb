"""Files of a model's image and video processors, with the bounds that a run had for its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.core.files import write_whole
from dhp.models.frame_size import FILE, KIND, SECTION, WHOLE_FILE, find_frame_size, read_video_settings
from dhp.models.processor import Processor

IMAGE_FILE, _IMAGE_SECTION = "preprocessor_config.json", "image_processor"
_GLM = ("Glm4vVideoProcessor", "Glm46VVideoProcessor")  # which choose frames by rules of their own


def set_image_arguments(folder: Path, arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments of the image processor, as training calls it with, to where the library reads them; the names of
    the files."""
    values = dict(arguments) | _edges(arguments.get("size", {}))
    return [name for name in (WHOLE_FILE, IMAGE_FILE) if _update(folder / name, _IMAGE_SECTION, values)]


def _edges(size: Mapping[str, int]) -> dict[str, int]:
    """Bounds of an area under their other names, which alone version 4 of transformers reads."""
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    return {names[edge]: pixels for edge, pixels in size.items() if edge in names}


def _update(file: Path, section: str, values: Mapping[str, Any]) -> bool:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    whole = file.name == WHOLE_FILE
    if not content or (whole and section not in content):
        return False
    (content[section] if whole else content).update(values)
    write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return True


def set_video_arguments(
    folder: Path, processor: Processor, asked: Mapping[str, Any], size: Mapping[str, int]
) -> tuple[list[str], str]:
    """Write how videos were read to where the library's video processor reads it; the names of the files, and what
    cannot be written, in words.

    asked: frames a second and the most of a video, by the library's names (fps, max_frames), where the run set them.
    size: bounds of each frame, where it had some.
    """
    own = read_video_settings(str(folder)) or _of_images(folder)
    kind = own.setdefault(KIND, _kind(processor))
    rule, lost = find_frame_size(str(folder), processor.config), ""
    values, bounds = dict(asked), dict(size)
    if kind in _GLM and values:
        lost = f"{kind} chooses frames by its own rule, and training took {_words(values)}"
        values = {}
    if bounds and (rule.clip if rule else kind != "Qwen2VLVideoProcessor"):
        bounded = rule or _words(own.get("size") or {})
        lost += f"{'; ' * bool(lost)}{kind} bounds all frames of a clip ({bounded}), and training had "
        lost += f"{_words(bounds)} for each frame"
        bounds = {}
    values |= {"size": bounds, **_edges(bounds)} if bounds else {}
    if not values:
        return [], lost
    if _update(folder / WHOLE_FILE, SECTION, values):
        return [WHOLE_FILE], lost
    write_whole(folder / FILE, json.dumps(own | values, indent=2, ensure_ascii=False) + "\n")
    return [FILE], lost


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _of_images(folder: Path) -> dict[str, Any]:
    """What the library makes a video processor of where it finds no file of its own."""
    file = folder / IMAGE_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {key: value for key, value in found.items() if key != "image_processor_type"}


def _kind(processor: Processor) -> str:
    if processor.config.model_type.startswith("glm4"):
        return _GLM[processor.config.model_type == "glm46v"]
    return "Qwen3VLVideoProcessor" if processor.takes_both_ends else "Qwen2VLVideoProcessor"
