"""Draws circles of a colour and a size, and asks for one of the two: train.jsonl, held_out.jsonl, pictures/."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "yellow")
RADII = {"small": 10, "large": 24}  # pixels
SIDE = 56  # of a picture, pixels
COUNTS = {"train": 256, "held_out": 48}


def main(folder: Path, counts: dict[str, int]) -> None:
    """folder: of all files. counts: of samples, by dataset."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        lines = [json.dumps(make_sample(folder, f"{name}_{number}.png")) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_sample(folder: Path, name: str) -> dict[str, object]:
    """One picture, saved under that name, which decides all that is drawn by chance; and a question with its answer."""
    chance = random.Random(name)
    colour, size = chance.choice(COLOURS), chance.choice(list(RADII))
    picture, corner = Image.new("RGB", (SIDE, SIDE), "white"), SIDE // 2 - RADII[size]
    ImageDraw.Draw(picture).ellipse((corner, corner, SIDE - corner, SIDE - corner), fill=colour)
    picture.save(folder / "pictures" / name)
    asked, told = chance.choice([("What colour is the circle?", colour), ("How large is the circle?", size)])
    turns = [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": f"The circle is {told}."}]
    return {"image": name, "conversations": turns}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), COUNTS)
