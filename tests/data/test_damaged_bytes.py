"""Images and videos with some bytes changed or cut off, at random but the same ones each time."""

from __future__ import annotations

import io
from contextlib import suppress
from random import Random

import pytest
from PIL import Image

from dhp.data.images import open_image
from dhp.data.media import Blob
from dhp.data.video import Taking, map_frames
from dhp.errors import DataError


@pytest.mark.parametrize("ending", ["PNG", "JPEG", "WEBP", "GIF", "mp4", "mkv"])
def test_damaged_bytes_give_a_picture_or_a_data_error(tmp_path, write_video, ending):
    """Decoders raise whatever such bytes lead them to."""
    if ending.isupper():
        buffer = io.BytesIO()
        Image.effect_noise((40, 40), 50).convert("RGB").save(buffer, ending)
        whole, decode = buffer.getvalue(), open_image
    else:
        whole = write_video(tmp_path / f"v.{ending}").read_bytes()
        decode = lambda blob: map_frames(blob, Taking(2.0, 8, 2), len)
    draw = Random(0)
    for _ in range(60):
        damaged = bytearray(whole[: draw.choice([len(whole), draw.randrange(1, len(whole))])])
        for _ in range(draw.choice([1, 10, 50])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(DataError):
            decode(Blob("x", bytes(damaged)))
