"""Needles: in the frames that they should be in, and in no others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.video import map_frames
from dhp.tiny.made_pictures import (
    NEEDLES,
    PALETTE,
    QUESTION,
    Hidden,
    Needle,
    coloured_needles,
    make_needles,
    write_needles,
)


def frames_of(path: Path) -> list[np.ndarray]:
    return map_frames(path, FrameSampling(2.0, 1000, 1), lambda group: np.asarray(group[0]).astype(int))[0]


def coloured(frame: np.ndarray) -> bool:
    """Grey frames have three equal channels, but for what the codec makes of them."""
    return float((frame.max(-1) - frame.min(-1)).mean()) > 60


@pytest.mark.parametrize(("frames", "depth", "first"), [(12, 0.0, 0), (12, 1.0, 10), (12, 0.5, 4), (4, 0.4, 0)])
def test_a_needle_fills_one_step_in_time(tmp_path: Path, frames: int, depth: float, first: int) -> None:
    needle = next(one for one in coloured_needles() if one.answer == "green")
    path = write_needles(tmp_path, [Hidden(needle, frames, depth, 3)])
    seen = frames_of(tmp_path / "00000.mp4")
    assert len(seen) == frames
    assert [number for number, frame in enumerate(seen) if coloured(frame)] == [first, first + 1]
    assert np.allclose(seen[first].mean((0, 1)), PALETTE["green"], atol=6)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert [turn["content"] for turn in line["messages"]] == [f"<video>{QUESTION}", "green"]
    assert line["videos"] == ["00000.mp4"] and path.name == NEEDLES


def test_a_needle_of_ones_own_in_a_video_of_ones_own(tmp_path: Path) -> None:
    dark = Needle(Image.new("RGB", (30, 20), (0, 0, 0)), "What is odd?", "night")
    write_needles(tmp_path / "hay", [Hidden(dark, 16, 0.0, 1)])
    hay = tmp_path / "hay" / "00000.mp4"
    red = Needle(Image.new("RGB", (30, 20), PALETTE["red"]), "Which?", "red")
    write_needles(tmp_path / "own", [Hidden(red, 8, 1.0, 0)], hay)
    seen = frames_of(tmp_path / "own" / "00000.mp4")
    assert [coloured(frame) for frame in seen] == [False] * 6 + [True] * 2
    taken = frames_of(hay)[::2]
    assert all(np.abs(mine - theirs).mean() < 8 for mine, theirs in zip(seen[:6], taken, strict=False))
    with pytest.raises(DataError, match=r"00000.mp4 has 16 frames, and a haystack of 18 is asked for"):
        write_needles(tmp_path / "long", [Hidden(red, 18, 0.0, 0)], hay)


def test_a_dataset_is_made_once_and_alike(tmp_path: Path) -> None:
    one, other = (make_needles(tmp_path / name, 5, (4, 6), seed=7) for name in ("a", "b"))
    assert (one / NEEDLES).read_text() == (other / NEEDLES).read_text()
    assert {len(frames_of(one / f"{number:05d}.mp4")) for number in range(5)} <= {4, 6}
    (one / "kept").touch()
    make_needles(one, 5, (4, 6), seed=7)
    assert (one / "kept").is_file()
