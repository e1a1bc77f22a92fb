"""Writes a model's processor files with a run's bounds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.core.errors import ModelError
from dhp.core.files import write_whole
from dhp.models.families.grid import frames_per_patch, merge_side
from dhp.models.processor import Processor

Size = tuple[int, int]  # (width, height) in pixels
FILE, WHOLE_FILE, SECTION = "video_preprocessor_config.json", "processor_config.json", "video_processor"
# Class of the library → whether its bounds are of all frames of a clip together, and what it has of its own: the bounds
# and a cap's number of tokens. Most of these classes cannot be imported without torchvision.
_GLM_RULE = (True, 112**2, 28**2 * 2 * 30000, 0)
_KINDS = {
    "Glm46VVideoProcessor": _GLM_RULE,
    "Glm4vVideoProcessor": _GLM_RULE,
    "Qwen2VLVideoProcessor": (False, 128 * 28**2, 28**2 * 768, 128000),
    "Qwen3VLVideoProcessor": (True, 128 * 32**2, 32**2 * 768, 768),
}
KIND = "video_processor_type"
# Classes that scale, cut and normalise frames one by one → how each chooses frames (`FrameSampling.rule`).
WHOLE = {
    **dict.fromkeys(("LlavaOnevisionVideoProcessor", "LlavaNextVideoVideoProcessor"), ""),
    "Gemma4VideoProcessor": "",
    "InternVLVideoProcessor": "middles",
    "SmolVLMVideoProcessor": "trimmed",
}


@dataclass(frozen=True)
class FrameSize:
    """The rule of one model.

    kind: the video processor's class. shortest, longest: pixels, of all frames together where `clip`, else of each.
    side: pixels of the square that becomes one token. group: frames of one step in time. capped: the number of tokens
    by which its `cap_pixels_per_frame` bounds frames; None: it does not."""

    kind: str
    clip: bool
    shortest: int
    longest: int
    side: int
    group: int
    capped: int | None = None

    def __call__(self, frames: int, size: Size) -> Size:
        """The scaled size of each of so many frames that are taken. Raises ValueError for sides too unequal."""
        width, height = size
        if self.clip:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_clip

            frames = max(frames, self.group)  # a single one is repeated
            high, wide = of_clip(frames, height, width, self.group, self.side, self.shortest, self._most(frames))
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            high, wide = smart_resize(height, width, self.side, self.shortest, self._most(frames))
        return int(wide), int(high)

    def _most(self, frames: int) -> int:
        """Pixels, as `longest`. The library's two processors cap by different numbers."""
        if self.capped is None:
            return self.longest
        least, tokens = int(self.shortest * 1.05), self.capped * self.side**2
        if self.clip:
            return max(min(tokens, self.longest // frames), least) * frames
        return max(min(self.longest, int(tokens * 0.9) * self.group // frames), least)

    def __str__(self) -> str:
        return f"{self.shortest} to {self.longest} pixels {'of all frames of a clip' if self.clip else 'a frame'}"


def find_frame_size(model_name: str, config: Any) -> FrameSize | None:
    """The rule that a model's directory has in its video processor's file; None: there is no such file, or one of a
    kind that is not known here, and frames are scaled as images are."""
    content = read_video_settings(model_name)
    kind = str(content.get(KIND))
    if kind not in _KINDS:
        return None
    clip, shortest, longest, tokens = _KINDS[kind]
    size, vision = content.get("size") or {}, config.vision_config
    return FrameSize(
        kind,
        clip,
        int(content.get("min_pixels") or size.get("shortest_edge") or shortest),
        int(content.get("max_pixels") or size.get("longest_edge") or longest),
        int(vision.patch_size) * merge_side(vision),
        frames_per_patch(vision),
        int(content.get("max_video_tokens") or tokens) if tokens and content.get("cap_pixels_per_frame") else None,
    )


def read_video_settings(model_name: str) -> dict[str, Any]:
    """What the library's video processor would be made of; {}: the directory says nothing of videos."""
    from transformers.utils.hub import cached_file

    optional = ("missing_entries", "connection_errors", "gated_repo")
    for name in (WHOLE_FILE, FILE):
        found = cached_file(model_name, name, **{f"_raise_exceptions_for_{one}": False for one in optional})
        try:
            content = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
        except ValueError as error:
            raise ModelError(f"{model_name}: {name} is no JSON ({error}). Copy the file again") from error
        if name == FILE or SECTION in content:
            return dict(content.get(SECTION, {}) if name == WHOLE_FILE else content)
    return {}


IMAGE_FILE, _IMAGE_SECTION = "preprocessor_config.json", "image_processor"
_GLM_PROCESSORS = ("Glm4vVideoProcessor", "Glm46VVideoProcessor")  # which choose frames by rules of their own


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
    size: bounds of each frame, where it had some."""
    own = read_video_settings(str(folder)) or _of_images(folder)
    kind = own.setdefault(KIND, _kind(processor))
    rule, lost = find_frame_size(str(folder), processor.config), ""
    values, bounds = dict(asked), dict(size)
    if kind in (*_GLM_PROCESSORS, *WHOLE) and values:
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
    if processor.video_kind:
        return processor.video_kind
    if processor.config.model_type.startswith("glm4"):
        return _GLM_PROCESSORS[processor.config.model_type == "glm46v"]
    return "Qwen3VLVideoProcessor" if processor.takes_both_ends else "Qwen2VLVideoProcessor"
