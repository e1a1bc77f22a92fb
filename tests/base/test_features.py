"""Keys differ with all that decides features; a picture's layout comes back as it was."""

from __future__ import annotations

import pytest

from dhp.base.features import Layout, key_of
from dhp.base.geometry import Form

FORM = Form((("pixel_values", (1, 3, 4)),), (("sizes", "int64", (1, 2), b"\x00\xff"),), 3, 7, "<image>")


@pytest.mark.parametrize(
    "layout",
    [Layout((1, 4, 6)), Layout((2, 4, 6), 0.1 + 0.2, (0.1, 1 / 3), (0.0, 0.7)), Layout(FORM)],
    ids=["image", "video", "form"],
)
def test_a_layout_comes_back(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("text", ["", "[]", "[[1, 2], null, [], []]", '[{"pixels": []}, null, [], []]', "7"])
def test_another_text_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Layout.from_json(text)


def test_every_part_of_a_key_counts() -> None:
    parts = ("tower", "seen", "image", b"1")
    others = ("tower2", "seen2", "video", b"2")
    keys = {key_of(*parts), *(key_of(*parts[:n], others[n], *parts[n + 1 :]) for n in range(4))}
    assert len(keys) == 5 and all(len(key) == 64 for key in keys)
    assert key_of(*parts) == key_of(*parts)
