"""Pictures and questions that only they answer, in three sets, and a small model for them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging

from dhp.models.pretrained import name_accelerator
from dhp.tiny.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer

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


ANNOTATIONS = "annotations.json"
Asked = tuple[str, str]  # a kind of question, and its answer


@dataclass(frozen=True)
class Sets:
    """Of one seed. seen: trained on; renamed: the same with other names of colours. asked: kinds of the held-out
    questions, in the order of `right` and of `exchanged`."""

    folder: Path
    asked: tuple[Asked, ...]

    def registry(self, names: str = "") -> list[str]:
        """Overrides that name all sets. names: "renamed_" for those with other names of colours."""
        files = {"seen": f"seen/{names}{ANNOTATIONS}"}
        files |= {kind: f"{kind}/{names}{ANNOTATIONS}" for kind in dict.fromkeys(kind for kind, _ in self.asked)}
        files |= {which: f"{names}{which}.json" for which in ("right", "exchanged")}
        found = []
        for name, file in files.items():
            path = self.folder / file
            found.append(f"data.data_registry.{name}.annotation_path={path}")
            found.append(f"data.data_registry.{name}.data_path={path.parent}")
        return found


RENAMED = "renamed_"


def make_sets(folder: Path, seed: int, samples: int, rounds: int, kinds: Sequence[str] = tuple(KINDS)) -> Sets:
    """Draw so many samples to train on, and of each kind so many rounds of held-out questions."""
    write(folder / "seen", train_answers(Random(seed), samples, kinds), f"seen/{seed}", held_out=False)
    asked: list[Asked] = []
    lines: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        own = [(kind, answer) for answer in held_out_answers(kind, rounds)]
        write(folder / kind, own, f"held out/{seed}/{kind}", held_out=True)
        asked += own
        for names in ("", RENAMED):
            there = json.loads((folder / kind / f"{names}{ANNOTATIONS}").read_text(encoding="utf-8"))
            below = [one | {"image": f"{kind}/{one['image']}"} for one in there]
            lines.setdefault(f"{names}right", []).extend(below)
            lines.setdefault(f"{names}exchanged", []).extend(exchanged(below))
    for name, found in lines.items():
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    return Sets(folder, tuple(asked))


def round_of_pairs(count: int) -> list[int]:
    """Numbers below `count` around a circle on which every ordered pair of two, equal ones too, is adjacent once."""
    left = {one: list(range(count)) for one in range(count)}
    path, found = [0], []
    while path:  # Hierholzer's way around a graph with all edges
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            found.append(path.pop())
    return found[1:][::-1]


def held_out_answers(kind: str, rounds: int) -> list[str]:
    """Answers of a held-out set, in an order in which the next sample's answer says nothing of one's own: among all
    samples, each pair of an answer and the next one's is equally frequent."""
    answers = KINDS[kind].asked
    return [answers[one] for one in round_of_pairs(len(answers))] * rounds


def train_answers(random: Random, samples: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Asked]:
    """Of so many samples: kinds in turn, with answers that are equally frequent."""
    drawn = [
        (kind, KINDS[kind].answers[turn % len(KINDS[kind].answers)])
        for turn in range(-(-samples // len(kinds)))
        for kind in kinds
    ]
    random.shuffle(drawn)
    return drawn[:samples]


def write(folder: Path, asked: Sequence[Asked], seed: str, held_out: bool) -> None:
    """Draw a picture for each answer; write them as a dataset in LLaVA's format, with either names of colours."""
    (folder / "images").mkdir(parents=True)
    for number, (kind, answer) in enumerate(asked):
        random = Random(f"{seed}/{number}")
        scene = draw_scene(random, kind, answer, held_out)
        draw(random, scene).save(folder / _image(number))
    for names in ("", RENAMED):
        lines = [annotation(number, kind, named(answer, names)) for number, (kind, answer) in enumerate(asked)]
        (folder / f"{names}{ANNOTATIONS}").write_text(json.dumps(lines), encoding="utf-8")


def named(answer: str, names: str) -> str:
    """The answer; with RENAMED, of a colour the next one's name."""
    if names != RENAMED or answer not in COLOURS:
        return answer
    return COLOURS[(COLOURS.index(answer) + 1) % len(COLOURS)]


def annotation(number: int, kind: str, answer: str) -> dict[str, Any]:
    """A sample in LLaVA's format."""
    turns = [{"from": "human", "value": f"<image>\n{KINDS[kind].question}"}, {"from": "gpt", "value": answer}]
    return {"id": f"{kind}-{number}", "image": _image(number), "conversations": turns}


def exchanged(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same questions and answers, each with the picture of the next sample around, as `evaluate loss
    exchange=images` shows them."""
    images = [one["image"] for one in lines]
    return [one | {"image": image} for one, image in zip(lines, [*images[1:], *images[:1]], strict=True)]


def _image(number: int) -> str:
    return f"images/{number:05d}.png"


WIDTH, TOWER_WIDTH = 128, 64
TEMPLATE = CHAT_TEMPLATE.partition("{%- endif -%}\n")[2]  # without a system turn that is not there


def make_model(folder: Path, seed: int) -> Path:
    """Write model, tokenizer and image processor to a new folder.

    The projector's last matrix begins at zero: at first every picture looks the same to the decoder, and what tells
    them apart comes by gradients that reach the projector alone."""
    tokenizer = make_tokenizer(texts())
    tokenizer.chat_template = TEMPLATE
    config = config_of(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        last = model.model.visual.merger.mlp[-1]
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.normal_(last.bias, std=0.02)
    text = config.text_config
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    name_accelerator()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sides = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=14, temporal_patch_size=2, merge_size=2, **sides).save_pretrained(folder)
    return folder


def config_of(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """Two layers of decoder, two of tower; windows of 4 × 4 patches, then the whole picture of 6 × 6."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    end, turn_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    ends = {"bos_token_id": end, "eos_token_id": turn_end, "pad_token_id": end}
    text = {
        "vocab_size": (len(tokenizer) // 16 + 1) * 16, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}, **ends,
    }  # fmt: skip
    vision = {
        "hidden_size": TOWER_WIDTH, "intermediate_size": 2 * TOWER_WIDTH, "depth": 2, "num_heads": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "out_hidden_size": WIDTH,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False, **ends,
    )  # fmt: skip
