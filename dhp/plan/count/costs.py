"""Costs of layers by choice of recompute, kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dhp.core.files import write_whole
from dhp.core.graph import StageGraph
from dhp.core.reports import RecomputePolicies
from dhp.core.text import aligned, binary_size
from dhp.step.schedule import Schedule, outstanding


def read_entry(path: Path, shape: Mapping[str, Any]) -> Any:
    """What a run of this shape has kept, or None. A file that is no such cache is ignored: measuring again costs a few
    steps, an old file must not cost a run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[_key(shape)]["costs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_entries(path: Path) -> list[dict[str, Any]]:
    """All entries of a file: `shape`, and `costs` as they were kept. None of a file that is no such cache."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).values()
        return [entry for entry in found if {"shape", "costs"} <= set(entry)]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def write_entry(path: Path, shape: Mapping[str, Any], costs: Any) -> None:
    """Add or replace this shape's entry; others stay. The file appears whole or not at all."""
    try:
        entries = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        entries = {}
    entries[_key(shape)] = {"shape": dict(shape), "costs": costs}
    write_whole(path, json.dumps(entries, indent=1) + "\n")


def _key(shape: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, order=True)
class LayerCost:
    """One layer. held_bytes: saved from forward to backward; replay_bytes: added while its backward recomputes;
    replay_s: seconds of recomputing in a step."""

    held_bytes: float
    replay_bytes: float
    replay_s: float


@dataclass(frozen=True)
class StageCosts:
    """One stage with micro-batches of `rows` patches or tokens. layers: by kind of layer and choice.

    before_bytes, after_bytes: saved outside the layers, by what comes before them and after them."""

    rows: int
    kinds: tuple[str, ...]
    before_bytes: float
    after_bytes: float
    layers: Mapping[str, Mapping[str, LayerCost]]

    def layer(self, index: int, choice: str) -> LayerCost:
        """Cost of layer `index` under `choice`."""
        return self.layers[self.kinds[index]][choice]

    def held_bytes(self, choices: RecomputePolicies) -> float:
        """Bytes saved between forward and backward of one micro-batch."""
        layers = sum(self.layer(index, choice).held_bytes for index, choice in enumerate(choices))
        return self.before_bytes + layers + self.after_bytes

    def peak_bytes(self, choices: RecomputePolicies) -> float:
        """The most at any moment with one micro-batch: at the end of forward, or while backward recomputes a layer.

        Backward has freed what comes after a layer when it gets there."""
        held, peak = self.before_bytes, self.held_bytes(choices)
        for index, choice in enumerate(choices):
            cost = self.layer(index, choice)
            held += cost.held_bytes
            peak = max(peak, held + cost.replay_bytes)
        return peak

    def replay_s(self, choices: RecomputePolicies) -> float:
        """Seconds of recomputing in a step."""
        return sum(self.layer(index, choice).replay_s for index, choice in enumerate(choices))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `from_json`."""
        return {**asdict(self), "kinds": list(self.kinds)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StageCosts:
        """The inverse of `to_json`."""
        layers = {
            kind: {choice: LayerCost(**cost) for choice, cost in costs.items()}
            for kind, costs in values["layers"].items()
        }
        return cls(**{**values, "kinds": tuple(values["kinds"]), "layers": layers})


@dataclass(frozen=True)
class Arrangement:
    """Which activations are alive together.

    sharing: the stages of each device that has others than any before it; each stage is in one of them at least.

    holding: for each stage, how many micro-batches each stage holds at most while that one works, itself included.

    together: stages of a device may be at their peaks at once, because they work at the same time or because memory
    that one has freed stays with its process."""

    sharing: tuple[frozenset[str], ...]
    holding: Mapping[str, Mapping[str, float]]
    together: bool

    def device_bytes(self, held: Mapping[str, float], peaks: Mapping[str, float]) -> float:
        """The fullest device's most bytes, by stage. held: of one micro-batch; peaks: with all that the stage holds.
        Stages that are not in them take nothing."""
        return max((self._device(stages & set(peaks), held, peaks) for stages in self.sharing), default=0.0)

    def _device(self, stages: frozenset[str], held: Mapping[str, float], peaks: Mapping[str, float]) -> float:
        if self.together:
            return sum(peaks[stage] for stage in stages)
        working = (
            peaks[one] + sum(self.holding[one][other] * held[other] for other in stages - {one}) for one in stages
        )
        return max(working, default=0.0)


Plan = Mapping[str, RecomputePolicies]  # by stage


def predicted_bytes(costs: Mapping[str, StageCosts], plan: Plan, arrangement: Arrangement) -> float:
    """The fullest device's peak under a plan; stages without costs count nothing."""
    held = {stage: of_stage.held_bytes(plan[stage]) for stage, of_stage in costs.items()}
    peaks = {
        stage: max(0.0, arrangement.holding[stage][stage] - 1) * held[stage] + of_stage.peak_bytes(plan[stage])
        for stage, of_stage in costs.items()
    }
    return arrangement.device_bytes(held, peaks)


FILE = "recompute.json"


def read_costs(folder: Path, shape: Mapping[str, Any]) -> dict[str, StageCosts] | None:
    """Costs by part that a run of this shape cached in `folder`, or None."""
    try:
        return {part: StageCosts.from_json(costs) for part, costs in read_entry(folder / FILE, shape).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def write_costs(folder: Path, shape: Mapping[str, Any], costs: Mapping[str, StageCosts]) -> None:
    """Add or replace this shape's entry."""
    write_entry(folder / FILE, shape, {part: own.to_json() for part, own in costs.items()})


_HEADINGS = ("stage", "kind", "recomputed", "layers", "held a layer", "recomputing a layer")


def plan_table(costs: Mapping[str, StageCosts], plan: Plan) -> list[str]:
    """Lines: how many layers of each kind recompute what, with the bytes and milliseconds of one of them."""
    rows = [_HEADINGS]
    for stage, known in costs.items():
        for (kind, choice), count in Counter(zip(known.kinds, plan[stage], strict=True)).items():
            cost = known.layers[kind][choice]
            rows.append(
                (stage, kind, choice, str(count), binary_size(cost.held_bytes), f"{cost.replay_s * 1e3:.1f} ms")
            )
    return aligned(rows, left=len(_HEADINGS))


def arrange(graph: StageGraph, schedule: Schedule, device: str) -> Arrangement:
    """The stages that share devices, and what they hold at the same time under a schedule."""
    devices = range(graph.device_count())
    sharing = dict.fromkeys(frozenset(s.name for s in graph.stages if device in s.devices) for device in devices)
    chunks = {stage.name: len(stage.chunks) for stage in graph.stages}
    most = outstanding(schedule, graph)
    holding = {one: {other: n / chunks[other] for other, n in of.items()} for one, of in most.items()}
    several = any(most[stage][stage] > chunks[stage] for stage in most)
    # On GPUs, memory that one process has freed stays in its allocator's cache and is not the other's to use.
    return Arrangement(tuple(sharing), holding, together=several or device == "cuda")
