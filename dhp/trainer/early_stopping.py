"""Ends a run whose evaluations have stopped getting better."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dhp.config.resolve import SIGNS
from dhp.config.training import EarlyStoppingConfig
from dhp.observe.metrics import EvalMetrics


class EarlyStopping:
    """Takes each evaluation, in the order in which they come. state: what a checkpoint keeps of it."""

    def __init__(self, asked: EarlyStoppingConfig, state: Mapping[str, Any]):
        """state: of the checkpoint that the run begins from; empty at its first step."""
        self._asked = asked
        self.state: dict[str, Any] = {"best": None, "waited": 0, "step": -1} | dict(state)

    @property
    def on(self) -> bool:
        """Whether the run has it."""
        return self._asked.metric is not None

    @property
    def stops(self) -> bool:
        """Whether the run is to end."""
        return self.on and self.state["waited"] >= self._asked.patience

    def has(self, step: int) -> bool:
        """Whether it has taken the evaluation after `step` steps, or one behind it."""
        return bool(self.state["step"] >= step)

    def add(self, found: Sequence[EvalMetrics]) -> None:
        """The lines of an evaluation; of one that was taken before, and of none, nothing is done."""
        if not self.on or not found or self.has(found[0].step):
            return
        value, best = metric_value(str(self._asked.metric), found), self.state["best"]
        better = value is not None and math.isfinite(value)
        if better and best is not None:
            sign = SIGNS[str(self._asked.metric).partition("/")[0]]
            better = sign * (value - best) > self._asked.min_delta
        self.state["step"] = found[0].step
        self.state["best"] = value if better else best
        self.state["waited"] = 0 if better else self.state["waited"] + 1

    def line(self) -> str:
        """Why the run ends."""
        asked, best = self._asked, self.state["best"]
        shown = "no finite value" if best is None else f"the best is {best:.4f}"
        return (
            f"stopped early after step {self.state['step']}: {asked.metric} has not become better by more than "
            f"{asked.min_delta:g} in {self.state['waited']} evaluations ({shown}; training.early_stopping)"
        )


def metric_value(metric: str, found: Sequence[EvalMetrics]) -> float | None:
    """A metric of `dhp.config.resolve.SIGNS` among an evaluation's lines, of which the last is about all datasets."""
    field, _, name = metric.removeprefix("eval_").partition("/")
    line = next((one for one in found if one.dataset == name), found[-1])
    return (line.preferences or {}).get(field) if field == "margin" else getattr(line, field)
