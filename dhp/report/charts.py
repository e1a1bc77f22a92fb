"""Draws charts of numbers as SVG or PNG."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        image.save(path := folder / f"{self.name}.png", format="PNG")
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


WIDTH, HEIGHT = 760, 260  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 40
MOST_POINTS = 400  # of a line: of more, the mean, the least and the most of each stretch are drawn
BAR, GAP = 18, 8  # pixels
COLUMNS = 240  # of a heat map


@dataclass(frozen=True)
class Line:
    """A series over steps. A value that is not finite is left out. points: steps whose points can be opened, and where
    they lead to."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    dashed: bool = False
    links: Mapping[int, str] | None = None


@dataclass(frozen=True)
class Bar:
    """A value, and the least and the most of what was measured of it: the value itself where it was measured once."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Scale:
    """From a value to a pixel."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.first + (self.last - self.first) * (value - self.low) / (self.high - self.low)


def line_chart(name: str, title: str, lines: Sequence[Line], unit: str, zero: bool = False) -> Drawing:
    """Lines over steps. unit: of the values. zero: the axis begins there."""
    lines = [_finite(line) for line in lines]
    values = [value for line in lines for value in line.values] or [0.0]
    steps = [step for line in lines for step in line.steps] or [0]
    low, high = _range(min(values), max(values), zero)
    across = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    shapes = draw_axes(across, up, "step", unit, whole=True)
    for colour, line in enumerate(lines):
        points = thinned(line.steps, line.values)
        band = [(step, least, most) for step, _, least, most in points if least < most]
        shapes += [
            Polyline(((across(step), up(least)), (across(step), up(most))), colour, thin=True)
            for step, least, most in band
        ]
        shapes.append(Polyline([(across(step), up(mean)) for step, mean, _, _ in points], colour, line.dashed))
        shapes += _dots(line, across, up, colour)
    return Drawing(name, title, WIDTH, HEIGHT, [*shapes, *name_series([line.name for line in lines])])


def _dots(line: Line, across: Scale, up: Scale, colour: int) -> list[Shape]:
    known = dict(zip(line.steps, line.values, strict=True))
    return [
        Dot(across(step), up(known[step]), colour, f"step {step}: {known[step]:.4g}", link)
        for step, link in (line.links or {}).items()
        if step in known
    ]


def _finite(line: Line) -> Line:
    kept = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if math.isfinite(value)]
    return Line(line.name, [step for step, _ in kept], [value for _, value in kept], line.dashed, line.links)


