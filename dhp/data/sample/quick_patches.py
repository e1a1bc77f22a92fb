"""Patches of pictures as an image processor of Qwen's kind makes them, bit for bit, in a third of its time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from dhp.data.media.images import open_image
from dhp.data.media.sources import File
from dhp.data.sample.sample import Output, Size

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

_MARGIN = 1.5  # of a reduced JPEG over what the model sees: without one, edges are seen that are not there
Kernel = Callable[[np.ndarray, np.ndarray, int, int, int], np.ndarray]


class QuickPatches:
    """Scales by Pillow, then looks values up where the processor computes with them, and writes each once.

    The processor's own `smart_resize` says how large a picture becomes, and its own `rescale` and `normalize` what
    each of the 256 values of a channel does."""

    def __init__(self, processor: BaseImageProcessor) -> None:
        self._processor: Any = processor
        self._values = self._value_table()
        self._cut = _kernel()

    def __call__(self, images: Sequence[Image.Image], scaling: Mapping[str, Any]) -> Output:
        """RGB images → what the processor returns for them with these arguments. Raises ValueError as it does."""
        patch, merge, repeats = self._sides()
        cut, grids = [], []
        for image in images:
            pixels = np.asarray(self._resized(image, scaling))
            if pixels.ndim != 3 or pixels.shape[2] != 3 or any(side % (patch * merge) for side in pixels.shape[:2]):
                return cast(Output, self._processor(images=list(images), return_tensors="np", **scaling))
            cut.append(self._cut(pixels, self._values, patch, merge, repeats))
            grids.append((1, pixels.shape[0] // patch, pixels.shape[1] // patch))
        patches = cut[0] if len(cut) == 1 else np.concatenate(cut)
        return {"pixel_values": patches, "image_grid_thw": np.array(grids, dtype=np.int64)}

    def open_reduced(self, file: File, scaling: Mapping[str, Any]) -> tuple[Image.Image, bool]:
        """A picture, and whether it is as large as the model sees it: so is one of a JPEG file, which may be decoded
        smaller than it is. Raises DataError as `open_image` does."""
        targets = list[Size]()

        def least(size: Size) -> Size:
            with suppress(ValueError):  # of sides too unequal, which scaling will name
                targets.append(self.target(size, scaling))
                return ceil(_MARGIN * targets[0][0]), ceil(_MARGIN * targets[0][1])
            return size

        image = open_image(file, least=least)
        if not targets:
            return image, False
        (target,) = targets
        return image if image.size == target else image.resize(target, self._processor.resample), True

    def target(self, size: Size, scaling: Mapping[str, Any]) -> Size:
        """What a picture of a size is scaled to. Raises ValueError for one that the processor does not take."""
        own = self._processor
        if not scaling.get("do_resize", own.do_resize):
            return size
        bounds = scaling.get("size") or {edge: own.size[edge] for edge in ("shortest_edge", "longest_edge")}
        resize: Any = sys.modules[type(own).__module__].smart_resize
        width, height = size
        least, most = bounds["shortest_edge"], bounds["longest_edge"]
        factor = own.patch_size * own.merge_size
        down, across = resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        return across, down

    def _resized(self, image: Image.Image, scaling: Mapping[str, Any]) -> Image.Image:
        target = self.target(image.size, scaling)
        return image if target == image.size else image.resize(target, self._processor.resample)

    def _sides(self) -> tuple[int, int, int]:
        own = self._processor
        return own.patch_size, own.merge_size, own.temporal_patch_size

    def _value_table(self) -> np.ndarray:
        """float32 [channels, 256]."""
        own = self._processor
        values: np.ndarray = np.arange(256, dtype=np.uint8)[None, None].repeat(3, axis=0)
        if own.do_rescale:
            values = own.rescale(values, own.rescale_factor)
        if own.do_normalize:
            values = own.normalize(values, own.image_mean, own.image_std)
        return np.ascontiguousarray(values[:, 0], dtype=np.float32)


def quick_patches(
    processor: BaseImageProcessor, arguments: Mapping[str, Any], scaling: Mapping[str, Any]
) -> QuickPatches | None:
    """None where the processor is of another kind, or gives other bits for one of some pictures.

    arguments, scaling: with which it is called."""
    settings = f"{type(processor)} {processor.to_json_string()} {arguments} {scaling}"
    if settings not in _PROVED:
        try:
            _PROVED[settings] = not arguments and all(_equal(processor, scaling, size) for size in _SIZES)
        except Exception:  # one of another kind may raise anything
            _PROVED[settings] = False
    return QuickPatches(processor) if _PROVED[settings] else None


_SIZES = ((50, 70), (333, 250), (1201, 480))  # one is enlarged, one shrunk, by most bounds
_PROVED: dict[str, bool] = {}  # by processor and how it is called


def _equal(processor: BaseImageProcessor, scaling: Mapping[str, Any], size: Size) -> bool:
    width, height = size
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    ours = QuickPatches(processor)([image], scaling)
    theirs = processor(images=[image], return_tensors="np", **scaling)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@cache
def _kernel() -> Kernel:
    """Compiled where it is first used: machines without numba read pictures by the processor."""
    from numba import njit

    @njit(cache=True)
    def cut(
        pixels: np.ndarray, values: np.ndarray, patch: int, merge: int, repeats: int
    ) -> np.ndarray:  # pragma: no cover - compiled
        """uint8 [height, width, 3] → float32 [patches, 3 × repeats × patch²]: merge² patches that become a token are
        neighbours."""
        high, wide = pixels.shape[0] // patch, pixels.shape[1] // patch
        found = np.empty((high * wide, 3, repeats, patch * patch), np.float32)
        reds, greens, blues = values[0], values[1], values[2]
        row = 0
        for top in range(0, high, merge):
            for left in range(0, wide, merge):
                for down in range(top, top + merge):
                    for across in range(left, left + merge):
                        red, green, blue, at = found[row, 0, 0], found[row, 1, 0], found[row, 2, 0], 0
                        for y in range(down * patch, (down + 1) * patch):
                            line = pixels[y, across * patch : (across + 1) * patch]
                            for x in range(patch):
                                red[at], green[at] = reds[line[x, 0]], greens[line[x, 1]]
                                blue[at] = blues[line[x, 2]]
                                at += 1
                        for again in range(1, repeats):
                            for channel in range(3):
                                found[row, channel, again, :] = found[row, channel, 0, :]
                        row += 1
        return found.reshape(high * wide, -1)

    return cut
