"""Needles in haystacks: one picture that a question asks for, somewhere in a long video that has nothing to do with it.

As LongVA's V-NIAH has it (Zhang et al. 2024, section 4), with videos as files, so that they are read as any other data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import av
import numpy as np
from PIL import Image

from dhp.core.errors import DataError
from dhp.core.files import new_folder
from dhp.data.media.frames import FrameSampling
from dhp.data.media.images import open_image
from dhp.data.media.video import map_frames
from dhp.tiny.pictures import PALETTE

FPS = 2  # frames of a written video a second
SIDE = 56  # pixels of a made haystack's frames
GROUP = 2  # frames of one step in time, which a needle fills
ANNOTATIONS = "needles.jsonl"
QUESTION = "One frame has a colour. Which?"
_BLOCK = 14  # pixels of a grey block of a made haystack


@dataclass(frozen=True)
class Needle:
    """A picture, with a question about it and its answer."""

    picture: Image.Image
    question: str
    answer: str


@dataclass(frozen=True)
class Hidden:
    """A needle in a video of so many frames. depth: 0 in its first step in time, 1 in its last one."""

    needle: Needle
    frames: int
    depth: float
    seed: int


def coloured_needles() -> list[Needle]:
    """Plain frames, each of one colour, for haystacks without any."""
    colours = [name for name in PALETTE if name != "black"]
    return [Needle(Image.new("RGB", (SIDE, SIDE), PALETTE[name]), QUESTION, name) for name in colours]


def read_needle(picture: Path, question: str, answer: str) -> Needle:
    """A needle of the user's. Raises DataError for a file that is no image."""
    return Needle(open_image(picture), question, answer)


def make_needles(folder: Path, samples: int, frames: Sequence[int], seed: int = 0) -> Path:
    """Write a dataset to learn from: `samples` needles at random depths, each in a video of one of these lengths.

    A folder that is there is left as it is; it appears complete or not at all.
    """
    needles = coloured_needles()
    random = Random(seed)
    if not folder.exists():
        hidden = [
            Hidden(random.choice(needles), random.choice(frames), random.random(), random.randrange(1 << 30))
            for _ in range(samples)
        ]
        with new_folder(folder) as partial:
            write_needles(partial, hidden)
    return folder


def write_needles(folder: Path, hidden: Sequence[Hidden], haystack: Path | None = None) -> Path:
    """Write a video for each, and the annotations that ask for them; their path. haystack: a video whose frames are
    taken; None: grey noise. Raises DataError for a haystack that cannot be read."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, one in enumerate(hidden):
        name = f"{number:05d}.mp4"
        _write_video(folder / name, one, _noise(one) if haystack is None else _taken(haystack, one.frames))
        talk = [
            {"role": "user", "content": f"<video>{one.needle.question}"},
            {"role": "assistant", "content": one.needle.answer},
        ]
        lines.append(json.dumps({"messages": talk, "videos": [name]}))
    path = folder / ANNOTATIONS
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _write_video(path: Path, one: Hidden, haystack: Iterator[Image.Image]) -> None:
    """The haystack with the needle in the place of one step in time."""
    steps = one.frames // GROUP
    first = round(one.depth * (steps - 1)) * GROUP
    with av.open(str(path), "w") as container:
        stream = None
        for number, frame in enumerate(haystack):
            if stream is None:
                stream = container.add_stream("mpeg4", rate=FPS, options={"qscale": "2"})
                stream.width, stream.height = (side // 2 * 2 for side in frame.size)
                stream.pix_fmt = "yuv420p"
                size = stream.width, stream.height
            hides = first <= number < first + GROUP
            shown = (one.needle.picture if hides else frame).resize(size)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(shown), format="rgb24")))
        assert stream is not None  # a haystack has frames
        container.mux(stream.encode())


def _noise(one: Hidden) -> Iterator[Image.Image]:
    random = np.random.default_rng(one.seed)
    for _ in range(one.frames):
        grey = random.integers(0, 256, (SIDE // _BLOCK, SIDE // _BLOCK), dtype=np.uint8)
        yield Image.fromarray(np.kron(grey, np.ones((_BLOCK, _BLOCK), dtype=np.uint8))).convert("RGB")


def _taken(haystack: Path, frames: int) -> Iterator[Image.Image]:
    """So many frames of a video, evenly. Raises DataError where it has fewer."""
    taking = FrameSampling(fps=float("inf"), max_frames=frames, group=1)
    images, _ = map_frames(haystack, taking, lambda group: group[0])
    if len(images) < frames:
        raise DataError(f"video {haystack} has {len(images)} frames, and a haystack of {frames} is asked for")
    return iter(images)
