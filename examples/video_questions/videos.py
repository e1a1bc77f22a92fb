"""Draws two videos of 25 and 12 seconds, a coloured scene every few seconds: videos/; and a picture of each colour with
words of a web page beside it: pictures/, pictures.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import av
import numpy as np
from PIL import Image

SCENES = {"garden.mp4": ("green", "yellow", "red", "green", "blue"), "sea.mp4": ("blue", "blue", "yellow")}
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "yellow": (220, 200, 40)}
SIDE, FPS, SECONDS = 112, 4, {"garden.mp4": 25, "sea.mp4": 12}


def main(folder: Path) -> None:
    """folder: of the videos."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, scenes in SCENES.items():
        frames = SECONDS[name] * FPS
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream("mpeg4", rate=FPS)
            stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
            for number in range(frames):
                colour = COLOURS[scenes[number * len(scenes) // frames]]
                picture = np.full((SIDE, SIDE, 3), colour, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())


def draw_pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        Image.new("RGB", (SIDE, SIDE), colour).save(folder / f"{name}.png")
        talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"IMG_{number:04d} - buy now"}]
        lines.append(json.dumps({"image": f"{name}.png", "conversations": talk}))
    folder.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "videos"))
    draw_pictures(Path(sys.argv[2] if len(sys.argv) > 2 else "pictures"))
