"""What parts took on their ranks in a run that measures, for the cuts of later runs.

Units are cut by operations, which say nothing of how fast a device does a tower's and a decoder's, nor of the pictures
and rows that the data has. A run that measures its activations (`memory.accounting`, or recompute=auto) keeps, after
some steps, the seconds of a micro-batch through each part, by all that they depend on; a later run of the same shape
with other stages weighs its units by them. Both need `memory.cache_dir`: what lies in a run's own folder must not
change the cuts, and so the last bits, of a run that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dhp.config.parts import parts, resolved
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config, PartConfig
from dhp.core.axes import Degrees
from dhp.core.graph import StageGraph
from dhp.core.reports import StageReport, StageUsage
from dhp.models.family import Family
from dhp.plan.count.costs import read_entry, write_entry
from dhp.plan.count.units import Unit
from dhp.plan.recompute.run_shape import run_shape, usage_of

FILE = "seconds.json"
STEPS = 5  # behind the first, in which much happens once


@dataclass(frozen=True)
class PartSeconds:
    """Of one micro-batch through a part, on one rank of each of its stages. backward_s: without what layers recompute
    where a plan chooses it."""

    forward_s: float
    backward_s: float


class SecondsOfParts:
    """The seconds of some steps of a run, which are then kept."""

    def __init__(self, config: Config, graph: StageGraph, family: Family, cache_dir: str):
        self._cache_dir = cache_dir
        self._config, self._graph, self._family = config, graph, family
        self._steps: list[dict[str, PartSeconds]] = []
        self._seen = 0

    def learn(self, reports: Mapping[str, Sequence[StageReport]]) -> None:
        """Take the reports of a step, by stage. Behind the last that counts, the medians are written."""
        self._seen += 1
        if self._seen == 1 or len(self._steps) == STEPS:
            return
        usages = {stage: usage_of(of_ranks) for stage, of_ranks in reports.items()}
        found = {name: self._of_part(name, usages) for name in self._graph.parts()}
        self._steps.append({name: seconds for name, seconds in found.items() if seconds is not None})
        if len(self._steps) == STEPS:
            self._keep()

    def _of_part(self, name: str, usages: Mapping[str, StageUsage | None]) -> PartSeconds | None:
        own = [usages[stage.name] for stage in self._graph.of_part(name)]
        measured = [usage for usage in own if usage is not None]
        if len(measured) < len(own):
            return None  # nothing went back through some stage
        automatic = parts(self._config)[name].recompute == "auto"
        again = sum(layer.replay_s for usage in measured for layer in usage.layers) if automatic else 0.0
        count = micro_batches(self._config)
        forward_s = sum(usage.forward_s for usage in measured)
        backward_s = max(0.0, sum(usage.backward_s for usage in measured) - again)
        return PartSeconds(forward_s / count, backward_s / count)

    def _keep(self) -> None:
        found = {name: [step[name] for step in self._steps if name in step] for name in self._graph.parts()}
        medians = {
            name: PartSeconds(median(one.forward_s for one in own), median(one.backward_s for one in own))
            for name, own in found.items()
            if own
        }
        entry = {name: asdict(seconds) for name, seconds in medians.items()}
        write_entry(_path(self._cache_dir), _shape(self._config, self._family), entry)


def as_measured(config: Config, family: Family, units: tuple[Unit, ...]) -> tuple[tuple[Unit, ...], str]:
    """The units of one part or several with the seconds that an earlier run measured of these parts, as far as layers
    of a part differ by their operations; and a note that it is so. As they are where some part was not measured."""
    if config.memory.cache_dir is None:
        return units, ""
    try:
        entry = read_entry(_path(config.memory.cache_dir), _shape(config, family)) or {}
        known = {name: PartSeconds(**values) for name, values in entry.items()}
    except (AttributeError, TypeError):
        known = {}  # no such file
    names = dict.fromkeys(unit.part for unit in units)
    if any(name not in known for name in names):
        return units, ""
    found: list[Unit] = []
    for name in names:
        own = [unit for unit in units if unit.part == name]
        forward = known[name].forward_s / sum(unit.forward_s for unit in own)
        behind = sum(unit.backward_s for unit in own)
        backward = known[name].backward_s / behind if behind else 1.0
        found += [replace(u, forward_s=u.forward_s * forward, backward_s=u.backward_s * backward) for u in own]
    return tuple(found), ", by seconds measured before"


def _path(cache_dir: str) -> Path:
    return Path(cache_dir) / FILE


def _shape(config: Config, family: Family) -> dict[str, Any]:
    """All that the seconds depend on: how a part is shared out within a stage, not into how many it is cut."""
    from dhp.parallel.device import device_name  # imports torch

    recompute = {name: [resolved(part.recompute)] for name, part in parts(config).items()}
    world = {name: asdict(_degrees(part)) for name, part in parts(config).items()}
    shape = run_shape(config, device_name(), family.config.to_dict(), recompute, world)
    return {key: value for key, value in shape.items() if key != "parallelism"}


def _degrees(part: PartConfig) -> Degrees:
    return Degrees.read(lambda axis: resolved(getattr(part, axis)))
