"""recompute=auto in a run: reports of the ranks go to the planner, its plans to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp.base.messages import StageReport, StageUsage
from dhp.config.recompute import read_choices
from dhp.config.schema import Config
from dhp.models.registry import load_family
from dhp.planner.cache import read_costs, write_costs
from dhp.planner.costs import Arrangement
from dhp.planner.planner import Planner
from dhp.planner.profile import fullest
from dhp.planner.table import mebibytes, plan_table
from dhp.run.settings import world
from dhp.step.schedule import VISION, Forward, Schedule
from dhp.step.stages import Group

GIB = 2**30
_TOO_SMALL = (
    "; it does not fit even so: raise memory.budget_gib, lower training.micro_batch_size or data.max_pixels, "
    "or share the work among more actors"
)


class Recomputing:
    """One run's plan, from the first step on."""

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, Group],
        device: str,
        schedule: Schedule,
        say: Callable[[str], None],
    ):
        """groups: the parts' ranks, by name. device: cpu | cuda."""
        self._groups, self._say = groups, say
        family = load_family(config.text.model_name)
        kinds = {"vision": family.tower.layers.kinds, "text": family.decoder.layers.kinds}
        written = {"vision": config.vision.recompute, "text": config.text.recompute}
        fixed = {part: read_choices(text, len(kinds[part])) for part, text in written.items() if text != "auto"}
        self._auto = [part for part in kinds if part not in fixed]
        self._folder = Path(config.memory.cache_dir or config.run_dir)
        self._shape = run_shape(config, device, family.config.to_dict(), fixed)
        self._budget = config.memory.budget_gib * GIB
        known = read_costs(self._folder, self._shape)
        arrangement = arrange(schedule, config.cluster.collocate, device)
        self._planner = Planner(kinds, fixed, arrangement, self._budget, known)
        if known is None:
            self._say("recompute      everything at first, and measured; the plan follows after some steps")
        else:
            self._say(f"recompute      measured before, in {self._folder}")
            self._apply()

    def learn(self, reports: Mapping[str, Sequence[StageReport]]) -> None:
        """A step's reports of all ranks, by part. Ranks are told when there is another plan, from the step after the
        last one submitted on."""
        usages = {part: usage_of(of_ranks) for part, of_ranks in reports.items()}
        peak = self._planner.measured_bytes(usages)
        was_settled = self._planner.settled
        if not self._planner.learn(usages):
            return
        if was_settled and self._planner.settled:
            self._say(f"recompute      {mebibytes(peak)} are more than the budget, so more is recomputed")
        elif was_settled:
            self._say("recompute      a part has its first work: everything again, and measured; a new plan follows")
        if self._planner.settled:
            write_costs(self._folder, self._shape, self._planner.costs())
        self._apply()

    def _apply(self) -> None:
        plan = self._planner.asked
        for part in self._auto:
            self._groups[part].execute_all_async("set_recompute", plan[part], returns=0)
        if not self._planner.settled:
            return
        needed = self._planner.predicted_bytes()
        fits = "" if needed <= self._budget else _TOO_SMALL
        lines = [*plan_table(self._planner.costs(), plan)]
        lines.append(
            f"{mebibytes(needed)} of {mebibytes(self._budget)} expected on the fullest device, "
            f"{self._planner.saved_s() * 1e3:.0f} ms a step less than with everything recomputed{fits}"
        )
        for line in lines:
            self._say(f"recompute      {line}")


def usage_of(reports: Sequence[StageReport]) -> StageUsage | None:
    """Of a part's ranks, what the fullest one took; None when none had work."""
    usages = [report.usage for report in reports if report.usage is not None]
    return fullest(usages) if usages else None


def activation_bytes(reports: Mapping[str, Sequence[StageReport]]) -> dict[str, int] | None:
    """By part, the peak of the rank whose activations took most; None where they are not measured."""
    usages = {part: usage_of(of_ranks) for part, of_ranks in reports.items()}
    return {part: usage.peak_bytes for part, usage in usages.items() if usage is not None} or None


def arrange(schedule: Schedule, collocate: bool, device: str) -> Arrangement:
    """What of both parts is alive together under a schedule."""
    outstanding = most = 0
    for action in schedule:
        if action.part == VISION:
            outstanding += 1 if isinstance(action, Forward) else -1
            most = max(most, outstanding)
    # On GPUs, memory that one process has freed stays in its allocator's cache and is not the other's to use.
    return Arrangement(shared=collocate, outstanding=most, together=most > 1 or device == "cuda")


def run_shape(config: Config, device: str, model: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides what a layer costs: runs that agree in it share their measurements."""
    sizes = {"micro_batch_size": config.training.micro_batch_size, "packing": config.data.packing}
    pixels = {"min_pixels": config.data.min_pixels, "max_pixels": config.data.max_pixels}
    parts = {"vision": config.vision, "text": config.text}
    return {
        "model": {key: _plain(model.get(key)) for key in ("model_type", "vision_config", "text_config")},
        "world": world(config),
        "parallelism": {name: part.parallelism for name, part in parts.items()},
        "dtype": {name: part.dtype for name, part in parts.items()},
        "fixed": {name: list(choices) for name, choices in fixed.items()},
        "datasets": list(config.data.datasets),
        "device": device,
        **sizes,
        **pixels,
        "video": [config.data.video_fps, config.data.video_max_frames, config.data.video_max_pixels],
    }


def _plain(value: Any) -> Any:
    """Numbers, text and lists of a model's configuration; what else it holds says nothing of its shape."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if not str(key).startswith("_")}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
