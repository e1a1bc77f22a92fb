"""Adaptive recomputation (OmniBal, Yao et al. 2025), step by step."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dhp.config.layout import CHOICES, OFFLOAD
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.plan.count.costs import Arrangement, LayerCost, Plan, StageCosts, predicted_bytes
from dhp.plan.recompute.best_plan import best_plan, offloaded
from dhp.plan.recompute.profile import Profile

BASE = "all"
_KEEPING = tuple(choice for choice in CHOICES if choice not in (BASE, OFFLOAD))


def at_worst(costs: Mapping[str, StageCosts]) -> dict[str, StageCosts]:
    """Costs with a bound for each choice that was not measured: no layer keeps more than it has at hand while all of it
    is recomputed; one offloaded takes no more than one recomputed. Seconds are not bounded."""
    return {stage: replace(known, layers=_bounded(known)) for stage, known in costs.items()}


def _bounded(known: StageCosts) -> dict[str, dict[str, LayerCost]]:
    found = {}
    for kind, measured in known.layers.items():
        if BASE not in measured:  # of a stage that recomputes what the user said
            found[kind] = dict(measured)
            continue
        base = measured[BASE]
        most = LayerCost(base.held_bytes + base.replay_bytes, 0.0, 0.0)
        found[kind] = {**dict.fromkeys(_KEEPING, most), OFFLOAD: base, **measured}
    return found


@dataclass
class _Kind:
    """Layers alike of a stage, and the choices that no plan has shown yet."""

    stage: str
    layers: Sequence[int]
    left: list[str]


def probes(
    kinds: Mapping[str, Sequence[str]], everything: Plan, fits: Callable[[Plan], bool]
) -> tuple[list[Plan], frozenset[tuple[str, str]]]:
    """Plans in which layers of each kind are seen under each choice, few and with most layers as in `everything`; and
    (stage, choice) for which not even one layer fits.

    kinds: of the layers of each stage to change. fits: whether a plan may be tried. Offloading always may: it is what
    there is where nothing else fits."""
    waiting = [_Kind(stage, layers, _others()) for stage, of in kinds.items() for layers in _usable(of)]
    plans: list[Plan] = []
    untried: set[tuple[str, str]] = set()
    while any(kind.left for kind in waiting):
        plan = dict(everything)
        for kind in waiting:
            free = iter(kind.layers)
            layer = next(free, None)
            for choice in tuple(kind.left):
                if layer is None:
                    break
                changed = {**plan, kind.stage: _changed(plan[kind.stage], layer, choice)}
                if choice == OFFLOAD or fits(changed):
                    plan, layer = changed, next(free, None)
                    kind.left.remove(choice)
                elif plan == everything:  # and with others it would fit even less
                    untried.add((kind.stage, choice))
                    kind.left.remove(choice)
        if plan != everything:
            plans.append(plan)
    return plans, frozenset(untried)


def _others() -> list[str]:
    return [choice for choice in CHOICES if choice != BASE]


def _usable(kinds: Sequence[str]) -> list[list[int]]:
    """Layers that may change, by kind, the last first: backward comes to them first, so that what they keep is soon
    freed. The first of all changes only where its kind has no other: what all layers share is counted there."""
    of_kind: dict[str, list[int]] = defaultdict(list)
    for index in reversed(range(len(kinds))):
        of_kind[kinds[index]].append(index)
    return [layers[:-1] if layers[-1] == 0 and len(layers) > 1 else layers for layers in of_kind.values()]


def _changed(choices: tuple[str, ...], layer: int, choice: str) -> tuple[str, ...]:
    return (*choices[:layer], choice, *choices[layer + 1 :])


_SHORT = 1.1  # how much less of the budget counts after a step that ran out of memory
_COUNTED = 1.03  # the same where bytes were counted: the longest rows may not have been seen
PATIENCE = 16  # steps without work for a stage (no image), after which it is planned as if it had none


class Planner:
    """Plans what to recompute from now on, from what each step took. Decides only; others act.

    asked: the plan that is to be in force. budget_bytes: may be set anew before there is a plan. untried: (stage,
    choice) that the budget had no room to measure."""

    def __init__(
        self,
        kinds: Mapping[str, tuple[str, ...]],
        fixed: Plan,
        arrangement: Arrangement,
        budget_bytes: float,
        known: Mapping[str, StageCosts] | None = None,
        counted: bool = False,
        waits: bool = False,
    ):
        """kinds: of the layers of each stage. fixed: stages that recompute what the user said. known: costs that an
        earlier run has measured; a plan made of them is tried at once. counted: they were counted by the model's shape,
        of rows of which not all were looked at; seconds that are measured are not comparable to theirs. waits: with
        everything recomputed, until steps have shown how much memory is left."""
        self.budget_bytes, self._arrangement = budget_bytes, arrangement
        self._auto, self._kinds = frozenset(kinds) - set(fixed), kinds
        if known is not None and not self._auto <= set(known):
            known = None  # of a run in which a stage never had work
        self._everything: Plan = {stage: fixed.get(stage, ("all",) * len(of)) for stage, of in kinds.items()}
        self._profiles = {stage: Profile((known or {}).get(stage), counted) for stage in kinds}
        self._correction = _COUNTED if counted else 1.0  # measured / predicted, at worst
        self._steps, self._idle = 0, 0
        self._probes: list[Plan] | None = [] if known else None  # None: not planned yet
        self._probed, self.untried = frozenset[str](), frozenset[tuple[str, str]]()
        self.settled = bool(known) and not waits
        self.asked: Plan = self._best() if self.settled else self._everything
        self._planned = frozenset(known or ())

    def _plan_probes(self) -> list[Plan]:
        """Plans that measure layers of the stages seen so far under each choice, as far as the budget allows."""
        costs = at_worst(self.costs())
        self._probed = self._auto & set(costs)
        kinds = {stage: self._kinds[stage] for stage in sorted(self._probed)}

        def fits(plan: Plan) -> bool:
            return predicted_bytes(costs, plan, self._arrangement) <= self.budget_bytes / self._correction

        plans, self.untried = probes(kinds, self._everything, fits)
        return plans

    def learn(self, usages: Mapping[str, StageUsage | None]) -> bool:
        """One step's usage of each stage (None: it had no work). True when `asked` has become another plan."""
        self._steps += 1
        for stage, usage in usages.items():
            if usage is not None:
                self._profiles[stage].add(usage, timed=self._steps > 1)
        if not self._ran_as_planned(usages):
            return False
        if self.settled and any(usages[stage] is not None for stage in self._auto - self._planned if stage in usages):
            return self._begin_anew()
        return self._correct(usages) if self.settled else self._go_on()

    def run_short(self) -> None:
        """A step of `asked` has run out of memory somewhere: the budget counts for less from now on, and `asked` is
        another plan, which recomputes more."""
        self._correction *= _SHORT
        if not self.settled:
            self._probes, self.asked = None, self._everything
        elif self.asked != offloaded(self.costs(), self._everything, self._auto):
            self._recompute_more()

    @property
    def measures_everything(self) -> bool:
        """Whether all steps so far recomputed everything."""
        return not self.settled and self.asked == self._everything

    def costs(self) -> dict[str, StageCosts]:
        """Measured costs by stage; a stage has some once it was measured recomputing everything, or with its fixed
        choices."""
        found = {stage: profile.costs() for stage, profile in self._profiles.items()}
        return {stage: costs for stage, costs in found.items() if costs is not None and self._is_measured(stage, costs)}

    def _is_measured(self, stage: str, costs: StageCosts) -> bool:
        return all(choice in costs.layers[kind] for kind, choice in zip(costs.kinds, self._everything[stage]))

    def _begin_anew(self) -> bool:
        """Measure the layers of a stage whose first work comes after the plan was made without it."""
        self.settled, self._idle = False, 0
        self._probes, self.asked = None, self._everything
        return True

    def predicted_bytes(self) -> float:
        """The fullest device's peak under `asked`."""
        return self._correction * predicted_bytes(self.costs(), self.asked, self._arrangement)

    def saved_s(self) -> float:
        """Seconds of a step that `asked` saves against recomputing everything."""
        costs = self.costs()
        return sum(c.replay_s(self._everything[stage]) - c.replay_s(self.asked[stage]) for stage, c in costs.items())

    def measured_bytes(self, usages: Mapping[str, StageUsage | None]) -> float:
        """The fullest device's peak in a step, from what each stage alone reports."""
        known = {stage: usage for stage, usage in usages.items() if usage is not None}
        held = {
            stage: usage.before_bytes + sum(layer.held_bytes for layer in usage.layers) + usage.after_bytes
            for stage, usage in known.items()
        }
        return self._arrangement.device_bytes(held, {stage: usage.peak_bytes for stage, usage in known.items()})

    def _ran_as_planned(self, usages: Mapping[str, StageUsage | None]) -> bool:
        """Whether the step ran as asked: steps that were on their way when the plan changed did not."""
        ran = {stage: usage.choices for stage, usage in usages.items() if usage is not None and stage in self._auto}
        if any(choices != self.asked[stage] for stage, choices in ran.items()):
            return False
        missing = self._auto - set(ran)
        self._idle += bool(missing)
        return not missing or (self._idle > PATIENCE and bool(ran))

    def _go_on(self) -> bool:
        """The next measurement, or the plan. The first step's seconds do not count, so there are two of them."""
        if self._steps < 2:
            return False
        if self._probes is None:
            self._probes = self._plan_probes()
        if self._probes:
            self.asked = self._probes.pop(0)
            return True
        self.settled = True
        self._planned = self._probed or self._planned
        self.asked = self._best()
        return True

    def _correct(self, usages: Mapping[str, StageUsage | None]) -> bool:
        measured = self.measured_bytes(usages)
        least = offloaded(self.costs(), self._everything, self._auto)
        if measured <= self.budget_bytes or self.asked == least:
            return False
        predicted = predicted_bytes(self.costs(), self.asked, self._arrangement)
        self._correction = max(self._correction, measured / predicted)
        self._recompute_more()
        return True

    def _recompute_more(self) -> None:
        before = self.asked
        self.asked = self._best()
        while self.asked == before:  # the prediction was right, but still too much
            self._correction *= 1.02
            self.asked = self._best()

    def _best(self) -> Plan:
        budget = self.budget_bytes / self._correction
        return best_plan(self.costs(), self._everything, self._auto, self._arrangement, budget)


def runs(choices: RecomputePolicies) -> list[tuple[str, int, int]]:
    """Neighbours alike together: (choice, first layer, last layer)."""
    found: list[tuple[str, int, int]] = []
    for index, choice in enumerate(choices):
        if found and found[-1][0] == choice:
            found[-1] = (choice, found[-1][1], index)
        else:
            found.append((choice, index, index))
    return found


def as_text(choices: RecomputePolicies) -> str:
    """Choices as a configuration says them: `all:0-11,light:12-31`."""
    if set(choices) == {"none"}:
        return "none"
    return ",".join(f"{choice}:{first}" + (f"-{last}" if last > first else "") for choice, first, last in runs(choices))
