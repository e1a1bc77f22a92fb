"""`python -m experiments.stages_on_off [--ways WAY …] [--seeds 0] [--last-steps 60]`: what do two stages give?"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.observe.metrics import EvalMetrics, read_evaluations, read_record
from dhp.tiny.made_pictures import ANNOTATIONS, make_dataset, make_needles
from dhp.tiny.made_pictures import NEEDLES as NEEDLES
from experiments.commands import run_module

FIRST = ("alignment", "pretraining")  # that all ways share
STAGES = {3: ("short_finetuning",), 4: ("extension_to_8k", "extension_to_16k")}  # by their numbers in LongVILA
LAST = "long_finetuning"
# As table 6 has them.
WAYS = {"all stages": (), "without 3": (3,), "without 4": (4,), "without 3 and 4": (3, 4)}
VIDEOS = {"short": (16, 32), "medium": (48, 64), "long": (96, 128)}  # frames; training has 16 to 64
PICTURES = "pictures"
SEED = 1  # of held-out samples; those of training have seed 0


def kept_stages(way: str) -> list[str]:
    """Of a way, in their order."""
    middle = [name for number, names in STAGES.items() if number not in WAYS[way] for name in names]
    return [*FIRST, *middle, LAST]


def leave_out(names: Sequence[str]) -> list[str]:
    """Overrides for a run without these stages."""
    return [f"~stages.{name}" for name in names]


def lengths(names: Sequence[str], steps: int | None, last: int) -> list[str]:
    """Overrides: so many steps of the last stage, and of the others of these, which have their own by default."""
    own = {name: last if name == LAST else steps for name in names}
    return [f"stages.{name}.settings.training.max_steps={count}" for name, count in own.items() if count is not None]


def first_alone() -> list[str]:
    """Overrides for the stages that all ways share."""
    return leave_out([*(name for names in STAGES.values() for name in names), LAST])


def without(way: str) -> list[str]:
    """Overrides for the stages of a way."""
    return leave_out([name for number in WAYS[way] for name in STAGES[number]])


def hold_out(folder: Path, samples: int) -> list[str]:
    """Make the held-out sets below `folder`; overrides by which the last stage is evaluated on them."""
    pictures = make_dataset(folder / PICTURES, samples, SEED)
    places = {PICTURES: (pictures / ANNOTATIONS, pictures)}
    for name, frames in VIDEOS.items():
        videos = make_needles(folder / name, samples, frames, SEED)
        places[name] = videos / NEEDLES, videos
    entries = [
        f"+data.data_registry.held_out_{name}={{annotation_path: {json.dumps(str(file))}, data_path: "
        f"{json.dumps(str(data))}}}"
        for name, (file, data) in places.items()
    ]
    asked = ", ".join(f"held_out_{name}" for name in places)
    return [*entries, f"+stages.{LAST}.settings.data.eval_datasets=[{asked}]"]


HELD_OUT = "held_out_"


Row = dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """steps: of each stage but the last; None: those of the configuration. last: of the last. samples: of each held-out
    set."""

    steps: int | None
    last: int
    samples: int


def rows(ways: Sequence[str], seeds: Sequence[int], given: Lengths, folder: Path) -> Iterator[Row]:
    """A row for each seed and way. The stages that all ways share are trained once for each seed."""
    made = [f"tiny_assets={folder / 'assets'}", "cluster.threads_per_actor=1"]
    asked = hold_out(folder / "held_out", given.samples)
    for seed in seeds:
        shared = folder / f"seed-{seed}"
        train(shared, [*made, f"seed={seed}", *first_alone(), *lengths(FIRST, given.steps, given.last)])
        for way in ways:
            run_dir = folder / "run"
            shutil.copytree(shared, run_dir)
            own = lengths(kept_stages(way), given.steps, given.last)
            train(run_dir, [*made, f"seed={seed}", *without(way), *asked, *own])
            yield row_of(way, seed, run_dir)
            shutil.rmtree(run_dir)


def train(run_dir: Path, overrides: Sequence[str]) -> None:
    """`python -m dhp.train_ray --config-name=five_stages_tiny`; stages that are done in run_dir stay as they are.

    Raises RuntimeError with the end of what a failed run printed."""
    run_module(["dhp.train_ray", "--config-name=five_stages_tiny", f"run_dir={run_dir}", *overrides])


def row_of(way: str, seed: int, run_dir: Path) -> Row:
    """What a curriculum left. Raises ValueError where it did not go through the stages of its way."""
    told = json.loads((run_dir / "stages.json").read_text(encoding="utf-8"))
    stages = {name.partition("_")[2]: one["steps"] for name, one in told.items()}
    if list(stages) != kept_stages(way):
        raise ValueError(f"{way} has the stages {', '.join(kept_stages(way))}, but {run_dir} has {', '.join(stages)}")
    last = run_dir / f"{len(stages)}_{LAST}"
    found = {one.dataset.removeprefix(HELD_OUT): one for one in _evaluations(last) if one.dataset}
    return {
        "way": way, "stage_3": 3 not in WAYS[way], "stage_4": 4 not in WAYS[way], "seed": seed, "steps": stages,
        "loss": {name: round(_known(one.loss), 4) for name, one in found.items()},
        "accuracy": {name: round(_known(one.accuracy), 4) for name, one in found.items()},
        "samples": {name: one.samples for name, one in found.items()},
    }  # fmt: skip


def _evaluations(run_dir: Path) -> list[EvalMetrics]:
    return read_evaluations(read_record(run_dir))


def _known(value: float | None) -> float:
    assert value is not None  # of a set with target tokens
    return value


LAST_STEPS, SAMPLES = 60, 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.stages_on_off", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of each other stage; those of the configuration by default")
    parser.add_argument("--last-steps", type=int, default=LAST_STEPS, help="of the last stage, on long videos")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each held-out set")
    given = parser.parse_args(arguments)
    command = f"python -m experiments.stages_on_off --seeds {' '.join(map(str, given.seeds))}"
    command += f" --last-steps {given.last_steps} --samples {given.samples}"
    command += "" if given.steps is None else f" --steps {given.steps}"
    command += "" if given.ways == list(WAYS) else " --ways " + " ".join(f"'{way}'" for way in given.ways)
    with tempfile.TemporaryDirectory(prefix="dhp-stages-") as folder:
        lengths = Lengths(given.steps, given.last_steps, given.samples)
        for row in rows(given.ways, given.seeds, lengths, Path(folder)):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
