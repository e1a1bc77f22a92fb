"""Sizes of a video's frames by the rules of a model's own video processor, which itself needs torchvision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.core.errors import ModelError
from dhp.models.families.grid import frames_per_patch, merge_side

Size = tuple[int, int]  # (width, height) in pixels
FILE, WHOLE_FILE, SECTION = "video_preprocessor_config.json", "processor_config.json", "video_processor"
# Class of the library → whether its bounds are of all frames of a clip together, and what it has of its own: the bounds
# and a cap's number of tokens. Most of these classes cannot be imported without torchvision.
_GLM = (True, 112**2, 28**2 * 2 * 30000, 0)
_KINDS = {
    "Glm46VVideoProcessor": _GLM,
    "Glm4vVideoProcessor": _GLM,
    "Qwen2VLVideoProcessor": (False, 128 * 28**2, 28**2 * 768, 128000),
    "Qwen3VLVideoProcessor": (True, 128 * 32**2, 32**2 * 768, 768),
}
KIND = "video_processor_type"


@dataclass(frozen=True)
class FrameSize:
    """The rule of one model.

    kind: the video processor's class. shortest, longest: pixels, of all frames together where `clip`, else of each.
    side: pixels of the square that becomes one token. group: frames of one step in time. capped: the number of tokens
    by which its `cap_pixels_per_frame` bounds frames; None: it does not.
    """

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
