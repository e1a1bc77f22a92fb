"""What of a seed is trained, and its rows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.sight.datasets import RENAMED, Sets, make_sets
from experiments.sight.model import make_model
from experiments.sight.runs import Said, answers, export, losses, plain_answers, train
from experiments.sight.scores import CANARIES, LAYOUTS, Row, apart, by_kind, chances

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
        """Exact answers of each kind to the held-out questions with either pictures."""
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
