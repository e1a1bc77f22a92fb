"""A picture is found by its own bytes and by all that decides its features; nothing else is ever found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dhp.core.batch import Features, ProcessorOutput
from dhp.data.media.frames import FrameTimes
from dhp.data.media.sources import Blob, Frames, Settings, SizedImage, Video
from dhp.data.read.records import Record, Turn
from dhp.data.sample import picture_inputs
from dhp.data.sample.picture_inputs import CachedPictures, key_of, seen_from_json, seen_to_json
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Sample

Make = Callable[..., Preprocessor]
NAMES = ("embeddings", "deepstack.0")


class Shelf(dict):
    """What is kept, by key."""

    def load(self, key: str) -> Features | None:
        return self.get(key)

    def keep(self, sample: Sample) -> None:
        """Features of all of a sample's pictures, as many rows as they have tokens."""
        for features, grid in zip(sample.features, sample.grids, strict=True):
            rows = torch.rand(int(np.prod(grid)) // 4, 8)
            self[features.key] = replace(features, tensors=dict.fromkeys(NAMES, rows))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def kept(shelf: Shelf, tower: str = "tower", about: tuple = ("qwen",)) -> CachedPictures:
    return CachedPictures(tower, shelf.load, NAMES, about)


def record(*parts: Any) -> Record:
    return Record("set", 1, "here", (Turn("user", ("Is it blue?", *parts)), Turn("assistant", ("You are red",))))


def test_a_kept_picture_is_not_decoded(
    shelf: Shelf, images: Path, tmp_path: Path, write_video: Callable[..., Path], preprocessor: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shown = record(images / "a.png", images / "b.jpg", Video(write_video(tmp_path / "v.mp4")))
    plain, make = preprocessor()(shown), preprocessor(kept=kept(shelf))
    cold = make(shown)
    assert plain.features == () and [one.tensors for one in cold.features] == [None] * 3
    assert len({one.key for one in cold.features}) == 3
    assert all(map(np.array_equal, cold.pixels, plain.pixels))
    shelf.keep(cold)
    for name in ("open_image", "map_frames"):
        monkeypatch.setattr(picture_inputs, name, lambda *_: pytest.fail("decoded"))
    warm = make(shown)
    assert [one is shelf[one.key] for one in warm.features] == [True] * 3
    assert [len(pixels) for pixels in warm.pixels] == [0, 0, 0]
    for name in ("input_ids", "labels", "mm_token_type_ids"):
        assert np.array_equal(getattr(warm, name), getattr(plain, name))
    assert (warm.grids, warm.seconds, warm.patches) == (plain.grids, plain.seconds, plain.patches)
    assert plain.patches == sum(map(len, plain.pixels))


def test_the_same_bytes_are_the_same_picture_wherever_they_are(shelf: Shelf, images: Path, preprocessor: Make) -> None:
    make, path = preprocessor(kept=kept(shelf)), images / "a.png"
    (copied,) = make(record(Blob("in the annotation", path.read_bytes()))).features
    (own,) = make(record(path)).features
    assert own.key == copied.key


def test_other_pixels_have_another_key(shelf: Shelf, images: Path, preprocessor: Make) -> None:
    make, path = preprocessor(kept=kept(shelf)), images / "a.png"
    shelf.keep(make(record(path)))
    assert len(make(record(path)).pixels[0]) == 0
    with Image.open(path) as image:
        changed = image.copy()
    changed.putpixel((3, 5), (200, 30, 41))
    changed.save(path)
    assert len(make(record(path)).pixels[0]) > 0


@pytest.mark.parametrize(
    "changes, about",
    [
        ({"min_pixels": 28 * 28}, {}),
        ({"max_pixels": 140 * 140}, {}),
        ({"image_arguments": {"do_normalize": False}}, {}),
        ({}, {"tower": "other weights"}),
        ({}, {"about": ("glm",)}),
    ],
    ids=["min_pixels", "max_pixels", "arguments", "weights", "family"],
)
def test_whatever_decides_features_changes_the_key(
    changes: dict, about: dict, shelf: Shelf, images: Path, preprocessor: Make
) -> None:
    shown = record(images / "a.png")
    shelf.keep(preprocessor(kept=kept(shelf))(shown))
    assert len(preprocessor(kept=kept(shelf))(shown).pixels[0]) == 0
    assert len(preprocessor(kept=kept(shelf, **about), **changes)(shown).pixels[0]) > 0


def test_other_frames_of_a_video_have_another_key(
    shelf: Shelf, tmp_path: Path, write_video: Callable[..., Path], preprocessor: Make
) -> None:
    shown, make = record(Video(write_video(tmp_path / "v.mp4", frames=16))), preprocessor(kept=kept(shelf))
    shelf.keep(make(shown))
    assert len(make(shown).pixels[0]) == 0
    seen = make._videos
    fewer = replace(seen, taking=replace(seen.taking, fps=1.0))
    assert len(preprocessor(kept=kept(shelf), videos=fewer)(shown).pixels[0]) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda found: replace(found, about="[]"),
        lambda found: replace(found, tensors={"embeddings": found.tensors["embeddings"]}),
        lambda found: replace(found, tensors={name: rows[1:] for name, rows in found.tensors.items()}),
    ],
    ids=["no layout", "a tensor too few", "a row too few"],
)
def test_what_does_not_fit_the_picture_is_made_anew(
    wrong: Callable, shelf: Shelf, images: Path, preprocessor: Make
) -> None:
    make, shown = preprocessor(kept=kept(shelf)), record(images / "a.png")
    cold = make(shown)
    shelf.keep(cold)
    shelf[cold.features[0].key] = wrong(shelf[cold.features[0].key])
    again = make(shown)
    assert len(again.pixels[0]) > 0
    assert (again.features[0].key, again.features[0].tensors) == (cold.features[0].key, None)