def thinned(steps: Sequence[int], values: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """At most `MOST_POINTS` of (step, mean, least, most), each of a stretch of steps."""
    if not steps:
        return []
    bounds = np.linspace(0, len(steps), min(len(steps), MOST_POINTS) + 1).astype(int)
    found = []
    for start, stop in zip(bounds, bounds[1:]):
        part = np.asarray(values[start:stop], dtype=float)
        middle = (steps[start] + steps[stop - 1]) / 2
        found.append((middle, float(part.mean()), float(part.min()), float(part.max())))
    return found


def stacked_bars(
    name: str,
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    shown: Callable[[float], str] = "{:.3g}".format,
) -> Drawing:
    """A bar a row, of pieces by their kinds, which have the same colours in all rows; a unit."""
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    most = max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    across, height, shapes = _rows_of_bars(list(rows), most, unit, shown)
    for number, (row, pieces) in enumerate(rows.items()):
        top, at = TOP + 16 + number * (BAR + GAP), 0.0
        for kind, value in pieces.items():
            start, stop = across(at), across(at + value)
            shapes.append(
                Box(start, top, stop - start, BAR, kinds.index(kind) % INK, f"{row}, {kind}: {shown(value)} {unit}")
            )
            at += value
    return Drawing(name, title, WIDTH, height, [*shapes, *name_series(kinds)])


def spread_bars(name: str, title: str, bars: Mapping[str, Bar], unit: str) -> Drawing:
    """A bar a name, with a line from the least to the most that was measured of it. Raises ValueError for a negative
    value, or one that is not finite."""
    for row, bar in bars.items():
        if not (0 <= bar.least <= bar.value <= bar.most < math.inf):
            raise ValueError(f"{row}: {bar} is no bar: 0 ≤ least ≤ value ≤ most, all finite")
    most = max((bar.most for bar in bars.values()), default=0.0) or 1.0
    across, height, shapes = _rows_of_bars(list(bars), most, unit, "{:.3g}".format)
    for number, (row, bar) in enumerate(bars.items()):
        top, start = TOP + 16 + number * (BAR + GAP), across(0.0)
        spread = "" if bar.least == bar.most else f" ({bar.least:.3g} to {bar.most:.3g})"
        shapes.append(Box(start, top, across(bar.value) - start, BAR, 0, f"{row}: {bar.value:.3g}{spread} {unit}"))
        if spread:
            ends, middle = (across(bar.least), across(bar.most)), top + BAR / 2
            shapes.append(Polyline(((ends[0], middle), (ends[1], middle)), INK, thin=True))
            shapes += [Polyline(((end, middle - 4), (end, middle + 4)), INK, thin=True) for end in ends]
    return Drawing(name, title, WIDTH, height, [*shapes, Label(LEFT, 17, title)])


def _rows_of_bars(
    names: Sequence[str], most: float, unit: str, shown: Callable[[float], str]
) -> tuple[Scale, int, list[Shape]]:
    """The scale, the height and the axes of bars below one another, from 0 to the largest value."""
    left = 20 + 7 * max(map(len, names), default=0)
    across, height = Scale(0.0, most, left, WIDTH - RIGHT), TOP + 16 + (BAR + GAP) * len(names) + BOTTOM
    shapes: list[Shape] = []
    for tick in ticks(0.0, most):
        shapes.append(Polyline(((across(tick), TOP + 10), (across(tick), height - BOTTOM)), GRID, thin=True))
        shapes.append(Label(across(tick), height - BOTTOM + 16, shown(tick), "middle"))
    shapes.append(Label((left + WIDTH - RIGHT) / 2, height - 6, unit, "middle"))
    for number, row in enumerate(names):
        shapes.append(Label(left - 8, TOP + 16 + number * (BAR + GAP) + BAR - 5, row, "end"))
    return across, height, shapes


def heat_map(
    name: str, title: str, rows: Sequence[str], steps: Sequence[int], values: np.ndarray, unit: str
) -> Drawing:
    """values [rows, steps]: 1 is as it should be, white; more is red, less is blue, NaN grey. From `COLUMNS` steps on a
    column is the mean of several."""
    bounds = np.linspace(0, len(steps), min(len(steps), COLUMNS) + 1).astype(int)
    means = np.stack([_mean(values[:, start:stop]) for start, stop in zip(bounds, bounds[1:])], axis=1)
    left, each = 20 + 7 * max(map(len, rows)), max(4, min(20, 400 // len(rows)))
    bottom, right = TOP + each * len(rows), WIDTH - RIGHT
    shapes: list[Shape] = [Pixels(left, TOP, right - left, bottom - TOP, _colours(means))]
    every = math.ceil(10 / each)
    shapes += [
        Label(left - 8, TOP + each * (number + 0.5) + 4, row, "end")
        for number, row in enumerate(rows)
        if number % every == 0
    ]
    across = Scale(steps[0], max(steps[-1], steps[0] + 1), left, right)
    shapes += [
        Label(across(tick), bottom + 16, f"{tick:g}", "middle") for tick in ticks(steps[0], across.high, whole=True)
    ]
    shapes.append(
        Label((left + right) / 2, bottom + 32, f"step; {unit}: blue less than 1, white 1, red 1.5 and more", "middle")
    )
    return Drawing(name, title, WIDTH, bottom + 40, shapes)


def _mean(values: np.ndarray) -> np.ndarray:
    """Of each row, without NaN; NaN where there is nothing else."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _colours(values: np.ndarray) -> np.ndarray:
    """RGB, uint8 [rows, columns, 3]."""
    heat = np.clip((np.nan_to_num(values, nan=1.0) - 1) / 0.5, -1, 1)[..., None]
    red, blue, white = (np.array(colour, dtype=float) for colour in ((190, 30, 30), (40, 90, 190), (250, 250, 250)))
    mixed = np.where(heat > 0, white + (red - white) * heat, white + (blue - white) * -heat)
    return np.where(np.isfinite(values)[..., None], mixed, 160.0).astype(np.uint8)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(low: float, high: float, zero: bool) -> tuple[float, float]:
    low = min(0.0, low) if zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - (0.0 if zero and low == 0.0 else margin), high + margin


def draw_axes(across: Scale, up: Scale, across_unit: str, up_unit: str, whole: bool = False) -> list[Shape]:
    """Two axes with round numbers, and what they say. whole: across there are whole numbers alone."""
    shapes: list[Shape] = []
    for tick in ticks(up.low, up.high):
        shapes.append(Polyline(((across.first, up(tick)), (across.last, up(tick))), GRID, thin=True))
        shapes.append(Label(across.first - 6, up(tick) + 4, f"{tick:.4g}", "end"))
    for tick in ticks(across.low, across.high, whole=whole):
        shapes.append(Label(across(tick), up.first + 16, f"{tick:.6g}", "middle"))
    shapes.append(
        Polyline(((across.first, up.last), (across.first, up.first), (across.last, up.first)), INK, thin=True)
    )
    shapes.append(Label((across.first + across.last) / 2, up.first + 34, across_unit, "middle"))
    shapes.append(Label(14, (up.first + up.last) / 2, up_unit, "middle", upright=True))
    return shapes


def name_series(names: Sequence[str], top: float = 8) -> list[Shape]:
    """Names of series beside their colours, side by side."""
    shapes: list[Shape] = []
    x = float(LEFT)
    for colour, name in enumerate(names):
        shapes += [Box(x, top, 12, 10, colour % INK), Label(x + 16, top + 9, name)]
        x += 30 + 6.6 * len(name)
    return shapes
