"""Samples, images and videos with something changed or cut off, at random but the same things each time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from PIL import Image

from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.images import open_image
from dhp.data.media.sources import Blob, MediaResolver
from dhp.data.media.video import map_frames
from dhp.data.read.annotations import FORMATS, detect, parse_record
from dhp.data.read.formats import renamed
from tests.data.rows import ROWS


@pytest.mark.parametrize("ending", ["PNG", "JPEG", "WEBP", "GIF", "mp4", "mkv"])
def test_damaged_bytes_give_a_picture_or_a_data_error(tmp_path, write_video, ending):
    """Decoders raise whatever such bytes lead them to."""
    if ending.isupper():
        buffer = io.BytesIO()
        Image.effect_noise((40, 40), 50).convert("RGB").save(buffer, ending)
        whole, decode = buffer.getvalue(), open_image
    else:
        whole = write_video(tmp_path / f"v.{ending}").read_bytes()
        decode = lambda blob: map_frames(blob, FrameSampling(2.0, 8, 2), len)
    draw = Random(0)
    for _ in range(60):
        damaged = bytearray(whole[: draw.choice([len(whole), draw.randrange(1, len(whole))])])
        for _ in range(draw.choice([1, 10, 50])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(DataError):
            decode(Blob("x", bytes(damaged)))


TALK = [{"from": "human", "value": "<image>\n<video>What?"}, {"from": "gpt", "value": "A circle."}]
PARTS = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
ANSWER = {"role": "assistant", "content": "A circle."}
SAMPLES = {
    "llava": {"conversations": TALK, "image": "a.png", "video": ["v.mp4"]},
    "sharegpt": {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": ["a.png"], "system": ""},
    "openai": {"messages": [{"role": "user", "content": PARTS}, ANSWER]},
    "alpaca": {"instruction": "<image>?", "input": "x", "output": "y", "history": [["a", "b"]], "images": ["a.png"]},
    "swift": {"query": "?", "response": "y", "history": [["a", "b"]], "images": ["a.png"], "system": "", "objects": {}},
    "unknown": {"text": "What?"},
}
OTHERS = [row.raw for row in ROWS if isinstance(row.raw, dict)]
JUNK = [
    None, 0, 1.5, True, "", [], {}, "x", b"x", b"", [None], {"bytes": 5}, {"path": []}, {"type": []},
    {"url": {"url": 3}}, "data:", "data:image/png,%zz", "data:image/png;base64,é", "http://[", "file://", "://",
    "a" * 5000, "\0", "\ud800", 10**400,
]  # fmt: skip


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner):
        yield value, key
        yield from places_in(item)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_samples_give_a_record_or_a_data_error(tmp_path, form):
    """Types are checked before they are relied on, at every place of a sample."""
    draw = Random(0)
    for _ in range(3000):
        raw = deepcopy(draw.choice([SAMPLES.get(form, {"text": "A square is red."}), *OTHERS]))
        for _ in range(draw.choice([1, 2, 3])):
            container, key = draw.choice(list(places_in(raw)) or [({"": 0}, "")])
            container[key] = deepcopy(draw.choice(JUNK))
        assert detect([raw]) in FORMATS
        with suppress(DataError):
            members = draw.choice([None, {}])
            raw = renamed(raw, draw.choice([{}, {"messages": "instruction", "role": "content"}]))
            parse_record(raw, "set", 1, "here", form, MediaResolver(draw.choice([None, tmp_path]), members=members))
