"""`python examples/easy_vqa/picture.py FOLDER OUT.png`: pictures of a finished example, answers before and after."""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SHOWN = (5, 16, 12, 4, 10, 8)  # of the held-out questions that the run answered
SIDE, WIDE, GAP, LINE = 128, 260, 12, 20


def answers(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By number of the question: first and last answer."""
    lines = (folder / "runs" / "easy_vqa" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, list[dict[str, Any]]] = {}
    for row in map(json.loads, lines):
        if row["kind"] == "answer":
            found.setdefault(row["number"], []).append(row)
    return found


def draw(folder: Path) -> Image.Image:
    tests = (folder / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    page = Image.new("RGB", (3 * (WIDE + GAP) + GAP, 2 * (SIDE + 3 * LINE + 2 * GAP) + GAP), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    by_number = answers(folder)
    for place, number in enumerate(SHOWN):
        first, last = by_number[number][0], by_number[number][-1]
        row, column = divmod(place, 3)
        left, top = GAP + column * (WIDE + GAP), GAP + row * (SIDE + 3 * LINE + 2 * GAP)
        with Image.open(folder / "data" / json.loads(tests[first["row"]])["image"]) as image:
            page.paste(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, top))
        texts = (first["prompt"], f"before: {first['answer']}", f"after: {last['answer']}")
        for line, (text, colour) in enumerate(zip(texts, ("black", "#8a8a8a", "#1a6b3c"), strict=True)):
            pen.text((left, top + SIDE + 6 + line * LINE), text, fill=colour, font=font)
    return page


if __name__ == "__main__":
    draw(Path(sys.argv[1])).save(sys.argv[2], optimize=True)
