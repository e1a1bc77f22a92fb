"""`python -m experiments.reading [--kinds small middle large video] [--samples 32] [--rounds 5]`: samples a second of
one reader process, beside torch's DataLoader with the model's own image processor and tokenizer."""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers.video_utils import read_video_pyav

from dhp.batch.reader import BatchReader, make_reader
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.plan.batches import feed_settings
from experiments.commands import ROOT, command_of
from experiments.reading.made import SIZES, VIDEO, make_model, make_samples

MICRO_BATCH = 8  # samples of a step
PIXELS = (56 * 56, 1280 * 28 * 28)  # least and most of a picture, as Qwen's own recipes have them
FRAMES = 8  # of a video
KINDS = (*SIZES, VIDEO)
REDUCED = "data.reduced_jpeg=true"
# What takes the time: the calls that are counted to each, innermost last.
CAUSES = {
    "reading": ("dhp.batch.reader.BatchReader.step",),
    "tokenising": ("dhp.data.sample.tokens.ConversationTokenizer.tokenize",),
    "decoding": ("dhp.data.sample.picture_inputs.open_image", "dhp.data.sample.picture_inputs.map_frames"),
    "scaling and patches": ("dhp.data.sample.picture_inputs.Pictures._process",),
    "packing": ("dhp.batch.shard.BatchSharder.shard",),
}
Row = dict[str, Any]


def open_reader(model: Path, file: Path, settings: Sequence[str] = ()) -> BatchReader:
    """dhp's, for one rank of each part."""
    entry = {"annotation_path": str(file), "data_path": str(file.parent)}
    own = [f"{part}.model_name={model}" for part in ("vision", "text")]
    own += ["data.datasets=[made]", *(f"+data.data_registry.made.{key}={value}" for key, value in entry.items())]
    own += [f"data.min_pixels={PIXELS[0]}", f"data.max_pixels={PIXELS[1]}", f"data.video_max_frames={FRAMES}"]
    own += [f"training.batch_size={MICRO_BATCH}", f"training.micro_batch_size={MICRO_BATCH}", "data.shuffle=false"]
    return make_reader(feed_settings(resolve(compose_config("tiny", str(ROOT / "configs"), [*own, *settings]))))


def open_loader(model: Path, file: Path) -> "DataLoader[Row]":
    """torch's, in this process: a collator as trainers have it. Their processors need torchvision for videos, so that
    texts are filled up here as these do."""
    images, tokenizer = load_image_processor(str(model)), load_tokenizer(str(model), None)
    images.size = {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}

    def collate(rows: Sequence[Row]) -> Mapping[str, torch.Tensor]:
        seen = [_pictures(file.parent, row) for row in rows]
        own = images(images=[picture for pictures in seen for picture in pictures], return_tensors="pt")
        counts = iter((own["image_grid_thw"].prod(dim=1) // 4).tolist())
        texts = []
        for row, pictures in zip(rows, seen, strict=True):
            question, answer = (turn["value"] for turn in row["conversations"])
            marks = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures)
            turns = [{"role": "user", "content": marks + question.split("\n", 1)[1]}]
            text = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False)
            for _ in pictures:
                text = text.replace("<|image_pad|>", "<placeholder>" * next(counts), 1)
            texts.append(text.replace("<placeholder>", "<|image_pad|>"))
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, **own, "labels": labels}

    rows = json.loads(file.read_text(encoding="utf-8"))
    return DataLoader(rows, batch_size=MICRO_BATCH, collate_fn=collate)


def _pictures(folder: Path, row: Row) -> list[Image.Image]:
    if VIDEO not in row:
        return [Image.open(folder / row["image"]).convert("RGB")]
    evenly: Callable[..., Any] = lambda metadata, **_: np.arange(FRAMES) * metadata.total_num_frames // FRAMES
    frames, _ = read_video_pyav(str(folder / row[VIDEO]), evenly)
    return [Image.fromarray(frame) for frame in frames]


def rows(kinds: Sequence[str], samples: int, rounds: int, folder: Path) -> Iterator[Row]:
    """A row for each kind: medians of interleaved rounds, and the shares of what takes the time."""
    model = make_model(folder / "model")
    for kind in kinds:
        file = make_samples(folder / "data", kind, samples)
        reader, loader = open_reader(model, file), open_loader(model, file)
        ways: dict[str, Callable[[], object]] = {
            "dhp": lambda own=reader: _read(own, samples), "loader": lambda own=loader: sum(1 for _ in own),
        }  # fmt: skip
        if kind != VIDEO:
            reduced = open_reader(model, file, [REDUCED])
            ways["reduced"] = lambda own=reduced: _read(own, samples)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, run in ways.items():
                spent = _seconds(run)
                seconds[way] += [spent] * (number > 0)  # the first is warm-up
        ratios = {way: median(map(truediv, seconds["loader"], seconds[way])) for way in ways}
        yield {
            "kind": kind, "samples": samples, "rounds": rounds,
            **{f"{way}_samples_s": round(samples / median(own), 2) for way, own in seconds.items()},
            **{f"{way}_over_loader": round(ratios[way], 2) for way in ways if way != "loader"},
            "shares": _shares(ways["dhp"]),
        }  # fmt: skip


def _read(reader: BatchReader, samples: int) -> None:
    for step in range(samples // MICRO_BATCH):
        reader.step(step)


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _shares(run: Callable[[], object]) -> dict[str, float]:
    """Of the seconds of a run, those of each cause without what it calls of the others."""
    seconds: Counter[str] = Counter()
    with ExitStack() as stack:
        for cause, names in CAUSES.items():
            for name in names:
                stack.enter_context(_counted(name, cause, seconds))
        run()
    return {cause: round(seconds[cause] / sum(seconds.values()), 3) for cause in CAUSES}


_STACK: list[str] = []


@contextmanager
def _counted(name: str, cause: str, seconds: "Counter[str]") -> Iterator[None]:
    """Count the seconds of a function; those of what it calls, and is counted too, are taken off."""
    place, _, function = name.rpartition(".")
    target = resolve_name(place)
    whole = getattr(target, function)

    def counted(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        _STACK.append(cause)
        try:
            return whole(*given, **named)
        finally:
            _STACK.pop()
            spent = time.perf_counter() - begun
            seconds[cause] += spent
            if _STACK:
                seconds[_STACK[-1]] -= spent

    with mock.patch.object(target, function, counted):
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.reading", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--samples", type=int, default=32, help="of a round, a multiple of eight")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dhp-reading-") as folder:
        for row in rows(given.kinds, given.samples, given.rounds, Path(folder)):
            print(json.dumps(row | {"command": command_of("reading", arguments)}), flush=True)


if __name__ == "__main__":
    main()
