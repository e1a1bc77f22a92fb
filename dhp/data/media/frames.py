"""A video that is a list of images, which are its frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image

from dhp.base.errors import DataError
from dhp.data.media.images import open_image, read_size
from dhp.data.media.sources import File, Frames, name_of
from dhp.data.media.taking import Extent, FrameSampling, FrameTimes

Result = TypeVar("Result")


def map_images(
    frames: Frames, taking: FrameSampling, use: Callable[[list[Image.Image]], Result]
) -> tuple[list[Result], FrameTimes]:
    """The results of `use` for each group of frames, in order, and the times of the groups. All frames are taken,
    filled up to whole groups with the last one, unless they are more than `taking.max_frames`: then so many, evenly.

    Raises DataError for a frame that cannot be read, or is of another size than the first.
    """
    files, pace = _taken(frames, taking)
    results, size = [], None
    for first in range(0, len(files), taking.group):
        images = [open_image(file) for file in files[first : first + taking.group]]
        for image, file in zip(images, files[first:]):
            size = size or image.size
            _check_same(image.size, size, file)
        results.append(use(images + images[-1:] * (taking.group - len(images))))
    return results, pace


def extent_of_images(frames: Frames, taking: FrameSampling) -> Extent:
    """The extent of what `map_images` takes, from the files' headers. Raises DataError as it does, for what these
    show."""
    files, pace = _taken(frames, taking)
    sizes = [read_size(file) for file in files]
    for size, file in zip(sizes, files):
        _check_same(size, sizes[0], file)
    return Extent(-(-len(files) // taking.group) * taking.group, *sizes[0], pace)


def _taken(frames: Frames, taking: FrameSampling) -> tuple[list[File], FrameTimes]:
    total = -(-len(frames.files) // taking.group) * taking.group
    every = FrameSampling(frames.rate, taking.max_frames, taking.group, taking.both_ends, taking.start, taking.end)
    indices = np.minimum(every.indices(total, frames.rate), len(frames.files) - 1)
    return [frames.files[index] for index in indices.tolist()], every.pace(total, frames.rate)


def _check_same(size: tuple[int, int], first: tuple[int, int], file: File) -> None:
    if size != first:
        both = " and ".join(f"{width} × {height}" for width, height in (first, size))
        raise DataError(f"frames of a video are of {both} pixels (at {name_of(file)}). Write them in one size")
