"""Decodes videos to upright RGB frames, sampled evenly."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import chain
from math import atan2, degrees
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling, FrameTimes, VideoExtent, VideoLength
from dhp.data.media.images import MAX_PIXELS
from dhp.data.media.sources import File, decoding, name_of, open_media, pyav

# What FFmpeg may take a file for. Playlists are left out: they name other files and addresses, which it would open.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,gif,ogg,asf"

SPARSE = 100  # frames from one that is taken to the next, beyond which those between two key frames are passed over

Result = TypeVar("Result")


def read_length(file: File) -> VideoLength:
    """By the header; where it does not say, the frames are counted. Raises DataError for no video stream, no frames."""
    with opened_video(file) as (_, stream):
        return _length(stream, file)


def map_frames(
    file: File, taking: FrameSampling, use: Callable[[list[Image.Image]], Result], length: VideoLength | None = None
) -> tuple[list[Result], FrameTimes]:
    """Decode a video: the results of `use` for each group of frames, in order, and the times of the groups. length:
    where it is known already.

    Frames are handed over as they are decoded, a group at a time, so that their images need not fit into memory.
    DataError names the file and the reason: broken, no video stream, no frames, too large, cut off."""
    with opened_video(file) as (container, stream):
        whole = _length(stream, file) if length is None else length
        known = astuple(whole)
        indices = taking.indices(*known)
        results, group = [], []
        apart = indices[-1] / len(indices)  # frames of the video for each that is taken
        if apart > SPARSE:
            images = _read(container, stream, indices, file, whole)
        else:
            images = read_in_order(container, stream, indices, file, whole.total)
        for image in images:
            group.append(image)
            if len(group) == taking.group:
                results.append(use(group))
                group = []
        if group:
            results.append(use(group + group[-1:] * (taking.group - len(group))))
    return results, taking.pace(*known)


def read_extent(file: File, taking: FrameSampling) -> VideoExtent:
    """The extent of what `map_frames` takes of a video, from the file's header.

    Frames are decoded only to be counted, where the header does not say how many there are (as in Matroska files).
    Raises DataError as `map_frames` does, for what the header shows: no video stream, no frames, too large."""
    with opened_video(file) as (container, stream):
        length = astuple(_length(stream, file))
        taken = len(taking.indices(*length))
        frames = -(-taken // taking.group) * taking.group
        return VideoExtent(frames, *_frame_size(container, stream, file), taking.pace(*length), taken)


@contextmanager
def opened_video(file: File) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    name = name_of(file)
    with open_media(file, "video") as content:
        with decoding(f"video {name}"):
            container = pyav().open(content, options={"format_whitelist": _CONTAINERS}, metadata_errors="ignore")
        with container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                raise DataError(f"video {name} has no video stream")
            if stream.codec_context is None:
                raise DataError(f"video {name} has a video stream of an unknown kind")
            _check_size(stream.width, stream.height, name)
            yield container, stream


def _length(stream: Any, file: File) -> VideoLength:
    """Raises DataError where there is no frame."""
    with decoding(f"video {name_of(file)}"):
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        total = _count_shown(file) if _shows_a_part(stream, rate) else stream.frames or _count(file)
    if total <= 0 or rate <= 0:
        raise DataError(f"video {name_of(file)} has {'no frame rate' if total > 0 else 'no frames'}")
    return VideoLength(total, rate, _uneven_times(stream, file, total))


def _uneven_times(stream: Any, file: File, total: int) -> tuple[float, ...] | None:
    """Seconds of each frame from the first, by the packets; None where no frame is further from its evenly spaced place
    than they are from each other, or where the file does not tell. Packets are not read where the header has the same
    rate for the whole video as for its shortest steps."""
    if total < 3 or (stream.frames and stream.base_rate == stream.average_rate):
        return None
    with opened_video(file) as (container, again), decoding(f"video {name_of(file)}"):
        index = _find_index(container, again, total)
    if index is None or index.times[0] == index.times[-1]:
        return None
    times = np.array(index.times, dtype=np.float64) - index.times[0]
    apart = np.abs(times - np.linspace(0, times[-1], total)).max() * (total - 1) / times[-1]  # in mean steps
    return tuple((times * float(stream.time_base)).tolist()) if apart > 1 else None


def _shows_a_part(stream: Any, rate: float) -> bool:
    """Whether the header has more frames than the stream's duration has room for: an edit list hides some, as where a
    part of a video was cut out without encoding it again."""
    if not stream.frames or stream.duration is None:
        return False
    return bool(stream.frames - float(stream.duration * stream.time_base) * rate > 0.5)


def _count_shown(file: File) -> int:
    """Frames of a video that are shown, by its packets; nothing is decoded."""
    with opened_video(file) as (container, stream):
        return sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _frame_size(container: Any, stream: Any, file: File) -> tuple[int, int]:
    if stream.width and stream.height:
        return stream.width, stream.height
    with decoding(f"video {name_of(file)}"):
        for frame in container.decode(stream):
            return frame.width, frame.height
    raise DataError(f"video {name_of(file)} has no frames")


def _count(file: File) -> int:
    with opened_video(file) as (container, stream):
        return sum(1 for _ in container.decode(stream))


def read_in_order(container: Any, stream: Any, indices: np.ndarray, file: File, total: int) -> Iterator[Image.Image]:
    """The frames of the given indices, ascending, upright; all before them are decoded. Raises DataError when the video
    ends before the last of them, or when they are not of one size."""
    wanted = iter(indices.tolist())
    following = next(wanted, None)
    number, first = 0, None
    with decoding(f"video {name_of(file)}"):  # what the caller does with a frame is not inside
        for number, frame in enumerate(container.decode(stream), start=1):
            if number - 1 == following:
                image = to_upright_image(frame, name_of(file))
                first = first or image.size
                _check_same(image.size, first, number, name_of(file))
                yield image
                following = next(wanted, None)
                if following is None:
                    return
    raise DataError(f"video {name_of(file)} is cut off: it ends after {number} of {total} frames. Copy it again")


def to_upright_image(frame: Any, name: str) -> Image.Image:
    """A decoded frame as it is shown. Raises DataError for one that is too large."""
    _check_size(frame.width, frame.height, name)
    image: Image.Image = frame.to_image()
    turned, mirrored = _orientation(frame)
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image
    return image.rotate(turned, expand=True) if turned else image


def _orientation(frame: Any) -> tuple[int, bool]:
    """Degrees by which a frame is turned, counter-clockwise, and whether it is mirrored (left and right exchanged)
    before that. FFmpeg's angle alone is wrong for a display matrix with a reflection, as front cameras write them."""
    matrix = _display_matrix(frame)
    if matrix is None or matrix[0] * matrix[4] >= matrix[1] * matrix[3]:
        return frame.rotation, False
    return round(-degrees(atan2(-matrix[1], -matrix[0]))), True  # of what is left without the mirror


