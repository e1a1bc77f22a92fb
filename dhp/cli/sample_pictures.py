"""A sample's pictures as its model sees them: rebuilt from its input values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from dhp.data.media.images import open_image
from dhp.data.media.sources import File, Video, files_of, name_of
from dhp.data.records import Record
from dhp.data.sample import Sample
from dhp.models.processor import Processor

SHOWN_FRAMES = 16  # of a video, evenly
_UNREAD = "this family's patches cannot be put together again here"
ALIKE = 0.3  # of the contrast: how much ways to scale may differ
ROUNDING = 2.0  # levels of 255


@dataclass(frozen=True)
class Shown:
    """One picture, video or clip. images: what is drawn of it; caption: what it is, and what of it is drawn."""

    caption: str
    images: tuple[Image.Image, ...]


def pictures_of(record: Record, sample: Sample, processor: Processor, image_processor: Any) -> list[Shown]:
    """Images and videos in order. Where pixels cannot be put together, the picture is the file's own, and the caption
    says so."""
    shown = []
    parts = zip(record.media, sample.pixels, sample.grids, strict=True)
    for number, (part, pixels, grid) in enumerate(parts, start=1):
        moving = isinstance(part, Video)
        name = part.file if isinstance(part, Video) else files_of(part)[0]
        frames = processor.frames(pixels, grid, moving)
        images = [] if frames is None else [_as_image(frame, image_processor) for frame in frames]
        tokens = processor.image_tokens(grid)
        head = f"{'video' if moving else 'image'} {number}: {name_of(name)}, {tokens} tokens"
        shown.append(
            _video(head, images) if moving else _image(head, images, files_of(part)[0], processor.from_patches(grid))
        )
    return shown


def clips_of(record: Record, sample: Sample) -> list[Shown]:
    """Clips of sound, as pictures of their spectra: time to the right, pitch upwards."""
    shown = []
    parts = zip(record.sounds, sample.clips, sample.clip_forms, strict=True)
    for number, (file, features, form) in enumerate(parts, start=1):
        head = f"sound {number}: {name_of(file)}, {form.tokens} tokens"
        caption = f"{head}; {features.shape[0]} frames of {features.shape[1]} bins"
        shown.append(Shown(caption, (_spectrum(features),)))
    return shown


def _image(head: str, images: Sequence[Image.Image], file: File, from_patches: bool) -> Shown:
    original = open_image(file)
    head = f"{head}; {original.width} × {original.height} pixels"
    if len(images) > 1:
        return Shown(f"{head}, which the model sees as {len(images)} of {_size(images[0])}", tuple(images))
    if not images:
        return Shown(f"{head}. Drawn as the file has it: {_UNREAD}", (original,))
    if not from_patches or _alike(images[0], original):
        return Shown(f"{head}, which the model sees as {_size(images[0])}", tuple(images))
    scaled = original.resize(images[0].size, Image.Resampling.BICUBIC)
    return Shown(
        f"{head}, which the model sees as {_size(scaled)}. Scaled here by Pillow, because {_UNREAD}", (scaled,)
    )


def _video(head: str, images: Sequence[Image.Image]) -> Shown:
    if not images:
        return Shown(f"{head}. Its frames cannot be read back from this family's patches", ())
    chosen = np.unique(np.linspace(0, len(images) - 1, SHOWN_FRAMES).round().astype(int))
    which = f"frames {', '.join(str(number + 1) for number in chosen)} of {len(images)}"
    return Shown(
        f"{head}; {len(images)} frames that the model sees as {_size(images[0])}; here {which}",
        tuple(images[number] for number in chosen),
    )


def _as_image(frame: np.ndarray, image_processor: Any) -> Image.Image:
    """frame: float32 [height, width, channels], as the image processor normalised it."""
    values = frame
    if getattr(image_processor, "do_normalize", True):
        mean, std = (np.array(getattr(image_processor, name), dtype=np.float32) for name in ("image_mean", "image_std"))
        values = values * std + mean
    if getattr(image_processor, "do_rescale", True):
        values = values / image_processor.rescale_factor
    levels = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels).convert("RGB")


def _alike(seen: Image.Image, original: Image.Image) -> bool:
    """Whether it is the picture that it should be. Ways to scale differ a little where a picture has much detail;
    patches in another order differ as much as the picture's own levels do."""
    scaled = np.asarray(original.resize(seen.size, Image.Resampling.BICUBIC), dtype=np.float32)
    apart = np.abs(np.asarray(seen, dtype=np.float32) - scaled).mean()
    contrast = np.abs(scaled - scaled.mean(axis=(0, 1))).mean()
    return bool(apart < ROUNDING + ALIKE * contrast)


def _spectrum(features: np.ndarray) -> Image.Image:
    low, high = float(features.min()), float(features.max())
    levels = (features - low) / max(high - low, 1e-6) * 255
    return Image.fromarray(levels.T[::-1].astype(np.uint8))


def _size(image: Image.Image) -> str:
    return f"{image.width} × {image.height}"
