"""Drawings as data: shapes in pixels, written as SVG, which follows a page's colours, or as a PNG on white."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dhp.core.text import harmless

# Colours that differ for most eyes (Okabe and Ito), then the ink of axes and that of a grid. The page's style
# has them as variables, so that they can be others in the dark.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#8f7ee7", "#333333", "#dddddd")
INK, GRID = 8, 9
_FONT = 12  # pixels


@dataclass(frozen=True)
class Box:
    """A filled rectangle. title: is shown where a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    title: str = ""


@dataclass(frozen=True)
class Polyline:
    """A line through points (x, y)."""

    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    thin: bool = False


@dataclass(frozen=True)
class Dot:
    """A point that may lead somewhere. link: an address of the page."""

    x: float
    y: float
    colour: int
    title: str = ""
    link: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text. anchor: start, middle or end of it is at x; upright: it is turned to the left."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    upright: bool = False


@dataclass(frozen=True)
class Pixels:
    """A picture of values: uint8 [rows, columns, 3]."""

    x: float
    y: float
    width: float
    height: float
    values: np.ndarray


Shape = Box | Polyline | Dot | Label | Pixels


@dataclass(frozen=True)
class Drawing:
    """A chart. name: of its file; title: what it shows."""

    name: str
    title: str
    width: int
    height: int
    shapes: Sequence[Shape] = field(default_factory=list)

    def svg(self) -> str:
        """As an element of a page, with classes for its colours."""
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">'
        return f"{head}<title>{escape(self.title)}</title>{''.join(map(_element, self.shapes))}</svg>"

    def write_png(self, folder: Path) -> Path:
        """Write `<folder>/<name>.png`, twice as large; its path. Raises OSError."""
        scale = 2
        image = Image.new("RGB", (self.width * scale, self.height * scale), "white")
        draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT * scale)
        for shape in self.shapes:
            _paint(image, draw, font, shape, scale)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.png"
        image.save(path, format="PNG")
        return path


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            inside = f"<title>{_safe(shape.title)}</title>" if shape.title else ""
            where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
            return f'<rect class="f{shape.colour}" {where}>{inside}</rect>'
        case Polyline():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            more = " dashed" * shape.dashed + " thin" * shape.thin
            return f'<polyline class="l{shape.colour}{more}" points="{points}"/>'
        case Dot():
            inside = f"<title>{_safe(shape.title)}</title>" if shape.title else ""
            dot = f'<circle class="f{shape.colour}" cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="3">{inside}</circle>'
            return f'<a href="{escape(shape.link)}">{dot}</a>' if shape.link else dot
        case Label():
            turned = f' transform="rotate(-90 {shape.x:.1f} {shape.y:.1f})"' if shape.upright else ""
            where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
            return f"<text {where}{turned}>{_safe(shape.text)}</text>"
        case Pixels():
            where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
            return f'<image {where} preserveAspectRatio="none" class="pixels" href="{address(shape.values)}"/>'


def address(values: np.ndarray) -> str:
    """A picture of uint8 [rows, columns, 3] as an address that has it inside."""
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _safe(text: str) -> str:
    return escape(harmless(text))


def _paint(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    shape: Shape,
    scale: int,
) -> None:
    match shape:
        case Box():
            left, top = shape.x * scale, shape.y * scale
            right, bottom = left + shape.width * scale, top + shape.height * scale
            draw.rectangle((left, top, max(left, right), max(top, bottom)), fill=PALETTE[shape.colour])
        case Polyline():
            points = [(x * scale, y * scale) for x, y in shape.points]
            width = scale if shape.thin else 2 * scale
            for start, end in _pieces(points, shape.dashed, 6 * scale):
                draw.line((start, end), fill=PALETTE[shape.colour], width=width)
        case Dot():
            x, y, r = shape.x * scale, shape.y * scale, 3 * scale
            draw.ellipse((x - r, y - r, x + r, y + r), fill=PALETTE[shape.colour])
        case Label():
            _write(image, draw, font, shape, scale)
        case Pixels():
            size = (max(1, round(shape.width * scale)), max(1, round(shape.height * scale)))
            scaled = Image.fromarray(shape.values).resize(size, Image.Resampling.NEAREST)
            image.paste(scaled, (round(shape.x * scale), round(shape.y * scale)))


def _pieces(
    points: Sequence[tuple[float, float]], dashed: bool, length: float
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        count = max(1, int(np.hypot(x1 - x0, y1 - y0) / length)) if dashed else 1
        for number in range(0, count, 2 if dashed and count > 1 else 1):
            a, b = number / count, (number + 1) / count
            yield (x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)


def _write(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    label: Label,
    scale: int,
) -> None:
    text, x, y = harmless(label.text), label.x * scale, label.y * scale
    if not label.upright:
        draw.text(
            (x, y),
            text,
            fill=PALETTE[INK],
            font=font,
            anchor={"start": "ls", "middle": "ms", "end": "rs"}[label.anchor],
        )
        return
    left, top, right, bottom = font.getbbox(text)
    strip = Image.new("RGB", (int(right - left) + 4, int(bottom - top) + 4), "white")
    ImageDraw.Draw(strip).text((2 - left, 2 - top), text, fill=PALETTE[INK], font=font)
    turned = strip.rotate(90, expand=True)
    offset = {"start": turned.height, "middle": turned.height // 2, "end": 0}[label.anchor]
    image.paste(turned, (round(x - turned.width + 4), round(y - offset)))
