"""What an epoch is made of, by dataset and by what samples hold: a table of `inspect data`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dhp.core.text import aligned

CONTENTS = {
    "samples": "usable ones, as often as weights and shares (name%50) show them; behind it the share of all",
    "tokens": "of these samples, those of pictures and sound included; behind it the share of all",
    "text alone": "share of a dataset's samples without picture and sound",
    "one picture": "share of samples with one image or video",
    "2 to 4": "share of samples with so many images and videos",
    "5 and more": "share of samples with so many images and videos",
    "sound": "share of samples with sound, whatever else they have",
}


def content_table(datasets: Mapping[str, np.ndarray]) -> list[str]:
    """Lines to print. datasets: the lengths of each one's samples in an epoch (LENGTH_COLUMNS)."""
    usable = [(name, columns[columns["text"] > 0]) for name, columns in datasets.items()]
    whole = np.concatenate([own for _, own in usable])
    if len(usable) > 1:
        usable.append(("all", whole))
    rows = [["an epoch shows", *CONTENTS], *([name, *_cells(own, whole)] for name, own in usable if len(own))]
    return ["", *aligned(rows, 1), *(f"  {name:16}{text}" for name, text in CONTENTS.items())]


def _cells(columns: np.ndarray, whole: np.ndarray) -> list[str]:
    tokens, of_all = (int(one["text"].sum(dtype=np.int64)) for one in (columns, whole))
    pictures, sound = columns["pictures"], columns["sound"] > 0
    kinds = (
        (pictures == 0) & ~sound,
        pictures == 1,
        (pictures > 1) & (pictures < 5),
        pictures > 4,
        sound,
    )
    return [
        f"{len(columns):,} {len(columns) / len(whole):6.1%}",
        f"{tokens:,} {tokens / of_all:6.1%}",
        *(f"{kind.mean():.1%}" for kind in kinds),
    ]
