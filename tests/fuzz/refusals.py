"""Count what of random layouts is refused, and why: `python -m tests.fuzz.refusals --draws=740 --seed=7004`.

Each draw is checked as far as actors would start. What is refused is named by the kind that docs/reference/limits.md
gives its message; a message that is in no table there is a mistake in the values. All are printed, to be judged."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from dhp.config.rules import CANNOT, NOT_BUILT, OPTIMIZER_RULES, PART_RULES, RUN_RULES
from dhp.core.errors import DhpError
from scripts.limits import OF_MODELS, TAKEN
from tests.fuzz.draws import Draw, draws
from tests.fuzz.trial import check_draw
from tests.helpers.tiny_families import save_family

ACCEPTED, MISTAKE = "accepted", "a mistake in the values"
_FIELD = re.compile(r"\\\{.*?\\\}")


def limits() -> list[tuple[re.Pattern[str], str]]:
    """The words of each limit's message, and its kind."""
    said = [(rule.says, rule.limit) for rule in (*PART_RULES, *RUN_RULES, *OPTIMIZER_RULES)]
    said += [(words, kind) for _, words, kind, _ in OF_MODELS]
    return [(re.compile(_FIELD.sub(".*?", re.escape(words))), kind) for words, kind in said]


def kind_of(message: str) -> str:
    """Of a refusal. What cannot be for one reason cannot be whatever else is not built."""
    kinds = {kind for words, kind in limits() if words.search(message)}
    return next((kind for kind in (CANNOT, NOT_BUILT) if kind in kinds), MISTAKE)


def count_refusals(drawn: Iterable[Draw], folder: Path) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """How many draws came to what, and how often each refusal was made, by its kind and its message without numbers.
    folder: for the families' tiny models."""
    kinds: Counter[str] = Counter()
    messages: Counter[tuple[str, str]] = Counter()
    for draw in drawn:
        own = folder / draw.family
        if not own.exists():
            save_family(draw.family, own)
        told = ""
        try:
            notes = check_draw(draw, str(own))
            kind = TAKEN if any("is taken" in note for note in notes) else ACCEPTED
        except DhpError as error:
            told = str(error)
            kind = kind_of(told)
            messages[kind, re.sub(r"\d+", "N", told)[:240]] += 1
        kinds[kind] += 1
        print(f"{sum(kinds.values())} {draw.family}: {kind}: {told}", file=sys.stderr, flush=True)
    return kinds, messages


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts, and the messages of what is refused, the most frequent first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=740)
    parser.add_argument("--seed", type=int, default=7004)
    asked = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        kinds, messages = count_refusals(islice(draws(asked.seed, unbuilt=True), asked.draws), Path(folder))
    for (kind, message), count in messages.most_common():
        print(f"{count:5} {kind}: {message}")
    print(f"seed {asked.seed}, {asked.draws} draws: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main()
