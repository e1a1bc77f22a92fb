"""A table of shares as a picture, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CELL, LEFT, TOP, BOTTOM, RIGHT = (72, 44), 96, 48, 64, 24  # pixels
INK = (40, 40, 40)
_COLD, _WARM = (214, 96, 77), (90, 174, 97)  # of the shares 0 and 1


def draw_heat_map(
    shares: Sequence[Sequence[float]],
    columns: Sequence[str],
    rows: Sequence[str],
    title: str,
    across: str,
    down: str,
    path: Path,
) -> None:
    """Write a PNG. shares: of each row, one for each column, 0 to 1. across, down: what the two axes say."""
    width, height = LEFT + CELL[0] * len(columns) + RIGHT, TOP + CELL[1] * len(rows) + BOTTOM
    font = ImageFont.load_default(14)
    image = Image.new("RGB", (max(width, round(font.getlength(title)) + 2 * RIGHT), height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((RIGHT, TOP / 2), title, fill=INK, font=font, anchor="lm")
    for r, (name, values) in enumerate(zip(rows, shares, strict=True)):
        y = TOP + CELL[1] * r
        draw.text((LEFT - 8, y + CELL[1] / 2), name, fill=INK, font=font, anchor="rm")
        for c, share in enumerate(values):
            x = LEFT + CELL[0] * c
            draw.rectangle((x + 1, y + 1, x + CELL[0] - 1, y + CELL[1] - 1), fill=_colour(share))
            draw.text((x + CELL[0] / 2, y + CELL[1] / 2), f"{share:.0%}", fill=INK, font=font, anchor="mm")
    floor = TOP + CELL[1] * len(rows)
    for c, name in enumerate(columns):
        draw.text((LEFT + CELL[0] * (c + 0.5), floor + 14), name, fill=INK, font=font, anchor="mm")
    draw.text((LEFT, floor + 42), across, fill=INK, font=font, anchor="lm")
    draw.text((8, floor + 14), down, fill=INK, font=font, anchor="lm")
    image.save(path, format="PNG")


def _colour(share: float) -> tuple[int, ...]:
    """From cold over white to warm."""
    far = abs(2 * share - 1)
    end = _WARM if share > 0.5 else _COLD
    return tuple(round(255 + (value - 255) * far) for value in end)
