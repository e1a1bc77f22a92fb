"""Generates pictures with questions, notes, and needles in long videos."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from dhp.core.errors import DataError
from dhp.core.files import new_folder
from dhp.data.media.frames import FrameSampling
from dhp.data.media.images import open_image
from dhp.data.media.sources import pyav
from dhp.data.media.video import map_frames

PALETTE = {
    "red": (215, 30, 35),
    "green": (30, 150, 60),
    "blue": (35, 70, 215),
    "yellow": (240, 210, 30),
    "purple": (140, 45, 165),
    "orange": (245, 135, 25),
    "black": (20, 20, 20),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "cross")

MIN_SIDE, MAX_SIDE = 56, 168  # pixels

# The seven strokes of a digit on a 1 × 2 grid, as (x0, y0, x1, y1):
#     ─0─
#    5   1
#     ─6─
#    4   2
#     ─3─
_STROKES = ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 2), (0, 2, 1, 2), (0, 1, 0, 2), (0, 0, 0, 1), (0, 1, 1, 1))
_DIGITS = ("012345", "12", "01643", "01623", "5612", "05623", "056234", "012", "0123456", "012356")


def draw_shapes(random: Random, shape: str, colours: Sequence[str]) -> Image.Image:
    """One shape of each colour, side by side on a light background."""
    image, draw = _canvas(random, min_width=28 * len(colours))
    cell = image.width / len(colours)
    for column, colour in enumerate(colours):
        radius = min(cell, image.height) * random.uniform(0.3, 0.45)
        x = cell * column + random.uniform(radius, cell - radius)
        y = random.uniform(radius, image.height - radius)
        _draw_shape(draw, shape, x, y, radius, PALETTE[colour])
    return image


def draw_digit(random: Random, value: int, colour: str) -> Image.Image:
    """A digit (0..9) in seven strokes."""
    image, draw = _canvas(random)
    unit = min(image.width / 2, image.height / 3) * random.uniform(0.8, 1.0)
    left, top = (image.width - unit) / 2, (image.height - 2 * unit) / 2
    for stroke in _DIGITS[value]:
        x0, y0, x1, y1 = (unit * end for end in _STROKES[int(stroke)])
        ends = (left + x0, top + y0, left + x1, top + y1)
        draw.line(ends, fill=PALETTE[colour], width=max(4, round(unit / 5)))
    return image


def draw_bars(random: Random, colours: Sequence[str], heights: Sequence[int]) -> Image.Image:
    """A bar chart. heights: tenths of the picture's height, one a colour."""
    image, draw = _canvas(random, min_width=24 * len(colours))
    cell = image.width / len(colours)
    for column, (colour, height) in enumerate(zip(colours, heights)):
        top = image.height * (1 - height / 10.5)
        draw.rectangle((cell * (column + 0.15), top, cell * (column + 0.85), image.height), fill=PALETTE[colour])
    return image


def _canvas(random: Random, min_width: int = MIN_SIDE) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    width = random.randint(max(MIN_SIDE, min_width), MAX_SIDE)
    height = random.randint(MIN_SIDE, MAX_SIDE)
    image = Image.new("RGB", (width, height), tuple(random.randint(225, 255) for _ in range(3)))
    return image, ImageDraw.Draw(image)


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, int, int]
) -> None:
    """Draw a shape centred on (x, y) that reaches r pixels to each side."""
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
    else:
        draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=fill)
        draw.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=fill)


NOTES = "notes.jsonl"
_NUMBERS = range(10, 100)


def make_notes(folder: Path, samples: int, notes: int, seed: int = 0) -> Path:
    """Write a dataset of `samples` conversations, each with so many notes. A folder that is there is left as it is; it
    appears complete or not at all."""
    if not folder.exists():
        random = Random(seed)
        lines = [json.dumps({"messages": _talk(random, notes)}) for _ in range(samples)]
        with new_folder(folder) as partial:
            partial.mkdir()
            (partial / NOTES).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _talk(random: Random, notes: int) -> list[dict[str, str]]:
    things = random.sample([f"{shape} {number}" for shape in SHAPES for number in _NUMBERS], notes)
    colours = random.choices(COLOURS, k=notes)
    facts = " ".join(f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    asked = random.randrange(notes)
    question = f"{facts} What colour is the {things[asked]}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": colours[asked]}]


ANNOTATIONS = "annotations.json"
RECIPE = "recipe.json"
DRAWING_FORMAT = 1  # of the drawings and questions: raise it when they change

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass
class Draft:
    """A sample before it is written: pictures in the order of the <image> tags, and (question, answer) pairs."""

    pictures: list[Image.Image] = field(default_factory=list)
    exchanges: list[tuple[str, str]] = field(default_factory=list)


