"""`python -m dhp evaluate loss|needle RUN_OR_MODEL …`: evaluates a checkpoint or a model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp.cli.common import add_options, find_configuration, logs_folder, make_parser
from dhp.config.data import DatasetEntry
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.process import StartUp, heed, interruptible, say_nothing
from dhp.core.text import aligned, did_you_mean, nearest, shell_command
from dhp.observe.metrics import EvalMetrics

if TYPE_CHECKING:
    from dhp.data.read.annotations import Annotations
    from dhp.tiny.made_pictures import Hidden, Needle
    from dhp.trainer.evaluation import JudgedSample

NAME = "needles"  # of the dataset that is made
FRAMES, DEPTHS = (16, 32, 64, 128, 256), (0.0, 0.25, 0.5, 0.75, 1.0)


def needle(arguments: Sequence[str]) -> int:
    """evaluate needle: hide a picture in videos of several lengths, at several depths, and ask for it.

    A needle is found where each token of the answer is the likeliest one, after what truly stands before it (V-NIAH,
    Zhang et al. 2024, section 4). PATH as for evaluate loss. Without --haystack and --image: grey noise, plain frames
    of one colour, as --config-name=needle_tiny learns them. Writes needle.json and needle.png to --out."""
    parser = make_parser("evaluate needle", needle.__doc__)
    add_options(parser)
    parser.add_argument("--frames", type=_numbers(int), default=FRAMES, metavar="N,N,…", help="lengths of the videos")
    parser.add_argument(
        "--depths", type=_numbers(float), default=DEPTHS, metavar="D,D,…", help="0: first frames, 1: last"
    )
    parser.add_argument("--needles", type=int, default=6, help="videos of each length and depth")
    parser.add_argument("--lasts", type=int, default=2, metavar="N", help="frames of a needle; two are a step in time")
    parser.add_argument("--shown", type=int, metavar="N", help="frames of each video, evenly taken; all by default")
    parser.add_argument("--haystack", type=Path, metavar="VIDEO", help="whose frames are taken")
    parser.add_argument("--image", type=Path, help="the needle; with --question and --answer")
    parser.add_argument("--question")
    parser.add_argument("--answer")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the colours")
    parser.add_argument("--out", type=Path, default=Path(), help="a folder")
    given = parser.parse_intermixed_args(arguments)
    _check(given)
    heed()
    with interruptible(), tempfile.TemporaryDirectory(prefix="dhp-needle-") as folder:
        say = StartUp(time.perf_counter())
        shares = _measure(given, Path(folder), say)
    _tell(given, shares)
    return 0


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def numbers(text: str) -> tuple[Any, ...]:
        return tuple(map(kind, text.split(",")))

    return numbers


def _check(given: argparse.Namespace) -> None:
    for frames in given.frames:
        if frames < 4 or frames % 2:
            raise ConfigError(f"--frames {frames}: two frames are a step in time; take even numbers from 4 on")
        if not 2 <= given.lasts < frames:
            raise ConfigError(
                f"--lasts {given.lasts}: a needle has two frames or more, and fewer than --frames {frames}"
            )
    if given.shown is not None and given.shown < 2:
        raise ConfigError(f"--shown {given.shown}: two frames are a step in time; show 2 or more of each video")
    for depth in given.depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"--depths {depth}: 0 is a video's beginning and 1 its end")
    if given.needles < 1:
        raise ConfigError(f"--needles {given.needles}: at least one video of each length and depth")
    own = [given.image, given.question, given.answer]
    if any(one is not None for one in own) and None in own:
        raise ConfigError("--image, --question and --answer make a needle together: give all three, or none")
    if given.haystack is not None and given.image is None:
        raise ConfigError("--haystack without --image: plain frames of a colour may be in it. Give --image as well")


def _measure(given: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> list[list[float]]:
    """The share of needles that are found, for each depth and each length."""
    from dhp.tiny.made_pictures import write_needles

    config, checkpoint = find_configuration(given, [NAME])
    hidden = _hide(given)
    say(f"writing {len(hidden)} videos")
    annotations = write_needles(folder / "videos", hidden, given.haystack)
    most = max(*given.frames, config.data.video_max_frames) if given.shown is None else given.shown
    config = _reading(config, annotations, most)
    from dhp.trainer.evaluation import evaluate  # it imports torch and Ray

    found: list[bool] = []

    def judge(images: str, sample: JudgedSample) -> None:
        found.append(sample.exact)

    evaluate(replace(config, run_dir=str(folder / "logs")), checkpoint, say, judge=judge)
    cells = [found[first : first + given.needles] for first in range(0, len(found), given.needles)]
    shares = [sum(cell) / len(cell) for cell in cells]
    width = len(given.frames)
    return [shares[first : first + width] for first in range(0, len(shares), width)]


def _hide(given: argparse.Namespace) -> list[Hidden]:
    """Every cell's videos, depth by depth and length by length."""
    from dhp.tiny.made_pictures import Hidden, coloured_needles, read_needle

    needles: list[Needle] = coloured_needles()
    if given.image is not None:
        needles = [read_needle(given.image, given.question, given.answer)]
    cells = product(given.depths, given.frames, range(given.needles))
    return [
        Hidden(needles[number % len(needles)], frames, depth, given.seed + 1000 * number + place, given.lasts)
        for place, (depth, frames, number) in enumerate(cells)
    ]


