"""What is trained on, and held-out combinations with pictures right and exchanged, as datasets of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from experiments.sight.pictures import COLOURS, KINDS, draw, draw_scene

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
