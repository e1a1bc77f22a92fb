"""Pictures of shapes and words, each with one question whose answer only the picture tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

PALETTE = {
    "red": (215, 30, 35), "green": (30, 150, 60), "blue": (35, 70, 215), "yellow": (240, 210, 30),
    "black": (20, 20, 20), "orange": (245, 125, 15), "purple": (130, 20, 150), "brown": (115, 65, 30),
    "grey": (110, 110, 110), "teal": (0, 115, 125),
}  # fmt: skip
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "cross", "bar", "ring", "frame", "diamond", "pole", "corner")
COUNTS = ("one", "two", "three", "four")
PLACES = {"left": (0, 1), "right": (2, 1), "top": (1, 0), "bottom": (1, 2), "middle": (1, 1)}  # cells: column, row
WORDS = ("cat", "sun", "box", "key", "dog")
CELLS = tuple((column, row) for row in range(3) for column in range(3))
SIDE, CELL = 84, 28  # pixels of a picture and of a cell


@dataclass(frozen=True)
class Kind:
    """A question, its answers, and what together with an answer makes a combination. Of these, one with each of the
    first `held` answers is kept from training: of many, so that what is beside an answer says little about it."""

    question: str
    answers: tuple[str, ...]
    beside: tuple[str, ...]
    offset: int = 0
    held: int = 5

    @property
    def asked(self) -> tuple[str, ...]:
        """The answers of held-out questions."""
        return self.answers[: self.held]

    def holds_out(self, answer: str, beside: str) -> bool:
        """Whether the combination is kept from training."""
        return answer in self.asked and self.held_out_with(answer) == beside

    def held_out_with(self, answer: str) -> str:
        """What makes a held-out combination with an answer."""
        return self.beside[(self.answers.index(answer) + self.offset) % len(self.beside)]


KINDS = {
    "shape": Kind("Which shape?", SHAPES, COLOURS),
    "colour": Kind("Which colour?", COLOURS, SHAPES),  # the same combinations
    "count": Kind("How many?", COUNTS, SHAPES),
    "place": Kind("Where?", tuple(PLACES), COLOURS, 5),
    "word": Kind("Which word?", WORDS, COLOURS, 3),
}


@dataclass(frozen=True)
class Scene:
    """What a picture shows: shapes of one colour in cells, or with a word that alone."""

    colour: str
    shape: str = ""
    cells: tuple[tuple[int, int], ...] = ()
    word: str = ""

    def combinations(self) -> Iterator[tuple[str, str, str]]:
        """Of every kind that asks about such a picture: kind, answer, and what is beside it."""
        if self.word:
            yield "word", self.word, self.colour
            return
        yield "shape", self.shape, self.colour
        yield "colour", self.colour, self.shape
        yield "count", COUNTS[len(self.cells) - 1], self.shape
        for place, cell in PLACES.items():
            if self.cells == (cell,):
                yield "place", place, self.colour

    def held_out(self) -> set[str]:
        """Kinds that keep this picture from training."""
        return {kind for kind, answer, beside in self.combinations() if KINDS[kind].holds_out(answer, beside)}


def draw_scene(random: Random, kind: str, answer: str, held_out: bool) -> Scene:
    """A picture for a question with that answer: with the kind's held-out combination, or without any of any kind."""
    while True:
        scene = _any_scene(random, kind, answer, KINDS[kind].held_out_with(answer) if held_out else "")
        if (kind in scene.held_out()) if held_out else not scene.held_out():
            return scene


def _any_scene(random: Random, kind: str, answer: str, beside: str) -> Scene:
    colour, shape = random.choice(COLOURS), random.choice(SHAPES)
    if kind == "word":
        return Scene(beside or colour, word=answer)
    if kind == "place":
        return Scene(beside or colour, shape, (PLACES[answer],))
    if kind == "count":
        return Scene(colour, beside or shape, tuple(random.sample(CELLS, COUNTS.index(answer) + 1)))
    cells = tuple(random.sample(CELLS, random.randint(1, len(COUNTS))))
    return Scene(beside or colour, answer, cells) if kind == "shape" else Scene(answer, beside or shape, cells)


_font = cache(ImageFont.load_default)


def draw(random: Random, scene: Scene) -> Image.Image:
    """The picture of a scene; sizes, tints and exact positions are drawn. The ground is redder to the right and greener
    to the bottom, so that a part of a picture tells where it is: to the tower, places are relative ones alone."""
    image = _ground(random.randint(-4, 4))
    pen, fill = ImageDraw.Draw(image), tuple(part + random.randint(-10, 10) for part in PALETTE[scene.colour])
    if scene.word:
        at = (SIDE / 2 + random.uniform(-2, 2), SIDE / 2 + random.uniform(-2, 2))
        pen.text(at, scene.word, fill=fill, font=_font(32), anchor="mm")
    for column, row in scene.cells:
        x, y = (CELL * (at + 0.5) + random.uniform(-2, 2) for at in (column, row))
        _shape(pen, scene.shape, x, y, random.uniform(9, 12), fill)
    return image


def _ground(tint: int) -> Image.Image:
    across, down = (Image.linear_gradient("L").rotate(turn).resize((SIDE, SIDE)) for turn in (90, 0))
    red, green = (one.point(lambda value: 140 + tint + value * 100 // 255) for one in (across, down))
    return Image.merge("RGB", (red, green, Image.new("L", (SIDE, SIDE), 240 + tint)))


def _shape(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, ...]) -> None:
    box, edge = (x - r, y - r, x + r, y + r), round(r / 3)
    match shape:
        case "circle":
            pen.ellipse(box, fill=fill)
        case "square":
            pen.rectangle(box, fill=fill)
        case "ring":
            pen.ellipse(box, outline=fill, width=edge)
        case "frame":
            pen.rectangle(box, outline=fill, width=edge)
        case "triangle":
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
        case "diamond":
            pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=fill)
        case "corner":
            pen.rectangle((x - r, y - r, x - r / 3, y + r), fill=fill)
            pen.rectangle((x - r, y + r / 3, x + r, y + r), fill=fill)
    if shape in ("bar", "cross"):
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=fill)
    if shape in ("pole", "cross"):
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=fill)


def texts() -> list[str]:
    """Every question and answer."""
    return [text for kind in KINDS.values() for text in (kind.question, *kind.answers)]
