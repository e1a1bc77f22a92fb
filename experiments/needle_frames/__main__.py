"""`python -m experiments.needle_frames [--seeds 0] [--frames N …] [--shown N …]`: does training on longer videos find
more in longer ones, and are more found where more frames of the same videos are shown?"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from dhp.tiny.made_pictures import NEEDLES, make_needles
from experiments.commands import command_of, run_module
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


TRAINED_ON = {"short": (4, 8), "long": (16, 32, 48, 64), "longest": (1024,)}  # frames of the videos
BEFORE = {"longest": "long"}  # whose weights a model begins with
LASTS = 16  # frames of a needle in videos of which some frames are shown: eight seconds
SCATTERED = tuple(round((number + 0.5) * 0.618034 % 1, 4) for number in range(48))  # depths, no two frames apart alike


@dataclass(frozen=True)
class Size:
    """samples: to train on; steps: of training, None: those of the configuration; more_steps: of a model that begins
    with another's weights; frames: of the videos with needles; needles: at each length and depth."""

    samples: int
    steps: int | None
    frames: Sequence[int]
    needles: int
    more_steps: int = 20


def rows(
    models: Sequence[str], seeds: Sequence[int], size: Size, folder: Path, shown: Sequence[int] = ()
) -> Iterator[Row]:
    """A row for each seed, model and number of frames. shown: of the longest videos, so many frames in the place of
    all; then a row for each of these."""
    for seed in seeds:
        for model in models:
            run_dir = _trained(model, seed, size, folder)
            if shown:
                yield from (_shown(run_dir, model, seed, max(size.frames), most) for most in shown)
                continue
            frames = ",".join(map(str, size.frames))
            yield from _found(_asked(run_dir, seed, ["--frames", frames, "--needles", str(size.needles)]), model, seed)


def _trained(model: str, seed: int, size: Size, folder: Path) -> Path:
    """The run's directory. A model that begins with another's weights has that one trained before, once."""
    run_dir = folder / f"{model}-{seed}"
    if not run_dir.exists():
        data = make_needles(folder / f"{model}-data-{seed}", size.samples, TRAINED_ON[model], seed)
        begin, steps = [], size.steps
        if model in BEFORE:
            weights, steps = folder / f"{model}-weights-{seed}", size.more_steps
            run_module(["dhp", "export", str(_trained(BEFORE[model], seed, size, folder)), str(weights)])
            begin = [f"{part}.model_name={weights}" for part in ("vision", "text")]
        run_module([*_training(run_dir, data, seed, steps), *begin])
    return run_dir


def _training(run_dir: Path, data: Path, seed: int, steps: int | None) -> list[str]:
    entry = "data.data_registry.needles"
    more = [] if steps is None else [f"training.max_steps={steps}"]
    place = [f"{entry}.annotation_path={data / NEEDLES}", f"{entry}.data_path={data}"]
    work = [f"data.video_max_frames={max(map(max, TRAINED_ON.values()))}", "cluster.threads_per_actor=1"]
    return ["dhp.train_ray", "--config-name=needle_tiny", f"run_dir={run_dir}", f"seed={seed}", *place, *work, *more]


def _asked(run_dir: Path, seed: int, what: Sequence[str]) -> Row:
    run_module(["dhp", "evaluate", "needle", str(run_dir), *what, "--seed", str(seed), "--out", str(run_dir)])
    table: Row = json.loads((run_dir / "needle.json").read_text(encoding="utf-8"))
    return table


def _shown(run_dir: Path, model: str, seed: int, frames: int, most: int) -> Row:
    """Of the same videos, one for each depth: the share of needles that was found where so many frames are shown."""
    depths = ",".join(map(str, SCATTERED))
    what = ["--frames", str(frames), "--depths", depths, "--needles", "1", "--lasts", str(LASTS), "--shown", str(most)]
    of_depths = [share for (share,) in _asked(run_dir, seed, what)["found"]]
    found = round(sum(of_depths) / len(of_depths), 4)
    of = {"trained_on": model, "trained_frames": list(TRAINED_ON[model]), "seed": seed, "frames": frames}
    return of | {"shown": most, "lasts": LASTS, "found": found, "videos": len(of_depths)}


def _found(table: Row, model: str, seed: int) -> Iterator[Row]:
    """A row for each length: the share of needles that was found, over all depths and at each."""
    for at, frames in enumerate(table["frames"]):
        of_depths = [shares[at] for shares in table["found"]]
        yield {
            "trained_on": model, "trained_frames": list(TRAINED_ON[model]), "seed": seed, "frames": frames,
            "found": round(sum(of_depths) / len(of_depths), 4), "depths": table["depths"],
            "by_depth": [round(share, 4) for share in of_depths],
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.needle_frames", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=TRAINED_ON, default=["short", "long"], help="by what they learn")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="none: only what was read")
    parser.add_argument("--samples", type=int, default=512, help="to train on")
    parser.add_argument("--steps", type=int, help="of training; those of the configuration by default")
    parser.add_argument("--more-steps", type=int, default=20, help="of longest, which begins with the weights of long")
    parser.add_argument("--frames", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--needles", type=int, default=6, help="at each length and depth")
    parser.add_argument("--shown", nargs="+", type=int, default=[], help="frames shown of the longest videos, in turn")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="PNG of all rows")
    given = parser.parse_args(arguments)
    command = command_of("needle_frames", arguments)
    lines = [json.loads(line) for file in given.read for line in file.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if "trained_on" in line]
    with tempfile.TemporaryDirectory(prefix="dhp-needles-") as folder:
        size = Size(given.samples, given.steps, given.frames, given.needles, given.more_steps)
        for row in rows(given.models, given.seeds, size, Path(folder), given.shown):
            print(json.dumps(row | {"command": command}), flush=True)
            found.append(row)
    if given.plot is not None:
        of_lengths = [row for row in found if "shown" not in row and row["trained_on"] not in BEFORE]
        draw(of_lengths, given.plot)


if __name__ == "__main__":
    main()
