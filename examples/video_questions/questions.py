"""From videos to captions and questions about them, with any model that sees videos: `clips` to describe, then `ask`
about the descriptions of each video, then `collect` what can be learned from (LongVILA, Chen et al. 2024, section 4.4).
`relabel` asks for new captions of pictures that have poor ones (section 4.2)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import av

CLIP_S, LEAST_S = 10.0, 1.0  # seconds of a clip; a last one that is shorter goes with the one before
DESCRIBE = "Describe in one or two sentences what happens in this part of a video."
PARTS = "These are descriptions of the parts of one video, in order.\n{parts}\n"
CAPTION = "Describe the whole video in a few sentences."
KINDS = {
    "order": "the order in which things happen",
    "time": "when something happens",
    "place": "where something is",
    "appearance": "what somebody or something looks like",
    "action": "what somebody does",
    "count": "how often something happens, or how many there are of it",
    "whole": "what the video as a whole is about",
}  # of questions, in turn, a video each
ASK = (
    "Write one question about {about}, which takes the whole video to answer, and its answer, in two lines that begin "
    "with Q: and A:."
)
PICTURE = "Describe the picture in one or two sentences. Beside it stood: {words}"
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
    """Two samples of text for each video, which ask about the descriptions of its clips: for a caption and for a
    question of one of the kinds. answers: of `dhp generate`."""
    parts: dict[str, list[str]] = {}
    for clip, said in _pairs(asked, answers):
        begin, end = clip["clip"]
        parts.setdefault(clip["video"], []).append(f"{begin:g} to {end:g} s: {said}")
    kinds = cycle(KINDS.items())
    for video, of_clips in parts.items():
        known, (kind, about) = PARTS.format(parts="\n".join(of_clips)), next(kinds)
        for name, wanted in (("caption", CAPTION), (kind, ASK.format(about=about))):
            yield {"about": {"video": video}, "kind": name, "conversations": _turns(known + wanted, "?")}


def relabel(rows: list[Row]) -> Iterable[Row]:
    """A sample for each row with one picture, whose answer is left to the model; its caption stands in the question.
    Other rows are skipped, and counted."""
    one_picture = [row for row in rows if isinstance(row.get("image"), str)]
    if len(one_picture) < len(rows):
        print(
            f"{len(rows) - len(one_picture)} of {len(rows)} rows do not have exactly one picture: skipped",
            file=sys.stderr,
        )
    for row in one_picture:
        words = TAG.sub("", row["conversations"][-1]["value"]).strip()
        shown = {"about": {"image": row["image"]}, "kind": "caption", "image": row["image"]}
        yield shown | {"conversations": _turns(f"<image>\n{PICTURE.format(words=words)}", "?")}


def collect(asked: list[Row], answers: list[Row]) -> Iterable[Row]:
    """A sample to train on for each caption, and for each answer that has a question and its answer."""
    for row, said in _pairs(asked, answers):
        ((media, name),) = row["about"].items()
        question, answer = PICTURE.partition(" Beside")[0] if media == "image" else CAPTION, said
        if row["kind"] != "caption":
            found = FOUND.search(said)
            question, answer = (found["question"], found["answer"]) if found else ("", "")
        if answer:
            talk = _turns(f"<{media}>\n{question}", answer)
            yield {media: name, "kind": row["kind"], "conversations": talk}


def _pairs(asked: list[Row], answers: list[Row]) -> list[tuple[Row, str]]:
    """What was asked with the text that the model answered."""
    if len(asked) != len(answers):
        sys.exit(f"{len(asked)} prompts have {len(answers)} answers: let `dhp generate` answer all of them, then go on")
    return [(one, TAG.sub("", answer["answer"]).strip()) for one, answer in zip(asked, answers, strict=True)]


def _turns(human: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]


def _read(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


STEPS: dict[str, Callable[..., Iterable[Row]]] = {"ask": ask, "collect": collect, "relabel": relabel}


def main(step: str, *files: str) -> None:
    """step: clips FOLDER OUT, relabel ANNOTATIONS OUT, or ask and collect, ASKED ANSWERS OUT."""
    *given, out = files
    if step == "clips":
        rows = list(clips(Path(given[0])))
    elif step in STEPS:
        rows = list(STEPS[step](*map(_read, given)))
    else:
        sys.exit(f"{step} is no step: clips, {', '.join(STEPS)}")
    Path(out).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} samples")


if __name__ == "__main__":
    main(*sys.argv[1:])