def _display_matrix(frame: Any) -> list[int] | None:
    """The nine numbers by which a container says how its frames are shown; None: it says nothing."""
    data = frame.side_data.get("DISPLAYMATRIX")
    return None if data is None else np.frombuffer(bytes(data), dtype=np.int32).tolist()


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"video {name} has frames of {width} × {height} = {width * height} pixels, more than the {MAX_PIXELS} that "
            "are decoded. Scale it down"
        )


def _check_same(size: tuple[int, int], first: tuple[int, int], number: int, name: str) -> None:
    if size != first:
        sizes = " to ".join(f"{width} × {height}" for width, height in (first, size))
        raise DataError(
            f"video {name} changes the size of its frames from {sizes} at frame {number}. Write it in one size"
        )


@dataclass(frozen=True)
class _Index:
    """Times of all shown frames, in order, and of the key frames, in the stream's own unit. Of a part that was cut out
    of a video, the first of these may be one that is not shown."""

    times: list[int]
    keys: list[int]
    decoded: list[int | None]  # when each key frame is decoded, by which some containers are sought

    def key_before(self, frame: int) -> int:
        """The number of the key frame at which decoding begins for a frame."""
        return bisect_right(self.keys, self.times[frame]) - 1


def read_groups(
    file: File, taking: FrameSampling, length: VideoLength, groups: Sequence[int]
) -> Iterator[list[Image.Image]]:
    """The frames of some groups (ascending numbers), upright, one group after another: the same as
    `dhp.data.media.video.map_frames` decodes.

    Raises DataError for a file that cannot be decoded so far."""
    indices = taking.indices(*astuple(length))
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
    first = None
    for number in wanted:
        with decoding(f"video {name_of(file)}"):
            key = index.key_before(number)
            if at < index.keys[key]:
                found = _decode_from(container, stream, index, key)
                if found is None:
                    return
                decoded = found
            frame = next((frame for frame in decoded if frame.pts is None or frame.pts >= index.times[number]), None)
            if frame is None or frame.pts != index.times[number]:
                return
            image = to_upright_image(frame, name_of(file))
        first = first or image.size
        _check_same(image.size, first, number + 1, name_of(file))
        at = frame.pts
        yield image


def _decode_from(container: Any, stream: Any, index: _Index, key: int) -> Iterator[Any] | None:
    """The frames from a key frame on; None where decoding cannot begin there: containers take other packets for keys
    too, behind which frames are made of some that were not decoded (intra refresh)."""
    for moment in (index.keys[key], index.decoded[key]):
        if moment is None:
            continue
        container.seek(moment, stream=stream, backward=True, any_frame=False)
        decoded: Iterator[Any] = container.decode(stream)
        first = next(decoded, None)
        if first is None or first.pts is None:
            continue
        if first.pts <= index.keys[key] and first.key_frame or not key and first.pts <= index.times[0]:
            return chain([first], decoded)  # of the first key all that is shown, which it need not be itself
    return None


def _find_index(container: Any, stream: Any, total: int) -> _Index | None:
    """From the file's packets, which are read and not decoded. None where they do not tell the time of each frame."""
    packets = [packet for packet in container.demux(stream) if packet.size]
    times = sorted(packet.pts for packet in packets if packet.pts is not None and not packet.is_discard)
    keys = {packet.pts: packet.dts for packet in packets if packet.is_keyframe and packet.pts is not None}
    ordered = sorted(keys)
    if len(times) != total or len(set(times)) < total or not keys or ordered[0] > times[0]:
        return None
    return _Index(times, ordered, [keys[key] for key in ordered])