def make_dataset(folder: Path, samples: int = 256, seed: int = 0) -> Path:
    """Write `samples` conversations in LLaVA format to `folder`: annotations.json and images/; return it.

    One sample in eight has no image, one in eight has two, one in eight has several turns. The same
    samples and seed give the same files. A folder already made with them is left as it is; anything else
    there is a DataError. The folder appears complete or not at all."""
    recipe = {"format": DRAWING_FORMAT, "samples": samples, "seed": seed}
    if not folder.exists():
        with new_folder(folder) as partial:
            _write(partial, samples, seed, recipe)
    _check_recipe(folder, recipe)
    return folder


def texts(folder: Path) -> list[str]:
    """Every question and answer of a generated dataset, for example to train a tokenizer on."""
    annotations = json.loads((folder / ANNOTATIONS).read_text(encoding="utf-8"))
    return [turn["value"] for sample in annotations for turn in sample["conversations"]]


def _check_recipe(folder: Path, recipe: dict[str, int]) -> None:
    path = folder / RECIPE
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if found != recipe:
        raise DataError(
            f"{folder} exists, but was not made with {recipe} (it says {found}). Remove it or choose another folder"
        )


def _write(folder: Path, samples: int, seed: int, recipe: dict[str, int]) -> None:
    (folder / "images").mkdir(parents=True)
    annotations = [_sample(folder, number, Random(f"{seed}/{number}")) for number in range(samples)]
    for name, value in ((ANNOTATIONS, annotations), (RECIPE, recipe)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _sample(folder: Path, number: int, random: Random) -> dict[str, object]:
    """Draw one sample, save its pictures and return its annotation."""
    draft = KINDS[number % len(KINDS)](random)
    names = [f"images/{number:05d}_{index}.{random.choice(('jpg', 'png'))}" for index in range(len(draft.pictures))]
    for name, picture in zip(names, draft.pictures):
        picture.save(folder / name, quality=92)
    turns = [turn for exchange in draft.exchanges for turn in zip(("human", "gpt"), exchange)]
    annotation: dict[str, Any] = {"id": f"{number:05d}"}
    if names:
        annotation["image"] = names[0] if len(names) == 1 else names
    annotation["conversations"] = [{"from": role, "value": text} for role, text in turns]
    first = annotation["conversations"][0]
    first["value"] = "<image>\n" * len(names) + first["value"]
    return annotation


def _colour(random: Random) -> Draft:
    colour, shape = random.choice(COLOURS), random.choice(SHAPES)
    return Draft([draw_shapes(random, shape, [colour])], [(f"What colour is the {shape}?", colour)])


def _shape(random: Random) -> Draft:
    colour, shape = random.choice(COLOURS), random.choice(SHAPES)
    return Draft([draw_shapes(random, shape, [colour])], [(f"Which shape is {colour}?", shape)])


def _count(random: Random) -> Draft:
    count, shape = random.randint(1, 5), random.choice(SHAPES)
    picture = draw_shapes(random, shape, [random.choice(COLOURS)] * count)
    return Draft([picture], [("How many shapes are there?", NUMBER_WORDS[count])])


def _digit(random: Random) -> Draft:
    digit, colour = random.randint(0, 9), random.choice(COLOURS)
    return Draft([draw_digit(random, digit, colour)], [("Which digit is this?", NUMBER_WORDS[digit])])


def _chart(random: Random) -> Draft:
    colours = random.sample(COLOURS, random.randint(2, 4))
    heights = random.sample(range(2, 11), len(colours))
    tallest = colours[heights.index(max(heights))]
    return Draft([draw_bars(random, colours, heights)], [("Which bar is the tallest?", f"the {tallest} bar")])


def _pair(random: Random) -> Draft:
    colours = random.sample(COLOURS, 2)
    pictures = [draw_shapes(random, random.choice(SHAPES), [colour]) for colour in colours]
    return Draft(pictures, [("What colours are the two pictures?", " and ".join(colours))])


def _dialogue(random: Random) -> Draft:
    colour, shape = random.choice(COLOURS), random.choice(SHAPES)
    questions = ["Which shape is this?", "What is its colour?", "How many are there?"]
    answers = [shape, colour, "one"]
    return Draft([draw_shapes(random, shape, [colour])], list(zip(questions, answers))[: random.randint(2, 3)])


def _arithmetic(random: Random) -> Draft:
    a, b = random.randint(0, 5), random.randint(0, 5)
    return Draft([], [(f"What is {NUMBER_WORDS[a]} plus {NUMBER_WORDS[b]}?", NUMBER_WORDS[a + b])])


KINDS: tuple[Callable[[Random], Draft], ...] = (_colour, _shape, _pair, _digit, _dialogue, _chart, _count, _arithmetic)


FPS = 2  # frames of a written video a second
SIDE = 56  # pixels of a made haystack's frames
GROUP = 2  # frames of one step in time, which a needle fills
NEEDLES = "needles.jsonl"
QUESTION = "One frame has a colour. Which?"
_BLOCK = 14  # pixels of a grey block of a made haystack


@dataclass(frozen=True)
class Needle:
    """A picture, with a question about it and its answer."""

    picture: Image.Image
    question: str
    answer: str


@dataclass(frozen=True)
class Hidden:
    """A needle in a video of so many frames. depth: 0 in its first step in time, 1 in its last one. lasts: so many
    frames."""

    needle: Needle
    frames: int
    depth: float
    seed: int
    lasts: int = GROUP


def coloured_needles() -> list[Needle]:
    """Plain frames, each of one colour, for haystacks without any."""
    colours = [name for name in PALETTE if name != "black"]
    return [Needle(Image.new("RGB", (SIDE, SIDE), PALETTE[name]), QUESTION, name) for name in colours]


def read_needle(picture: Path, question: str, answer: str) -> Needle:
    """A needle of the user's. Raises DataError for a file that is no image."""
    return Needle(open_image(picture), question, answer)


def make_needles(folder: Path, samples: int, frames: Sequence[int], seed: int = 0) -> Path:
    """Write a dataset to learn from: `samples` needles at random depths, each in a video of one of these lengths.

    A folder that is there is left as it is; it appears complete or not at all."""
    needles = coloured_needles()
    random = Random(seed)
    if not folder.exists():
        hidden = [
            Hidden(random.choice(needles), random.choice(frames), random.random(), random.randrange(1 << 30))
            for _ in range(samples)
        ]
        with new_folder(folder) as partial:
            write_needles(partial, hidden)
    return folder


def write_needles(folder: Path, hidden: Sequence[Hidden], haystack: Path | None = None) -> Path:
    """Write a video for each, and the annotations that ask for them; their path. haystack: a video whose frames are
    taken; None: grey noise. Raises DataError for a haystack that cannot be read."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, one in enumerate(hidden):
        name = f"{number:05d}.mp4"
        _write_video(folder / name, one, _noise(one) if haystack is None else _taken(haystack, one.frames))
        talk = [
            {"role": "user", "content": f"<video>{one.needle.question}"},
            {"role": "assistant", "content": one.needle.answer},
        ]
        lines.append(json.dumps({"messages": talk, "videos": [name]}))
    path = folder / NEEDLES
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _write_video(path: Path, one: Hidden, haystack: Iterator[Image.Image]) -> None:
    """The haystack with the needle in the place of some frames."""
    first = round(one.depth * (one.frames - one.lasts) / GROUP) * GROUP
    av = pyav()
    with av.open(str(path), "w") as container:
        stream = None
        for number, frame in enumerate(haystack):
            if stream is None:
                stream = container.add_stream("mpeg4", rate=FPS, options={"qscale": "2"})
                stream.width, stream.height = (side // 2 * 2 for side in frame.size)
                stream.pix_fmt = "yuv420p"
                size = stream.width, stream.height
            hides = first <= number < first + one.lasts
            shown = (one.needle.picture if hides else frame).resize(size)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(shown), format="rgb24")))
        assert stream is not None  # a haystack has frames
        container.mux(stream.encode())


def _noise(one: Hidden) -> Iterator[Image.Image]:
    random = np.random.default_rng(one.seed)
    for _ in range(one.frames):
        grey = random.integers(0, 256, (SIDE // _BLOCK, SIDE // _BLOCK), dtype=np.uint8)
        yield Image.fromarray(np.kron(grey, np.ones((_BLOCK, _BLOCK), dtype=np.uint8))).convert("RGB")


def _taken(haystack: Path, frames: int) -> Iterator[Image.Image]:
    """So many frames of a video, evenly. Raises DataError where it has fewer."""
    taking = FrameSampling(fps=float("inf"), max_frames=frames, group=1)
    images, _ = map_frames(haystack, taking, lambda group: group[0])
    if len(images) < frames:
        raise DataError(f"video {haystack} has {len(images)} frames, and a haystack of {frames} is asked for")
    return iter(images)
