"""Drawings as SVG and as PNG: the same shapes, text escaped."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from dhp.report.charts import Box, Dot, Drawing, Label, Pixels, Polyline

SHAPES = [
    Box(10, 10, 30, 20, 2, "a <b>"),
    Polyline(((0, 0), (50, 50)), 0, dashed=True),
    Dot(5, 5, 1, "five", "#step-5"),
    Label(20, 40, "text & more", "middle"),
    Label(8, 60, "upright", upright=True),
    Pixels(60, 10, 20, 20, np.full((2, 2, 3), 200, dtype=np.uint8)),
]


def test_svg_is_well_formed_and_escapes_text() -> None:
    root = ElementTree.fromstring(Drawing("d", "A <title>", 100, 80, SHAPES).svg())
    assert root.attrib["viewBox"] == "0 0 100 80"
    assert [one.tag for one in root] == ["title", "rect", "polyline", "a", "text", "text", "image"]
    assert root[1][0].text == "a <b>" and root[4].text == "text & more" and root[3].attrib["href"] == "#step-5"
    assert root[6].attrib["href"].startswith("data:image/png;base64,")


def test_a_control_character_is_shown_not_written() -> None:
    assert "\\x1b" in Drawing("d", "D", 10, 10, [Label(0, 0, "a\x1b[31m")]).svg()


def test_png_has_the_same_shapes_twice_as_large(tmp_path: Path) -> None:
    path = Drawing("d", "D", 100, 80, SHAPES).write_png(tmp_path / "charts")
    image = Image.open(path)
    assert path == tmp_path / "charts" / "d.png" and image.size == (200, 160)
    assert image.getpixel((50, 40)) == (0, 158, 115)  # the box, in its colour
    assert image.getpixel((140, 40)) == (200, 200, 200) and image.getpixel((190, 150)) == (255, 255, 255)
