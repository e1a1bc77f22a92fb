"""What samples cost beside their tokens, by dataset: a table of `inspect data`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dhp.core.text import aligned

COSTS = {
    "patches": "of a usable sample's images and videos, as they enter the tower: mean and largest",
    "pictures": "images and videos of a sample: mean and largest",
    "targets": "tokens of a sample that the loss counts: mean and largest",
    "encoded": "files of a sample's pictures and sound, as stored; 0 where only an address is known: mean and largest",
    "learned": "share of targets among tokens of text, those in the place of pictures and sound left out",
}


def cost_table(datasets: Mapping[str, np.ndarray]) -> list[str]:
    """Lines to print. datasets: the measured lengths of each (LENGTH_COLUMNS); one without a usable sample is left
    out."""
    usable = {name: columns[columns["text"] > 0] for name, columns in datasets.items()}
    rows = [["costs of a sample", *COSTS], *([name, *_cells(own)] for name, own in usable.items() if len(own))]
    return ["", *aligned(rows, 1), *(f"  {name:16}{text}" for name, text in COSTS.items())]


def _cells(columns: np.ndarray) -> list[str]:
    patches, pictures, targets = columns["patches"], columns["pictures"], columns["targets"]
    encoded = columns["encoded_bytes"]
    tokens, vision, sound = (columns[name].sum(dtype=np.int64) for name in ("text", "vision", "sound"))
    return [
        f"{patches.mean():.0f}, {patches.max()}",
        f"{pictures.mean():.2f}, {pictures.max()}",
        f"{targets.mean():.1f}, {targets.max()}",
        f"{readable_bytes(encoded.mean())}, {readable_bytes(encoded.max())}",
        f"{targets.sum(dtype=np.int64) / (tokens - vision - sound):.1%}",
    ]


def readable_bytes(count: float) -> str:
    """`12 B`, `3.4 KiB`, `5.6 MiB` or `7.8 GiB`, of 1,024 each."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"
