"""Costs and usages that are made up, for planners that never see a tensor."""

from collections.abc import Sequence

from dhp.core.reports import LayerUsage, RecomputePolicies, StageUsage
from dhp.plan.bench.machine import Machine
from dhp.plan.count.costs import Arrangement, LayerCost, StageCosts
from dhp.plan.count.rates import Channel, Rates
from dhp.plan.recompute.planner import probes

MIB = 2**20
# held, added while recomputing (MiB) and seconds, of a layer like those of transformers
LAYER = {
    "none": (23, 0, 0.0),
    "light": (11, 12, 0.1),
    "mlp": (6, 17, 0.55),
    "linear": (2, 21, 0.9),
    "all": (1, 22, 1.0),
    "offload": (0, 23, 1.05),
}
ROWS = 1000

FREE = Channel(float("inf"))
RATES = Rates(1e12, 1e12, float("inf"), 0.0, FREE, FREE)
QUIET = {"handover": FREE, "action_s": 0.0, "step_s": 0.0, "contexts": False}


def machine(rates: Rates = RATES, **more: object) -> Machine:
    """Devices whose rates are round numbers."""
    return Machine("made", 2, 2, dict.fromkeys(("float32", "bfloat16"), rates), 2**40, **{**QUIET, **more})


def arrangement(shared: bool, outstanding: int, together: bool) -> Arrangement:
    """Vision and text, on the same devices or not; vision holds so many micro-batches."""
    sharing = (frozenset({"vision", "text"}),) if shared else (frozenset({"vision"}), frozenset({"text"}))
    holding = {"vision": {"vision": outstanding, "text": 0}, "text": {"vision": outstanding, "text": 1}}
    return Arrangement(sharing, holding, together)


def costs(layers: int, scale: float = 1.0, kinds: Sequence[str] | None = None) -> StageCosts:
    """A part of that many layers, `scale` times as wide; a layer of kind `slow` takes twice as long."""
    kinds = tuple(kinds or ("only",) * layers)
    of_kind = {
        kind: {
            choice: LayerCost(scale * held * MIB, scale * added * MIB, s * (2 if kind == "slow" else 1))
            for choice, (held, added, s) in LAYER.items()
        }
        for kind in kinds
    }
    return StageCosts(ROWS, kinds, 3 * MIB, 2 * MIB, of_kind)


def usage(known: StageCosts, choices: RecomputePolicies, rows: int = ROWS, factor: float = 1.0) -> StageUsage:
    """What a step under these choices would report, `factor` times what the costs say at the peak."""
    scale = rows / known.rows
    layers = []
    for index, choice in enumerate(choices):
        cost = known.layer(index, choice)
        held, added = round(cost.held_bytes * scale), round(cost.replay_bytes * scale)
        layers.append(LayerUsage(known.kinds[index], choice, held, added, cost.replay_s))
    peak = round(known.peak_bytes(choices) * scale * factor)
    before, after = round(known.before_bytes * scale), round(known.after_bytes * scale)
    return StageUsage(peak, before, after, rows, 4 * rows, 1.0, 2.0, tuple(layers))


def probed(kinds: Sequence[str]) -> list[RecomputePolicies]:
    """What a stage of such layers recomputes in the steps that measure, where there is memory for all of them."""
    plans, untried = probes({"text": kinds}, {"text": ("all",) * len(kinds)}, lambda plan: True)
    assert not untried
    return [plan["text"] for plan in plans]
