"""From videos to questions about them, with any model that sees videos: `clips` to describe, then `ask` about the
descriptions of each video, then `collect` what can be learned from (LongVILA, Chen et al. 2024, section 4.4)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av

CLIP_S, LEAST_S = 10.0, 1.0  # seconds of a clip; a last one that is shorter goes with the one before
DESCRIBE = "Describe in one or two sentences what happens in this part of a video."
ASK = (
    "These are descriptions of the parts of one video, in order.\n{parts}\n"
    "Write one question that takes the whole video to answer, and its answer, in two lines that begin with Q: and A:."
)
TAG = re.compile(r"<(?:image|video|audio)>")  # that would stand for a file
FOUND = re.compile(r"^Q:\s*(?P<question>.+?)\s*^A:\s*(?P<answer>.+?)\s*\Z", re.MULTILINE | re.DOTALL)
Row = dict[str, Any]


def cut(seconds: float) -> list[tuple[float, float]]:
    """Begin and end of each clip of a video."""
    starts = [number * CLIP_S for number in range(max(1, int((seconds - LEAST_S) // CLIP_S) + 1))]
    return list(zip(starts, [*starts[1:], round(seconds, 3)], strict=True))


def clips(folder: Path) -> Iterable[Row]:
    """A sample for each clip of each video of a folder, whose answer is left to the model."""
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            seconds = (container.duration or 0) / av.time_base
        for begin, end in cut(seconds):
            yield {"video": path.name, "clip": [begin, end], "conversations": _turns(f"<video>\n{DESCRIBE}", "?")}


def ask(asked: list[Row], answers: list[Row]) -> Iterable[Row]:
    """A sample of text for each video, which asks about the descriptions of its clips. answers: of `dhp generate`."""
    parts: dict[str, list[str]] = {}
    for clip, said in _pairs(asked, answers):
        begin, end = clip["clip"]
        parts.setdefault(clip["video"], []).append(f"{begin:g} to {end:g} s: {said}")
    for video, own in parts.items():
        yield {"about": video, "conversations": _turns(ASK.format(parts="\n".join(own)), "?")}


def collect(asked: list[Row], answers: list[Row]) -> Iterable[Row]:
    """A sample to train on for each video whose answer has a question and its answer."""
    for about, said in _pairs(asked, answers):
        if found := FOUND.search(said):
            yield {"video": about["about"], "conversations": _turns(f"<video>\n{found['question']}", found["answer"])}


def _pairs(asked: list[Row], answers: list[Row]) -> list[tuple[Row, str]]:
    """What was asked with the text that the model answered."""
    if len(asked) != len(answers):
        sys.exit(f"{len(asked)} prompts have {len(answers)} answers: let `dhp generate` answer all of them, then go on")
    return [(one, TAG.sub("", answer["answer"]).strip()) for one, answer in zip(asked, answers, strict=True)]


def _turns(human: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]


def _read(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main(step: str, *files: str) -> None:
    """step: clips FOLDER OUT, or ask and collect, ASKED ANSWERS OUT."""
    *given, out = files
    if step == "clips":
        rows = list(clips(Path(given[0])))
    elif step in ("ask", "collect"):
        rows = list((ask if step == "ask" else collect)(*map(_read, given)))
    else:
        sys.exit(f"{step} is no step: clips, ask or collect")
    Path(out).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} samples")


if __name__ == "__main__":
    main(*sys.argv[1:])