FORM = ProcessorOutput((("pixel_values", (1, 3, 4)),), (("sizes", "int64", (1, 2), b"\x00\xff"),), 3, 7, "<image>")


@pytest.mark.parametrize(
    "seen",
    [((1, 4, 6), None), ((2, 4, 6), FrameTimes(0.1 + 0.2, (0.1, 1 / 3), (0.0, 0.7))), (FORM, None)],
    ids=["image", "video", "form"],
)
def test_what_is_seen_comes_back(seen: tuple) -> None:
    assert seen_from_json(seen_to_json(*seen)) == seen


@pytest.mark.parametrize("text", ["", "[]", "[[1, 2], null]", '[{"pixels": []}, null]', "7"])
def test_another_text_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        seen_from_json(text)


def test_every_part_of_a_key_counts() -> None:
    parts = ("tower", "seen", "image", b"1")
    others = ("tower2", "seen2", "video", b"2")
    keys = {key_of(*parts), *(key_of(*parts[:n], others[n], *parts[n + 1 :]) for n in range(4))}
    assert len(keys) == 5 and all(len(key) == 64 for key in keys)
    assert key_of(*parts) == key_of(*parts)


def test_settings_and_frames_of_a_picture_have_keys_of_their_own(
    shelf: Shelf, images: Path, preprocessor: Make, write_video: Callable[..., Path]
) -> None:
    video, a, c = write_video(images / "v.mp4"), images / "a.png", images / "sub" / "c.png"
    same = Frames((a, a), 2.0)
    parts = [
        c, SizedImage(c, Settings(max_pixels=56 * 56)), Video(video), Video(video, Settings(end=1.0)), Video(same),
        Video(replace(same, rate=1.0)), Video(Frames((a, a, a, a), 2.0)),
    ]  # fmt: skip
    preprocess = preprocessor(kept=kept(shelf))
    made = [preprocess(record(part)) for part in parts]
    assert len({sample.features[0].key for sample in made}) == len(parts)
    for part, sample in zip(parts, made):
        shelf.keep(sample)
        again = preprocess(record(part))
        assert again.grids == sample.grids and again.seconds == sample.seconds and not again.pixels[0].size
