"""Chooses a video's frames and their times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import TypeVar

import numpy as np
from PIL import Image

from dhp.core.batch import Grid
from dhp.core.errors import DataError
from dhp.data.media.images import open_image, read_size
from dhp.data.media.sources import PLAIN, File, Frames, Settings, name_of

_NEAR = 1e-6  # of a frame: seconds as written are rounded
MIN_FRAMES = 4  # as the processors of the Qwen models have it


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a video are taken.

    fps: frames of each second. max_frames: the most of a video.

    group: so many frames are one step in time. The number of frames is a multiple of it; a video of fewer frames is
    filled up with its last one.

    rule: how they lie, where they are even: "middles" takes the middles of equal parts of a video, "trimmed" frames
    from the first to the last, without a second at either end of a long one; "" begins each part with one. least: how
    many at least, where there are as many.

    both_ends: as Qwen3-VL's processor does, take frames from the very first to the very last, any number of
    them; the last group is then filled up.

    start, end: seconds; only frames from the one to the other are taken. None: to the video's end.

    times, in the methods: seconds of each frame, of a video whose frames are not evenly spaced; None: they are."""

    fps: float
    max_frames: int
    group: int
    both_ends: bool = False
    start: float = 0.0
    end: float | None = None
    rule: str = ""
    least: int = MIN_FRAMES

    def indices(self, total: int, rate: float, times: Sequence[float] | None = None) -> np.ndarray:
        """int64 [frames], ascending: which of `total` frames, `rate` a second, are taken. Raises DataError where the
        part that is to be shown has none."""
        first, stop = self._part(total, rate, times)
        inside = self._inside(stop - first, rate) if times is None else self._by_time(np.array(times[first:stop]), rate)
        return first + inside

    def _part(self, total: int, rate: float, times: Sequence[float] | None) -> tuple[int, int]:
        """The frames [first, stop) from `start` to `end`; the frame at `end` is one of them. Of frames with times of
        their own, the one before `start` where none begins in the part: it is still shown."""
        if times is None:
            first = ceil(self.start * rate - _NEAR)
            stop = total if self.end is None else min(int(self.end * rate + _NEAR) + 1, total)
        else:
            first = bisect_left(times, self.start - _NEAR)
            stop = total if self.end is None else bisect_right(times, self.end + _NEAR)
            first -= int(first >= stop and self.start < times[-1] + 1 / rate)
            stop = max(stop, first + 1) if first < total else stop
        if first >= stop:
            raise DataError(
                f"no frame of the video, which is {total / rate:.2f} s long, is between {self.start:g} s and "
                f"{total / rate if self.end is None else self.end:g} s"
            )
        return first, stop

    def _inside(self, total: int, rate: float) -> np.ndarray:
        if self.both_ends:
            count = min(max(int(total / rate * self.fps), self.least), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(np.int64)
        if self.rule == "trimmed":
            return self._trimmed(total, rate)
        most = min(self.max_frames, total) // self.group * self.group
        wanted = min(max(total / rate * self.fps, self.least), most, total)
        count = int(wanted // self.group) * self.group or total
        half = total if self.rule == "middles" else 0
        return (np.arange(count, dtype=np.int64) * 2 * total + half) // (2 * count)

    def _trimmed(self, total: int, rate: float) -> np.ndarray:
        """As SmolVLM's processor does."""
        count = max(min(round(total / rate * self.fps), self.max_frames, total), 1)
        first, last = 0, total - 1
        if total / rate - 2 > self.max_frames * self.fps:
            first, last = int(rate), min(int(total - rate), total - 1)
        first, last = (first, last) if first < last else (0, total - 1)
        return np.unique(np.linspace(first, last, count, dtype=int).astype(np.int64))

    def _by_time(self, times: np.ndarray, rate: float) -> np.ndarray:
        """The frames nearest to `fps` moments of each second; evenly by number where these are too few."""
        most = self.max_frames if self.both_ends else max(self.max_frames // self.group, 1) * self.group
        wanted = min(max(int(_span(times, rate) * self.fps), self.least), most)
        moments = np.linspace(times[0], times[-1], wanted)
        after = np.searchsorted(times, moments).clip(1, max(len(times) - 1, 1))
        behind = times[after.clip(max=len(times) - 1)] - moments < moments - times[after - 1]
        taken = np.unique(np.where(behind, after, after - 1)).astype(np.int64)
        least = min(self.least, most, len(times))
        return taken if len(taken) >= least else np.linspace(0, len(times) - 1, least).round().astype(np.int64)

    def pace(self, total: int, rate: float, times: Sequence[float] | None = None) -> FrameTimes:
        """Times of the groups of a video with `total` frames, `rate` a second."""
        indices = self.indices(total, rate, times)
        seconds = (indices / rate).tolist() if times is None else [times[index] for index in indices]
        groups = [seconds[first : first + self.group] for first in range(0, len(seconds), self.group)]
        middles, firsts = tuple((g[0] + g[-1]) / 2 for g in groups), tuple(g[0] for g in groups)
        first, stop = self._part(total, rate, times)
        shown = (stop - first) / rate if times is None else _span(times[first:stop], rate)
        return FrameTimes(self.group * shown / len(seconds), middles, firsts, total / rate)


def _span(times: Sequence[float] | np.ndarray, rate: float) -> float:
    """Seconds that frames are shown, the last as long as they are on average."""
    count = len(times)
    return float(times[-1] - times[0]) * count / (count - 1) if count > 1 else 1 / rate


@dataclass(frozen=True)
class FrameTimes:
    """Times of groups of frames.

    seconds: from one group to the next, on average. times: of each group, seconds from the beginning of the video to
    the middle between its first and its last frame. firsts: to its first frame. whole: seconds of the video."""

    seconds: float
    times: tuple[float, ...]
    firsts: tuple[float, ...]
    whole: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class VideoExtent:
    """The frames that are taken of a video.

    frames: how many, filled up to whole groups. width, height: pixels of a frame as it is stored; a frame that is shown
    after a quarter turn has them exchanged. taken: how many before they are filled up."""

    frames: int
    width: int
    height: int
    pace: FrameTimes
    taken: int = field(default=0, compare=False)


@dataclass(frozen=True)
class VideoLength:
    """Frames of a video, and how many of them a second has. times: seconds of each from the first, where they are not
    evenly spaced; None: they are."""

    total: int
    rate: float
    times: tuple[float, ...] | None = None


Result = TypeVar("Result")


def map_images(
    frames: Frames, taking: FrameSampling, use: Callable[[list[Image.Image]], Result]
) -> tuple[list[Result], FrameTimes]:
    """The results of `use` for each group of frames, in order, and the times of the groups. All frames are taken,
    filled up to whole groups with the last one, unless they are more than `taking.max_frames`: then so many, evenly.

    Raises DataError for a frame that cannot be read, or is of another size than the first."""
    files, pace = _taken(frames, taking)
    results, size = [], None
    for first in range(0, len(files), taking.group):
        images = [open_image(file) for file in files[first : first + taking.group]]
        for image, file in zip(images, files[first:]):
            size = size or image.size
            _check_same(image.size, size, file)
        results.append(use(images + images[-1:] * (taking.group - len(images))))
    return results, pace


def count_images(frames: Frames, taking: FrameSampling) -> int:
    """How many of them `map_images` takes."""
    return len(_taken(frames, taking)[0])


def extent_of_images(frames: Frames, taking: FrameSampling) -> VideoExtent:
    """The extent of what `map_images` takes, from the files' headers. Raises DataError as it does, for what these
    show."""
    files, pace = _taken(frames, taking)
    sizes = [read_size(file) for file in files]
    for size, file in zip(sizes, files):
        _check_same(size, sizes[0], file)
    return VideoExtent(-(-len(files) // taking.group) * taking.group, *sizes[0], pace, len(files))


def _taken(frames: Frames, taking: FrameSampling) -> tuple[list[File], FrameTimes]:
    total = -(-len(frames.files) // taking.group) * taking.group
    every = FrameSampling(frames.rate, taking.max_frames, taking.group, taking.both_ends, taking.start, taking.end)
    indices = np.minimum(every.indices(total, frames.rate), len(frames.files) - 1)
    return [frames.files[index] for index in indices.tolist()], every.pace(total, frames.rate)


def _check_same(size: tuple[int, int], first: tuple[int, int], file: File) -> None:
    if size != first:
        both = " and ".join(f"{width} × {height}" for width, height in (first, size))
        raise DataError(f"frames of a video are of {both} pixels (at {name_of(file)}). Write them in one size")


@dataclass(frozen=True)
class LongVideo:
    """A video whose frames are read later, instead of pixels:
    `dhp.data.sample.picture_inputs.Pictures.read_patches` reads some of its patches."""

    file: File
    length: VideoLength
    grid: Grid
    settings: Settings = PLAIN

    def __len__(self) -> int:
        """Patches."""
        return prod(self.grid)
