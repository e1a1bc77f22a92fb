"""The share of needles that is found, by frames of the video and depth: a panel a model, as LongVILA's figure 11."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.published.canvas import SIDE, TOP, Canvas

FOUND, LOST = (110, 190, 200), (240, 240, 240)  # red, green and blue
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG; of several seeds the means."""
    models = list(dict.fromkeys(row["trained_on"] for row in rows))
    canvas = Canvas(len(models))
    canvas.text(canvas.left(0), 8, "share of needles found, by frames of the video (across) and depth (down)")
    for panel, model in enumerate(models):
        own = [row for row in rows if row["trained_on"] == model]
        left, frames, depths = canvas.left(panel), list(dict.fromkeys(row["frames"] for row in own)), own[0]["depths"]
        canvas.text(left, TOP - 18, f"trained on {', '.join(map(str, own[0]['trained_frames']))} frames")
        wide, high = SIDE / len(frames), SIDE / len(depths)
        for down, depth in enumerate(depths):
            canvas.text(left - 34, TOP + (down + 0.4) * high, f"{depth:g}")
            for across, of in enumerate(frames):
                share = mean(row["by_depth"][down] for row in own if row["frames"] == of)
                colour = (round(low + share * (high_ - low)) for low, high_ in zip(LOST, FOUND, strict=True))
                box = left + across * wide, TOP + down * high, wide - 1, high - 1
                canvas.box(*box, "#" + "".join(f"{value:02x}" for value in colour))
                canvas.text(box[0] + wide / 2 - 12, box[1] + high / 2 - 7, f"{share:.0%}")
        for across, of in enumerate(frames):
            canvas.text(left + (across + 0.3) * wide, TOP + SIDE + 4, str(of))
    canvas.save(path)
