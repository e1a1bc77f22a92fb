"""`python -m experiments.sight [--seeds …] [--ways …] [--read FILE …]`: does a run learn from the picture?"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from dhp.observe.metrics import StepMetrics, read_metrics
from experiments.commands import ROOT, command_of, run_module
from experiments.figures import AIMED
from experiments.sight.datasets import RENAMED, Asked, Sets, make_model, make_sets
from experiments.sight.inject.sitecustomize import MET, VARIABLE


class Said(NamedTuple):
    """An answer: its text, and its tokens, the one that ended it included."""

    text: str
    tokens: int


@torch.inference_mode()
def plain_answers(model: Path, annotations: Path, limit: int, max_new_tokens: int = 6) -> list[Said]:
    """Of the first `limit` samples. The prompt is written out here, not taken from the code that dhp asks with."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        Qwen2VLImageProcessorPil.from_pretrained(model),
    )
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    found = []
    for sample in json.loads(annotations.read_text(encoding="utf-8"))[:limit]:
        pixels = processor(images=[Image.open(annotations.parent / sample["image"])], return_tensors="pt")
        places = "<|image_pad|>" * (int(pixels["image_grid_thw"].prod()) // processor.merge_size**2)
        # The newline behind the tag belongs to the tag, as docs/data.md has it.
        question = sample["conversations"][0]["value"].replace("<image>\n", f"<|vision_start|>{places}<|vision_end|>")
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        kinds = (ids == plain.config.image_token_id).long()
        named = {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        new = plain.generate(**named, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :]
        found.append(Said(tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return found


CONFIG = Path(__file__).with_name("config.yaml")
INJECT = Path(__file__).with_name("inject")
_CONFIGURATION = (f"--config-path={CONFIG.parent}", f"--config-name={CONFIG.stem}")


def train(run_dir: Path, settings: Sequence[str], fault: str = "") -> list[StepMetrics]:
    """The steps of a run, oldest first. fault: one of `inject/sitecustomize.py`. Raises RuntimeError for a run that
    fails, and for one without the fault that it should have."""
    met = run_dir.with_name(f"{run_dir.name}.met")
    environment = {"PYTHONPATH": f"{INJECT}:{ROOT}", VARIABLE: fault, MET: str(met)} if fault else {}
    run_module(["dhp.train_ray", *_CONFIGURATION, f"run_dir={run_dir}", *settings], environment)
    if fault and not met.exists():
        raise RuntimeError(f"the run in {run_dir} never met its fault ({fault}): what it replaces has another name now")
    return read_metrics(run_dir)


def losses(model: Path, settings: Sequence[str]) -> dict[str, float]:
    """Nats a target token of all held-out samples together, with their own pictures and with others'."""
    named = ["dhp", "evaluate", "loss", str(model), *_CONFIGURATION, "--json", *settings, "exchange=images"]
    lines = [json.loads(line) for line in run_module(named).splitlines() if line.startswith("{")]
    return {line["images"]: line["loss"] for line in lines if not line["dataset"]}


def answers(model: Path, dataset: str, out: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """A line of `python -m dhp generate` for every sample of a dataset, in its order."""
    asked = [f"checkpoint={model}", f"dataset={dataset}", "max_new_tokens=6", f"out={out}"]
    run_module(["dhp", "generate", *_CONFIGURATION, *asked, *settings])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def export(run_dir: Path, folder: Path) -> Path:
    """The run's newest checkpoint as an ordinary model."""
    run_module(["dhp", "export", str(run_dir), str(folder)])
    return folder


# In 64 bits: in 32, rounding alone grows over the steps, and a mistake of its size would not be told from it.
_BOTH = ["vision.dtype=float64", "text.dtype=float64", "data.eval_datasets=[]", "training.micro_batch_size=16"]
_PIPELINED = ["training.schedule=1f1b", "training.micro_batch_size=8"]


def _part(part: str, parallelism: str, *more: str) -> list[str]:
    return [f"{part}.parallelism={parallelism}", f"{part}.num_actors=2", *(f"{part}.{one}" for one in more)]


LAYOUTS = {
    "one": _BOTH,
    "seq2-tp2": [*_BOTH, *_part("vision", "sequence", "ulysses=2"), *_part("text", "tensor", "tensor=2")],
    "text-seq2": [*_BOTH, *_part("text", "sequence", "ulysses=2")],
    "data2": [*_BOTH, *_part("vision", "data"), *_part("text", "data")],
    "pipeline2": [*_BOTH, *_part("text", "pipeline", "pipeline=2"), *_PIPELINED],
    "chain2": [
        *_BOTH, *_part("vision", "pipeline", "pipeline=2"), *_part("text", "pipeline", "pipeline=2"), *_PIPELINED,
        "cluster.chain=true",
    ],
    "ring2": [*_BOTH, *_part("vision", "sequence", "ring=2", "ulysses=1")],
}  # fmt: skip


def apart(curve: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two losses of the same step."""
    return max(abs(one - two) / abs(one) for one, two in zip(curve, other, strict=True))


Shares = dict[str, float]
Row = Mapping[str, Any]

RIGHT, ABOVE_CHANCE = 0.9, 0.05  # shares
CANARIES = ("zeroed", "misplaced", "no_gradient")
ADAPTED = ("projector", "lora", "all")
LAYOUTS_AGREE = 1e-5  # relative


def by_kind(asked: Sequence[Asked], exact: Iterable[bool]) -> Shares:
    """The share of exact answers of each kind."""
    right: Counter[str] = Counter()
    for (kind, _), one in zip(asked, exact, strict=True):
        right[kind] += one
    return {kind: round(right[kind] / count, 4) for kind, count in Counter(kind for kind, _ in asked).items()}


def chances(asked: Sequence[Asked]) -> Shares:
    """By kind, the most that one and the same answer to a question gets: the share of the commonest."""
    found: Shares = {}
    for kind in dict.fromkeys(kind for kind, _ in asked):
        answers = Counter(answer for of, answer in asked if of == kind)
        found[kind] = round(max(answers.values()) / answers.total(), 4)
    return found


def missed(row: Row) -> list[str]:
    """Where a row is not what the goal wants of it, in words."""
    if row["what"] == "exported":
        return (
            [] if row["same"] == row["asked"] else [f"exported: {row['same']} of {row['asked']} answers are the same"]
        )
    if row["what"] == "layout":
        return [] if row["off"] <= LAYOUTS_AGREE else [f"{row['layout']}: losses are {row['off']:.1e} off"]
    level = {kind: chance + ABOVE_CHANCE for kind, chance in row["chance"].items()}
    canary = row["what"] in CANARIES
    found = [f"{kind} {row['right'][kind]:.0%} right" for kind in AIMED if not canary and row["right"][kind] < RIGHT]
    for which in ("right", "exchanged") if canary else ("exchanged",):
        high = [kind for kind in AIMED if row[which][kind] > level[kind] + 1e-9]
        found += [f"{kind} {row[which][kind]:.0%} {which}" for kind in high]
    return [f"seed {row['seed']}, {row['what']}: {one}" for one in found]


def goal(rows: Sequence[Row]) -> dict[str, Any]:
    """The last row: seeds that were run, what was not run of what the goal names, and what was missed."""
    of_seeds: dict[int, set[str]] = {}
    for row in rows:
        of_seeds.setdefault(row["seed"], set()).add(row["what"])
    wanted = ("scratch", "exported", *(f"renamed_{way}" for way in ADAPTED), *CANARIES)
    absent = [f"seed {seed}: {what}" for seed in range(3) for what in wanted if what not in of_seeds.get(seed, ())]
    absent += [] if any(row["what"] == "layout" for row in rows) else ["layouts"]
    found = [one for row in rows for one in missed(row)]
    return {
        "goal": "met" if not (found or absent) else "missed" if found else "open",
        "missed": found,
        "absent": absent,
    }


def sentence(row: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The result in words."""
    scratch = [one for one in rows if one["what"] == "scratch"]
    if not scratch:
        return "no training from scratch was run"
    least = min(one["right"][kind] for one in scratch for kind in AIMED)
    most = max(one["exchanged"][kind] - one["chance"][kind] for one in scratch for kind in AIMED)
    seeds = f"{len(scratch)} seed{'s' if len(scratch) > 1 else ''}"
    return (
        f"{seeds}: at least {least:.0%} exact on held-out combinations with right pictures, at most {most * 100:+.0f} "
        f"points from chance with exchanged ones; the goal is {row['goal']}"
    )


ADAPTING = {
    "renamed_projector": ["training.trainable=[projector]"],
    "renamed_lora": ["text.lora.rank=8", "training.frozen=[vision,projector]"],
    "renamed_all": [],
}
WAYS = ("scratch", "exported", *ADAPTING, *CANARIES, "layouts")


@dataclass(frozen=True)
class Size:
    """Optimizer steps from scratch, of a canary, with other names of colours, and of each layout; samples to train on;
    rounds of held-out questions; questions that the exported model answers by plain transformers."""

    steps: int
    canary_steps: int
    adapt_steps: int
    layout_steps: int
    samples: int
    rounds: int
    plain: int


class Seed:
    """Models, data and runs of one seed, in a folder."""

    def __init__(self, folder: Path, seed: int, size: Size, trained: Path | None = None):
        """trained: what an earlier run exported of this seed, in the place of what `scratch` trains."""
        self._folder, self._seed, self._size = folder, seed, size
        self._sets: Sets = make_sets(folder / "sets", seed, size.samples, size.rounds)
        self._start = make_model(folder / "start", seed)
        self._trained = trained or folder / "exported-scratch"
        self._said: list[Said] = []

    def rows(self, ways: Sequence[str]) -> Iterator[Row]:
        """Of each way, in the order of `WAYS`; those that start from what another one trained need it."""
        for way in (way for way in WAYS if way in ways):
            if way == "layouts":
                yield from self._layouts()
            elif way == "exported":
                yield self._exported()
            else:
                yield self._way(way)

    def _way(self, way: str) -> Row:
        """Train, export, measure losses and ask every held-out question with either picture."""
        began, adapts = time.monotonic(), way in ADAPTING
        names = RENAMED if adapts else ""
        start, steps = (self._trained, self._size.adapt_steps) if adapts else (self._start, self._size.steps)
        fault = way if way in CANARIES else ""
        steps = self._size.canary_steps if fault else steps
        settings = [*ADAPTING.get(way, ()), f"training.max_steps={steps}", *self._place(start, names)]
        taken = train(self._folder / way, settings, fault)
        trained_s = time.monotonic() - began
        model = export(self._folder / way, self._folder / f"exported-{way}")
        shutil.rmtree(self._folder / way)
        row = {"seed": self._seed, "what": way, "steps": steps, "train_loss": round(taken[-1].loss, 4)}
        row |= self._measured(model, names)
        if model != self._trained:
            shutil.rmtree(model)
        load = round(os.getloadavg()[0], 1)
        return row | {"train_s": round(trained_s), "seconds": round(time.monotonic() - began), "load": load}

    def _measured(self, model: Path, names: str) -> dict[str, Any]:
        place = self._place(model, names)
        loss = losses(model, place)
        row: dict[str, Any] = {f"loss_{which}": round(loss[of], 4) for which, of in LOSSES.items()}
        row |= {which: self._ask(model, which, place) for which in LOSSES}
        return row | {"chance": chances(self._sets.asked)}

    def _ask(self, model: Path, which: str, place: Sequence[str]) -> dict[str, float]:
        lines = answers(model, which, self._folder / f"{model.name}-{which}.jsonl", place)
        if which == "right" and model == self._trained:
            self._said = [Said(line["answer"], line["tokens"]) for line in lines]
        return by_kind(self._sets.asked, (line["exact"] for line in lines))

    def _exported(self) -> Row:
        """Answers by plain transformers beside those of `python -m dhp generate`: text and number of tokens."""
        began = time.monotonic()
        if not self._said:  # an earlier run's model
            self._ask(self._trained, "right", self._place(self._trained))
        plain = plain_answers(self._trained, self._sets.folder / "right.json", self._size.plain)
        same = sum(one == other for one, other in zip(plain, self._said, strict=False))
        row = {"seed": self._seed, "what": "exported", "asked": len(plain), "same": same}
        return row | {"seconds": round(time.monotonic() - began), "load": round(os.getloadavg()[0], 1)}

    def _layouts(self) -> Iterator[Row]:
        """The first steps in each layout, beside those of one actor a part."""
        common = [
            f"training.max_steps={self._size.layout_steps}",
            *self._place(self._start),
            "training.save_final=false",
        ]
        curves = {}
        for layout, settings in LAYOUTS.items():
            began, run_dir = time.monotonic(), self._folder / f"layout-{layout}"
            curves[layout] = [step.loss for step in train(run_dir, [*common, *settings])]
            shutil.rmtree(run_dir)
            row = {"seed": self._seed, "what": "layout", "layout": layout, "steps": len(curves[layout])}
            row |= {"off": apart(curves["one"], curves[layout]), "last_loss": curves[layout][-1]}
            yield row | {"seconds": round(time.monotonic() - began), "load": round(os.getloadavg()[0], 1)}

    def _place(self, model: Path, names: str = "") -> list[str]:
        parts = [f"{part}.model_name={model}" for part in ("vision", "text")]
        return [*parts, f"seed={self._seed}", *self._sets.registry(names)]


LOSSES = {"right": "own", "exchanged": "others"}  # as `evaluate loss exchange=images` names whose images were shown


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows that earlier runs printed, without their ends."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "what" in line]


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Of every seed and way. Layouts are compared with the first seed alone."""
    steps = given.steps, given.canary_steps or given.steps, given.adapt_steps, given.layout_steps
    size = Size(*steps, given.samples, given.rounds, given.plain)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="dhp-sight-", dir=given.folder) as folder:
            ways = [way for way in given.ways if way != "layouts" or seed == given.seeds[0]]
            yield from Seed(Path(folder), seed, size, given.trained).rows(ways)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.sight")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only what was read")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=5000, help="from scratch")
    parser.add_argument("--canary-steps", type=int, help="of each canary; by default as many as from scratch")
    parser.add_argument("--adapt-steps", type=int, default=1000, help="with other names of colours")
    parser.add_argument("--layout-steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=30000, help="to train on")
    parser.add_argument("--rounds", type=int, default=4, help="of held-out questions, 16 or 25 of a kind in each")
    parser.add_argument("--plain", type=int, default=100, help="questions for plain transformers")
    parser.add_argument("--trained", type=Path, help="what an earlier run exported of the one seed, for `scratch`")
    parser.add_argument("--folder", type=Path, help="for models and data while it runs")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    given = parser.parse_args(arguments)
    if {"exported", "renamed_projector", "renamed_lora", "renamed_all"} & set(given.ways) - {"scratch"}:
        if "scratch" not in given.ways and given.seeds and given.trained is None:
            parser.error(
                "exported and renamed_… start from what scratch trains: name it in --ways too, or --trained DIR"
            )
    if given.trained is not None and ("scratch" in given.ways or len(given.seeds) != 1):
        parser.error("--trained is of one seed, and in the place of scratch")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    found = read_rows(given.read)
    command = command_of("sight", arguments)
    for row in rows(given):
        print(json.dumps(dict(row) | {"command": command}), flush=True)
        found.append(row)
    last = goal(found)
    print(json.dumps(last | {"command": command}), flush=True)
    print(sentence(last, found), file=sys.stderr)


if __name__ == "__main__":
    main()
