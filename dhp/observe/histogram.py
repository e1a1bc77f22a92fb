"""Histograms as a picture, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 900, 300  # of one histogram, pixels
LEFT, BOTTOM, TOP = 70, 50, 40
BINS = 60
INK, BAR, LINE = (40, 40, 40), (66, 113, 174), (200, 80, 60)
CUT = 0.999  # quantile where the axis ends, so that one long sample does not press all others into a bin


def draw_histograms(values: Mapping[str, np.ndarray], path: Path) -> None:
    """One histogram below another, PNG. values: numbers >= 0 by title, not empty."""
    image = Image.new("RGB", (WIDTH, HEIGHT * len(values)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for number, (title, numbers) in enumerate(values.items()):
        _draw(draw, font, title, numbers, number * HEIGHT)
    image.save(path, format="PNG")


def _draw(draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont, title: str, numbers: np.ndarray, top: int) -> None:
    most = max(float(np.quantile(numbers, CUT)), 1.0)
    counts, edges = np.histogram(np.minimum(numbers, most), BINS, (0.0, most))
    right, floor, ceiling = WIDTH - 20, top + HEIGHT - BOTTOM, top + TOP
    across = (right - LEFT) / most
    for count, begin, end in zip(counts, edges[:-1], edges[1:]):
        height = (floor - ceiling) * count / counts.max()
        draw.rectangle((LEFT + begin * across, floor - height, LEFT + end * across - 1, floor), fill=BAR)
    draw.line((LEFT, floor, right, floor), fill=INK)
    told = f"{title}: {len(numbers)} samples, mean {numbers.mean():.0f}, longest {numbers.max():.0f}"
    draw.text((LEFT, top + 8), told, fill=INK, font=font)
    draw.text((LEFT - 8, ceiling), str(counts.max()), fill=INK, font=font, anchor="ra")
    draw.text((LEFT - 8, floor), "0", fill=INK, font=font, anchor="rs")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        draw.text((LEFT + share * most * across, floor + 8), f"{share * most:.0f}", fill=INK, font=font, anchor="ma")
    mean = LEFT + min(float(numbers.mean()), most) * across
    draw.line((mean, ceiling, mean, floor), fill=LINE, width=2)