def _reading(config: Config, annotations: Path, most: int) -> Config:
    """Batches of one video a replica, of which `most` frames are read."""
    from dhp.tiny.made_pictures import FPS

    entry = DatasetEntry(annotation_path=str(annotations), data_path=str(annotations.parent))
    data = replace(
        config.data,
        datasets=[NAME],
        eval_datasets=[NAME],
        data_registry={NAME: entry},
        video_fps=float(FPS),
        video_max_frames=most,
        max_tokens=None,
        on_bad_sample="error",
    )
    replicas = config.text.data or (config.text.num_actors if config.text.parallelism == "data" else 1)
    training = replace(config.training, batch_size=replicas, micro_batch_size=1)
    return replace(config, data=data, training=training)


def _tell(given: argparse.Namespace, shares: list[list[float]]) -> None:
    from dhp.report.plots import share_table

    given.out.mkdir(parents=True, exist_ok=True)
    columns, rows = [str(frames) for frames in given.frames], [f"{depth:g}" for depth in given.depths]
    print(f"{'depth':>6}" + "".join(f"{name:>8}" for name in columns) + "  frames")
    for name, values in zip(rows, shares, strict=True):
        print(f"{name:>6}" + "".join(f"{share:8.0%}" for share in values))
    found = {"model": str(given.path), "frames": list(given.frames), "depths": list(given.depths)}
    found |= {"needles": given.needles, "lasts": given.lasts, "shown": given.shown, "found": shares}
    (given.out / "needle.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    title = f"needles found, {given.needles} a cell"
    share_table("needle", title, shares, columns, rows, "across: frames; down: depth").write_png(given.out)
    print(f"written to {given.out}: needle.json, needle.png")


EXCHANGE = "exchange"  # a setting of the command alone


def main(arguments: Sequence[str]) -> int:
    """Run one of the evaluations; its exit status."""
    if not arguments or arguments[0] not in EVALUATIONS:
        what = arguments[0] if arguments else ""
        asked = what in ("-h", "--help")
        error = "" if asked or not what else f"{what} is no evaluation{did_you_mean([nearest(what, EVALUATIONS)])}\n"
        called = " ".join(shell_command("evaluate"))
        usage = f"{error}usage: {called} {'|'.join(EVALUATIONS)} PATH … (each has --help)"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return EVALUATIONS[arguments[0]](arguments[1:])


def loss(arguments: Sequence[str]) -> int:
    """evaluate loss: measure the loss of data.eval_datasets, without training.

    PATH is a run's directory (its newest checkpoint, or `checkpoints/best`), a checkpoint, or the directory of a
    Hugging Face model. A run's own config.yaml says the layout and the data; for a model, name a FILE.yaml or
    --config-name. key=value changes either, as data.eval_datasets=[NAME].

    exchange=images measures it twice: as the samples are, and each with the images of another one. A model that looks
    at images loses by that; only samples are counted that show images, and for which another one shows as many others.

    accuracy is of tokens, exact of samples: of those all of whose learned tokens are the likeliest, which greedy
    decoding would give. --samples FILE writes a JSON object a line of each: dataset, row in its annotations, right and
    all target tokens, exact. --by KEY says exact answers for each value that annotations have under a key of theirs, as
    kind or length.
    """
    parser = make_parser("evaluate loss", loss.__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object a dataset, on stdout alone")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="a JSON object a sample")
    parser.add_argument("--by", metavar="KEY", help="exact answers by a key of the annotations")
    add_options(parser)
    given = parser.parse_intermixed_args(arguments)
    heed()
    exchange, given.settings = _split_exchange(given.settings)
    if given.samples and not given.samples.absolute().parent.is_dir():
        raise ConfigError(f"--samples {given.samples}: there is no folder {given.samples.parent}. Make it first")
    config, checkpoint = find_configuration(given)
    say = say_nothing if given.json else StartUp(time.perf_counter())
    from dhp.data.sampling.dataset import OTHERS, OWN
    from dhp.trainer.evaluation import evaluate

    annotations = _annotations_by(config, given.by) if given.by else {}
    judged: list[tuple[str, JudgedSample]] = []

    def judge(images: str, sample: JudgedSample) -> None:
        judged.append((images, sample))

    with interruptible(), logs_folder("dhp-evaluate-") as logs:
        exchanges = (OWN, OTHERS) if exchange else ("",)
        judges = judge if given.samples or given.by else None
        found = evaluate(replace(config, run_dir=str(logs)), checkpoint, say, exchanges, judges)
    if given.samples:
        rows = (asdict(one) | {"exact": one.exact} | ({"images": images} if images else {}) for images, one in judged)
        given.samples.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for images, lines in found.items():
        for metrics in lines:
            row = asdict(metrics) | ({"images": images} if images else {})
            print(json.dumps(row) if given.json else _line(metrics, images))
    if given.by:
        by_value = list(_exact_by(given.by, annotations, judged))
        print("\n".join(map(json.dumps, by_value) if given.json else ["", *_value_lines(given.by, by_value)]))
    return 0


def _annotations_by(config: Config, key: str) -> dict[str, Annotations]:
    """The annotations of what is evaluated. Raises ConfigError where they do not have the key."""
    from dhp.config.resolve import resolve
    from dhp.data.read.annotations import require_key
    from dhp.data.remote.places import remote_of
    from dhp.data.sampling.dataset import open_dataset

    data = resolve(config).data
    opened = open_dataset(data.datasets, data.data_registry, allow_http=data.allow_http, remote=remote_of(data))
    annotations = opened.annotations()
    require_key(annotations, key, f"--by {key}")
    return annotations


def _exact_by(
    key: str, annotations: Mapping[str, Annotations], judged: Sequence[tuple[str, JudgedSample]]
) -> Iterator[dict[str, Any]]:
    """For whose images it was, each dataset and each value of the key, in order: how many samples, and the share of
    exact answers."""
    exact: dict[tuple[str, str, str], list[bool]] = {}
    for images, one in judged:
        value = annotations[one.dataset].value(one.row, key)
        exact.setdefault((images, one.dataset, value), []).append(one.exact)
    for (images, dataset, value), shares in sorted(exact.items()):
        row = {"dataset": dataset, "by": key, "value": value, "samples": len(shares)}
        row["exact"] = sum(shares) / len(shares)
        yield row | ({"images": images} if images else {})


def _value_lines(key: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    of = [[row["dataset"], row["value"] or "(none)", row.get("images", "")] for row in rows]
    shares = [[f"{row['samples']:,}", f"{row['exact']:.1%}"] for row in rows]
    cells = [["dataset", key, "images", "samples", "exact"], *(a + b for a, b in zip(of, shares, strict=True))]
    return aligned(cells, 3)


def _split_exchange(settings: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether images are exchanged, and the other settings. Raises ConfigError for anything else to exchange."""
    rest = [one for one in settings if one.partition("=")[0] != EXCHANGE]
    for one in settings:
        if one not in (*rest, f"{EXCHANGE}=images"):
            raise ConfigError(f"{one}: images alone can be exchanged; write {EXCHANGE}=images")
    return len(rest) < len(settings), rest


def _line(metrics: EvalMetrics, images: str) -> str:
    """images: whose images the samples had; "": nothing is said of it."""
    shown = f"{metrics.dataset or 'all together':16} " + (f"{images + ' images':14} " if images else "")
    if metrics.loss is not None:
        shown += f"loss {metrics.loss:.4f}  accuracy {metrics.accuracy:.1%}"
    if metrics.exact is not None:
        shown += f"  exact {metrics.exact:.1%}"
    counted = f"{metrics.target_tokens:,} target tokens  {metrics.samples:,} samples  {metrics.seconds:.1f} s"
    return f"{shown}  {counted}"


EVALUATIONS: dict[str, Callable[[Sequence[str]], int]] = {"loss": loss, "needle": needle}
