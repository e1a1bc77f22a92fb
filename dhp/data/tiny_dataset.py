"""A generated dataset: pictures of shapes, digits and bar charts, and questions that need looking at them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from PIL import Image

from dhp.base.errors import DataError
from dhp.base.files import new_folder
from dhp.data import drawing

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
    there is a DataError. The folder appears complete or not at all.
    """
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
    annotation: dict[str, object] = {"id": f"{number:05d}"}
    if names:
        annotation["image"] = names[0] if len(names) == 1 else names
    annotation["conversations"] = [{"from": role, "value": text} for role, text in turns]
    first = annotation["conversations"][0]
    first["value"] = "<image>\n" * len(names) + first["value"]
    return annotation


def _colour(random: Random) -> Draft:
    colour, shape = random.choice(drawing.COLOURS), random.choice(drawing.SHAPES)
    return Draft([drawing.shapes(random, shape, [colour])], [(f"What colour is the {shape}?", colour)])


def _shape(random: Random) -> Draft:
    colour, shape = random.choice(drawing.COLOURS), random.choice(drawing.SHAPES)
    return Draft([drawing.shapes(random, shape, [colour])], [(f"Which shape is {colour}?", shape)])


def _count(random: Random) -> Draft:
    count, shape = random.randint(1, 5), random.choice(drawing.SHAPES)
    picture = drawing.shapes(random, shape, [random.choice(drawing.COLOURS)] * count)
    return Draft([picture], [("How many shapes are there?", NUMBER_WORDS[count])])


def _digit(random: Random) -> Draft:
    digit, colour = random.randint(0, 9), random.choice(drawing.COLOURS)
    return Draft([drawing.digit(random, digit, colour)], [("Which digit is this?", NUMBER_WORDS[digit])])


def _chart(random: Random) -> Draft:
    colours = random.sample(drawing.COLOURS, random.randint(2, 4))
    heights = random.sample(range(2, 11), len(colours))
    tallest = colours[heights.index(max(heights))]
    return Draft([drawing.bars(random, colours, heights)], [("Which bar is the tallest?", f"the {tallest} bar")])


def _pair(random: Random) -> Draft:
    colours = random.sample(drawing.COLOURS, 2)
    pictures = [drawing.shapes(random, random.choice(drawing.SHAPES), [colour]) for colour in colours]
    return Draft(pictures, [("What colours are the two pictures?", " and ".join(colours))])


def _dialogue(random: Random) -> Draft:
    colour, shape = random.choice(drawing.COLOURS), random.choice(drawing.SHAPES)
    questions = ["Which shape is this?", "What is its colour?", "How many are there?"]
    answers = [shape, colour, "one"]
    return Draft([drawing.shapes(random, shape, [colour])], list(zip(questions, answers))[: random.randint(2, 3)])


def _arithmetic(random: Random) -> Draft:
    a, b = random.randint(0, 5), random.randint(0, 5)
    return Draft([], [(f"What is {NUMBER_WORDS[a]} plus {NUMBER_WORDS[b]}?", NUMBER_WORDS[a + b])])


KINDS: tuple[Callable[[Random], Draft], ...] = (
    _colour,
    _shape,
    _pair,
    _digit,
    _dialogue,
    _chart,
    _count,
    _arithmetic,
)
