"""Some groups of a long video's frames, decoded from the nearest key frames on: so several processes can each decode a
part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from dhp.data.media.decoding import decoding
from dhp.data.media.sources import File, name_of
from dhp.data.media.taking import FrameSampling, VideoLength
from dhp.data.media.video import opened_video, read_in_order, to_upright_image


@dataclass(frozen=True)
class _Index:
    """Times of all shown frames, in order, and of the key frames, in the stream's own unit. Of a part that was cut out
    of a video, the first of these may be one that is not shown."""

    times: list[int]
    keys: list[int]

    def key_before(self, frame: int) -> int:
        """The time of the key frame at which decoding begins for a frame."""
        return self.keys[bisect_right(self.keys, self.times[frame]) - 1]


def read_groups(
    file: File, taking: FrameSampling, length: VideoLength, groups: Sequence[int]
) -> Iterator[list[Image.Image]]:
    """The frames of some groups (ascending numbers), upright, one group after another: the same as
    `dhp.data.media.video.map_frames` decodes.

    Raises DataError for a file that cannot be decoded so far.
    """
    indices = taking.indices(length.total, length.rate)
    members = [indices[group * taking.group : (group + 1) * taking.group] for group in groups]
    with opened_video(file) as (container, stream):
        frames = _read(container, stream, np.concatenate([*members, indices[:0]]), file, length)
        for own in members:
            images = [next(frames) for _ in own]
            yield images + images[-1:] * (taking.group - len(images))


def _read(container: Any, stream: Any, indices: np.ndarray, file: File, length: VideoLength) -> Iterator[Image.Image]:
    """Frames by their numbers, ascending. From key frames where the file tells all frames' times; else, and where what
    is decoded has other times, from the file's beginning."""
    left = indices.tolist()
    with decoding(f"video {name_of(file)}"):
        index = _find_index(container, stream, length.total)
    if index is not None:
        for image in _read_from_keys(container, stream, index, left, file):
            yield image
            left = left[1:]
        if not left:
            return
    with opened_video(file) as (again, of_video):
        yield from read_in_order(again, of_video, np.array(left, dtype=np.int64), file, length.total)


def _read_from_keys(
    container: Any, stream: Any, index: _Index, wanted: Sequence[int], file: File
) -> Iterator[Image.Image]:
    """As many of the frames, from the first on, as are found at their times."""
    decoded: Iterator[Any] = iter(())
    at = index.keys[0] - 1  # when the frame is shown that was decoded last
    for number in wanted:
        with decoding(f"video {name_of(file)}"):
            key = index.key_before(number)
            if at < key:
                container.seek(key, stream=stream, backward=True, any_frame=False)
                decoded = container.decode(stream)
            frame = next((frame for frame in decoded if frame.pts is None or frame.pts >= index.times[number]), None)
            if frame is None or frame.pts != index.times[number]:
                return
            image = to_upright_image(frame, name_of(file))
        at = frame.pts
        yield image


def _find_index(container: Any, stream: Any, total: int) -> _Index | None:
    """From the file's packets, which are read and not decoded. None where they do not tell the time of each frame."""
    packets = [packet for packet in container.demux(stream) if packet.size]
    times = sorted(packet.pts for packet in packets if packet.pts is not None and not packet.is_discard)
    keys = sorted(packet.pts for packet in packets if packet.is_keyframe and packet.pts is not None)
    if len(times) != total or len(set(times)) < total or not keys or keys[0] > times[0]:
        return None
    return _Index(times, keys)
