"""In which steps an encoder takes part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dhp.engine.encoder_engine import EncoderEngine


@pytest.mark.parametrize(
    ("images", "clips", "targets", "vision", "audio"),
    [
        (1, 0, 1, True, False),
        (0, 1, 1, False, True),
        (1, 1, 1, True, True),
        (0, 0, 9, False, False),
        (3, 3, 0, False, False),  # nothing is learned, so no rank has a gradient
    ],
)
def test_one_picture_or_clip_of_a_step_with_a_target_is_enough(
    images: int, clips: int, targets: int, vision: bool, audio: bool
) -> None:
    info: Any = SimpleNamespace(images=images, clips=clips, total_weight=targets)
    found = []
    for part in ("vision", "audio"):
        engine = object.__new__(EncoderEngine)
        engine.spec = SimpleNamespace(part=part)
        found.append(engine.is_active(info))
    assert found == [vision, audio]
