"""A sample's tokens as runs of text: what is learned, what is a placeholder, and how many there are of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dhp.base.geometry import IGNORED
from dhp.base.harmless import harmless
from dhp.data.sample import Sample

KINDS = ("text", "images", "videos", "sound")  # by mm_token_type_ids
GREEN, CYAN, PLAIN = "\x1b[1;32m", "\x1b[36m", "\x1b[0m"


@dataclass(frozen=True)
class Run:
    """Tokens one behind another that are alike. kind: index in KINDS; of a placeholder, `text` is that of one token."""

    text: str
    tokens: int
    kind: int
    learned: bool

    @property
    def shown(self) -> str:
        """The text, and of placeholders their number instead of all of them."""
        return harmless(self.text) if self.kind == 0 else f"{harmless(self.text)} × {self.tokens}"


def runs_of(sample: Sample, tokenizer: Any) -> list[Run]:
    """The whole sample, in order."""
    ids, kinds = sample.input_ids, sample.mm_token_type_ids
    learned = sample.labels != IGNORED
    learned[0] = False  # nothing predicts the first token
    placeholder = np.where(kinds > 0, ids, -1)  # runs of text may be of any tokens
    cuts = np.flatnonzero((np.diff(placeholder) != 0) | (np.diff(kinds) != 0) | (np.diff(learned.astype(int)) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(ids)]
    runs = []
    for start, stop in zip(bounds, bounds[1:]):
        kind = int(kinds[start])
        text = tokenizer.convert_ids_to_tokens(int(ids[start])) if kind else _text(tokenizer, ids, start, stop)
        runs.append(Run(text, stop - start, kind, bool(learned[start])))
    return runs


def _text(tokenizer: Any, ids: np.ndarray, start: int, stop: int) -> str:
    """The text that these tokens add to that before them: alone, some tokenizers drop the space in front of a word."""
    before = max(0, start - 8)  # enough for any character, and a picture's placeholders are not decoded again
    left, whole = (tokenizer.decode(ids[before:end].tolist()) for end in (start, stop))
    return whole[len(left) :] if whole.startswith(left) else tokenizer.decode(ids[start:stop].tolist())


def as_terminal(runs: Sequence[Run], colours: bool) -> str:
    """The prompt: learned text green or in ⟦ ⟧, placeholders cyan or in ⟨ ⟩."""
    parts = []
    for run in runs:
        shown = run.shown
        if run.kind:
            shown = f"{CYAN}{shown}{PLAIN}" if colours else f"⟨{shown}⟩"
        if run.learned:
            # Each line on its own: pagers reset colours at its end.
            shown = "\n".join(f"{GREEN}{line}{PLAIN}" for line in shown.split("\n")) if colours else f"⟦{shown}⟧"
        parts.append(shown)
    return "".join(parts)


def placeholders(runs: Sequence[Run]) -> list[str]:
    """`<image> × 256 in 2 runs`, one for each placeholder."""
    tokens: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for run in runs:
        if run.kind:
            tokens[harmless(run.text)] += run.tokens
            times[harmless(run.text)] += 1
    return [f"{name} × {tokens[name]} in {count} run{'s' * (count > 1)}" for name, count in times.items()]


def lengths(sample: Sample) -> dict[str, int]:
    """Tokens by kind, of all together, and those that are learned."""
    counts = np.bincount(sample.mm_token_type_ids, minlength=len(KINDS)).tolist()
    return dict(zip(KINDS, counts)) | {"together": len(sample.input_ids), "learned": sample.target_tokens}
