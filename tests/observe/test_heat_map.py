"""A table of shares as a picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from dhp.observe.plots import MAP_CELL, MAP_LEFT, MAP_TOP, draw_heat_map


def test_cells_have_the_colours_of_their_shares(tmp_path: Path) -> None:
    draw_heat_map([[0.0, 1.0], [0.5, 0.75]], ["8", "16"], ["0", "1"], "found", "frames", "depth", tmp_path / "m.png")
    with Image.open(tmp_path / "m.png") as drawn:
        image = drawn.convert("RGB")
    corner = lambda row, column: image.getpixel((MAP_LEFT + MAP_CELL[0] * column + 6, MAP_TOP + MAP_CELL[1] * row + 6))
    red, green = corner(0, 0), corner(0, 1)
    assert red[0] > red[1] + 60 and green[1] > green[0] + 60
    assert corner(1, 0) == (255, 255, 255)
    assert green[0] < corner(1, 1)[0] < 255
