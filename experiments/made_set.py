"""A generated dataset with lengths as a LLaVA mixture has them, a model for it, and training through the real entry."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TypeVar

from PIL import Image, ImageDraw
from transformers.utils import logging

from dhp.observe.metrics import StepMetrics, read_metrics
from dhp.tiny.model import make_tiny_model
from experiments.commands import run_module
from experiments.small import grow

Choice = TypeVar("Choice")

ANNOTATIONS = "annotations.json"
TOKEN_SIDE = 28  # pixels that one token of an image covers, in either direction
LONGEST = 640  # words of a sample; more are cut off, as trainers cut at what a model takes

# Sides of an image in tokens, height and width apart, and their shares.
SIDES = {4: 0.20, 6: 0.30, 8: 0.25, 10: 0.15, 14: 0.07, 18: 0.03}
# Made up of two syllables each, so that the tokenizer learns every word as one token.
WORDS = [a + b for a in "ba de fi go ku la me ni po ru sa ti".split() for b in "ban del fin gor kum lat".split()]


@dataclass(frozen=True)
class ConfigSource:
    """One of the datasets of a mixture. share: of all samples. words: mean of a sample, all turns together, whose
    logarithm is normal with deviation sigma. images: shares of their number. turns: questions and answers.
    """

    share: float
    words: float
    sigma: float
    images: dict[int, float]
    turns: int = 1


SOURCES = {
    "question": ConfigSource(0.40, 25, 0.6, {1: 1.0}),
    "description": ConfigSource(0.20, 120, 0.5, {1: 1.0}),
    "dialogue": ConfigSource(0.18, 160, 0.6, {1: 1.0}, turns=3),
    "several": ConfigSource(0.10, 60, 0.7, {2: 0.50, 3: 0.25, 4: 0.15, 6: 0.10}),
    "text": ConfigSource(0.12, 280, 0.9, {0: 1.0}),
}


def make_dataset(folder: Path, samples: int, seed: int) -> Path:
    """Write that many samples in LLaVA format to `folder`, annotations and PNG images; return it."""
    (folder / "images").mkdir(parents=True)
    annotations = [_sample(folder, number, Random(f"{seed}/{number}")) for number in range(samples)]
    (folder / ANNOTATIONS).write_text(json.dumps(annotations), encoding="utf-8")
    return folder


def texts(folder: Path) -> list[str]:
    """Every question and answer, to train a tokenizer on."""
    annotations = json.loads((folder / ANNOTATIONS).read_text(encoding="utf-8"))
    return [turn["value"] for sample in annotations for turn in sample["conversations"]]


def _sample(folder: Path, number: int, random: Random) -> dict[str, object]:
    """Draw one sample, save its images and return its annotation."""
    source = SOURCES[_choose(random, {name: source.share for name, source in SOURCES.items()})]
    names = [f"images/{number:05d}_{index}.png" for index in range(_choose(random, source.images))]
    for name in names:
        _image(random).save(folder / name)
    drawn = random.lognormvariate(math.log(source.words) - source.sigma**2 / 2, source.sigma)
    words = min(max(round(drawn), 2 * source.turns), LONGEST)
    turns = [turn for index in range(source.turns) for turn in _exchange(random, words, index, source.turns)]
    turns[0]["value"] = "<image>\n" * len(names) + turns[0]["value"]
    return {"id": f"{number:05d}", **({"image": names} if names else {}), "conversations": turns}


def _exchange(random: Random, words: int, index: int, turns: int) -> list[dict[str, str]]:
    """The index-th question and answer of a sample: a third of its share of the words, and the rest of them."""
    share = words * (index + 1) // turns - words * index // turns
    asked = max(share // 3, 1)
    return [
        {"from": speaker, "value": " ".join(random.choices(WORDS, k=count))}
        for speaker, count in (("human", asked), ("gpt", share - asked))
    ]


def _image(random: Random) -> Image.Image:
    width, height = (_choose(random, SIDES) * TOKEN_SIDE for _ in range(2))
    ground, colour = (tuple(random.randrange(256) for _ in range(3)) for _ in range(2))
    image = Image.new("RGB", (width, height), ground)
    corners = sorted(random.sample(range(width), 2)), sorted(random.sample(range(height), 2))
    ImageDraw.Draw(image).ellipse([pair[end] for end in range(2) for pair in corners], fill=colour)
    return image


def _choose(random: Random, shares: dict[Choice, float]) -> Choice:
    return random.choices(list(shares), list(shares.values()))[0]


# Matrices of the tower take 1.8 million multiply-adds a patch, those of the decoder 5.9 million a token.
DECODER = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
TOWER = {"hidden_size": 128, "intermediate_size": 352, "depth": 8, "fullatt_block_indexes": [3, 7]}


def make_model(folder: Path, corpus: Iterable[str]) -> Path:
    """A model directory in `folder`, with a tokenizer that learned `corpus`; return it."""
    logging.disable_progress_bar()  # one small file
    return grow(make_tiny_model(folder / "tiny", corpus), folder / "model", DECODER, TOWER)


LIMIT_S = 900.0


def train(
    config: Path, run_dir: Path, overrides: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> list[StepMetrics]:
    """`python -m dhp.train_ray` with that YAML file and those overrides; its steps, oldest first. variables: of its
    environment, beside those of this process.

    Raises RuntimeError with the end of what a failed run printed, subprocess.TimeoutExpired after LIMIT_S seconds.
    """
    command = ["dhp.train_ray", f"--config-path={config.parent}", f"--config-name={config.stem}"]
    run_module([*command, f"run_dir={run_dir}", *overrides], variables, LIMIT_S)
    return read_metrics(run_dir)


def place(model: Path, data: Path, annotations: str) -> list[str]:
    """Overrides that say where the model and the dataset `made` lie; lengths are kept beside the latter."""
    return [
        f"vision.model_name={model}", f"text.model_name={model}",
        f"data.data_registry.made.annotation_path={data / annotations}", f"data.data_registry.made.data_path={data}",
        f"data.cache_dir={data / 'lengths'}",
    ]  # fmt: skip
