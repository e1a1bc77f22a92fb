"""Counts exact answers by kind of question, and what can be guessed without a picture."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prepare import answer_of, question_of, read_rows

COLORS = ("red", "green", "blue", "black", "gray", "teal", "brown", "yellow")
SHAPES = ("rectangle", "triangle", "circle")


def kind_of(question: str) -> str:
    """What the question asks for: a colour or a shape by name, or yes or no about one of them or both."""
    words = set(re.findall(r"\w+", question))
    if "what" in words:
        return "which colour" if "color" in words else "which shape"
    about = " and ".join(name for name, of in (("colour", COLORS), ("shape", SHAPES)) if words.intersection(of))
    return f"{'negated, ' if words & {'no', 'not'} else ''}yes or no: {about}"


def guess(train: Sequence[Mapping], test: Sequence[Mapping]) -> float:
    """The share of test questions that are answered rightly by each question's commonest training answer: the best that
    can be had without a picture."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for one in train:
        answers[question_of(one)][answer_of(one)] += 1
    commonest = {question: found.most_common(1)[0][0] for question, found in answers.items()}
    return share(commonest.get(question_of(one), "yes") == answer_of(one) for one in test)


Row = tuple[str, int, float, float | None]


def share(right: Iterable[bool]) -> float:
    found = list(right)
    return sum(found) / len(found)


def table(
    samples: Sequence[Mapping], tests: Mapping[str, Sequence[Mapping]]
) -> list[tuple[str, int, float, float | None]]:
    """By kind of question and of all: how many, and the shares of exact answers with the questions' pictures and with
    those of others. samples: lines of `dhp evaluate loss --samples`. tests: annotations by dataset."""
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        for kind in (kind_of(question_of(tests[one["dataset"]][one["row"]])), "all"):
            right[kind][one.get("images", "own")].append(one["exact"])
    found = [
        (kind, len(of["own"]), share(of["own"]), share(of["others"]) if of["others"] else None)
        for kind, of in right.items()
    ]
    return sorted(found, key=lambda one: (one[0] == "all", one[0]))


def main(samples: Path, data: Path) -> int:
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    tests = {name: read_rows(data / f"{name}.jsonl") for name in {one["dataset"] for one in found}}
    asked = [tests[one["dataset"]][one["row"]] for one in found if one.get("images", "own") == "own"]
    rows = table(found, tests)
    print(f"{'questions':34} {'':>6} {'exact':>7}  with another's picture")
    for kind, count, own, others in rows:
        print(f"{kind:34} {count:6,} {own:7.1%}  {'' if others is None else f'{others:.1%}'}")
    print(f"without any picture, each question's commonest answer: {guess(read_rows(data / 'train.jsonl'), asked):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "data")))
