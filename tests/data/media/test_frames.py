"""Videos that are lists of images, and parts of videos: which frames are shown, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling, LongVideo, extent_of_images, map_images
from dhp.data.media.sources import Frames, Settings, SizedImage, Video, files_of
from dhp.data.read.records import Record, Turn

TAKING = FrameSampling(fps=2.0, max_frames=6, group=2)


def frames(folder, count, rate=2.0):
    """Grey images, the brighter the later."""
    for number in range(count):
        Image.new("RGB", (56, 56), (20 * number,) * 3).save(folder / f"{number}.png")
    return Frames(tuple(folder / f"{number}.png" for number in range(count)), rate)


def levels(images):
    return [image.getpixel((0, 0))[0] // 20 for image in images]


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1, [[0, 0]]),
        (2, [[0, 1]]),
        (3, [[0, 1], [2, 2]]),
        (5, [[0, 1], [2, 3], [4, 4]]),
        (6, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_all_frames_are_shown_and_the_last_fills_the_group(tmp_path, count, shown, both_ends):
    taking = replace(TAKING, both_ends=both_ends)
    found, pace = map_images(frames(tmp_path, count), taking, levels)
    extent = extent_of_images(frames(tmp_path, count), taking)
    assert found == shown and (extent.frames, extent.width, extent.height) == (2 * len(shown), 56, 56)
    assert extent.pace == pace and pace.seconds == 1.0 and pace.firsts == tuple(map(float, range(len(shown))))


def test_more_frames_than_are_taken_are_taken_evenly(tmp_path):
    found, pace = map_images(frames(tmp_path, 12, rate=4.0), TAKING, levels)
    assert found == [[0, 2], [4, 6], [8, 10]] and pace.firsts == (0.0, 1.0, 2.0)


def test_frames_of_two_sizes_are_refused_before_and_after(tmp_path):
    listed = frames(tmp_path, 4)
    Image.new("RGB", (28, 56)).save(tmp_path / "3.png")
    for look in (lambda: map_images(listed, TAKING, levels), lambda: extent_of_images(listed, TAKING)):
        with pytest.raises(DataError, match=r"of 56 × 56 and 28 × 56 pixels \(at .*3\.png\)"):
            look()


@pytest.mark.parametrize(
    ("part", "indices", "firsts"),
    [
        ({}, [0, 4, 8, 12, 16, 20], (0.0, 1.0, 2.0)),
        ({"start": 1.0}, [8, 12, 16, 20], (1.0, 2.0)),
        ({"start": 1.01}, [9, 12, 16, 20], (1.125, 2.0)),
        ({"end": 1.0}, [0, 2, 4, 6], (0.0, 0.5)),
        ({"start": 0.5, "end": 1.5}, [4, 6, 8, 10], (0.5, 1.0)),
        ({"start": 2.8, "end": 9.0}, [23], (2.875,)),
    ],
)
def test_a_part_of_a_video_is_taken_as_a_video_of_its_length(part, indices, firsts):
    """24 frames, 8 a second."""
    taking = replace(TAKING, **part)
    assert taking.indices(24, 8.0).tolist() == indices and taking.pace(24, 8.0).firsts == firsts


def test_seconds_that_are_a_frame_but_for_rounding_are_that_frame():
    assert 2.2 * 25.0 > 55 and 1.16 * 25.0 < 29
    taking = replace(TAKING, fps=25.0, max_frames=100, both_ends=True)
    assert replace(taking, start=2.2).indices(100, 25.0)[0] == 55
    assert replace(taking, end=1.16).indices(100, 25.0)[-1] == 29


@pytest.mark.parametrize("part", [{"start": 3.0}, {"start": 5.0, "end": 6.0}, {"start": 0.01, "end": 0.02}])
def test_a_part_without_a_frame_is_refused(part):
    with pytest.raises(DataError, match="no frame of the video, which is 3.00 s long, is between"):
        replace(TAKING, **part).indices(24, 8.0)


BOTH_ENDS = FrameSampling(2.0, 768, 2, both_ends=True)
UNEVEN = (*(number / 10 for number in range(20)), 12.0, 22.0)  # 20 frames in two seconds, and two later


@pytest.mark.parametrize(
    ("part", "indices", "middles"),
    [
        ({}, [0, 5, 10, 15, 19, 20, 21], (0.25, 1.25, 6.95, 22.0)),
        ({"start": 11.0, "end": 13.0}, [20], (12.0,)),
        ({"start": 13.0, "end": 14.0}, [20], (12.0,)),  # which is shown until the last one begins
        ({"end": 1.9}, [0, 6, 13, 19], (0.3, 1.6)),
        ({"start": 1.9}, [19, 20, 21], (6.95, 22.0)),
        ({"max_frames": 2}, [0, 21], (11.0,)),
    ],
)
def test_frames_that_are_uneven_are_taken_and_told_by_their_times(part, indices, middles):
    taking, length = replace(BOTH_ENDS, **part), (22, 22 / 22.5, UNEVEN)
    assert taking.indices(*length).tolist() == indices
    assert taking.pace(*length).times == pytest.approx(middles)
    every = replace(taking, group=1).pace(*length)
    assert every.firsts == tuple(UNEVEN[index] for index in indices)


def test_seconds_between_steps_are_those_of_uneven_frames():
    assert BOTH_ENDS.pace(22, 1.0, UNEVEN).seconds == pytest.approx(2 * 22.0 * 22 / 21 / 7)
    with pytest.raises(DataError, match="no frame of the video"):
        replace(BOTH_ENDS, start=24.0).indices(22, 1.0, UNEVEN)


def record(part):
    return Record("set", 1, "here", (Turn("user", (part, "What?")), Turn("assistant", ("A.",))))


@pytest.fixture
def parts(tmp_path, write_video):
    video, picture = write_video(tmp_path / "v.mp4", frames=24, rate=8, size=(112, 112)), tmp_path / "p.png"
    Image.effect_noise((168, 168), 50).convert("RGB").save(picture)
    settings = {
        "max_pixels": Settings(max_pixels=56 * 56), "fps": Settings(fps=4.0), "frames": Settings(frames=6),
        "part": Settings(start=0.5, end=1.5, fps=8.0), "min_pixels": Settings(min_pixels=140 * 140),
    }  # fmt: skip
    shown = {f"video, {name}": Video(video, one) for name, one in settings.items()}
    shown |= {f"image, {name}": SizedImage(picture, settings[name]) for name in ("max_pixels", "min_pixels")}
    return shown | {
        "frames": Video(frames(tmp_path, 5)),
        "frames, part": Video(frames(tmp_path, 6), Settings(start=1.0)),
    }


def test_a_sample_is_as_long_as_measured(parts, preprocessor):
    preprocess, found = preprocessor(), {}
    for name, part in parts.items():
        sample, length = preprocess(record(part)), preprocess.measure(record(part))
        assert (length.text, length.vision) == (len(sample.input_ids), int((sample.mm_token_type_ids > 0).sum())), name
        assert length.encoded_bytes == sum(file.stat().st_size for file in files_of(part)), name
        found[name] = sample.grids[0]
    assert found == {
        "video, max_pixels": (3, 4, 4), "video, fps": (6, 8, 8), "video, frames": (3, 8, 8), "video, part": (4, 8, 8),
        "video, min_pixels": (3, 10, 10), "image, max_pixels": (1, 4, 4), "image, min_pixels": (1, 12, 12),
        "frames": (3, 4, 4), "frames, part": (2, 4, 4),
    }  # fmt: skip


def test_parts_of_a_long_video_have_the_settings_of_the_whole(parts, preprocessor):
    whole, apart = preprocessor(), preprocessor(whole_frames=2)
    for name, part in parts.items():
        left = apart(record(part))
        assert isinstance(left.pixels[0], LongVideo) == name.startswith("video"), name
        (read,), (expected,) = apart.pictures.complete(left).pixels, whole(record(part)).pixels
        assert np.array_equal(read, expected) and left.grids == whole(record(part)).grids, name
