"""Plans the least recomputing that a budget admits."""

from collections.abc import Iterator, Mapping, Sequence

from dhp.config.layout import OFFLOAD
from dhp.core.reports import RecomputePolicies
from dhp.plan.count.costs import Arrangement, LayerCost, Plan, StageCosts, predicted_bytes


def best_plan(
    costs: Mapping[str, StageCosts], start: Plan, auto: frozenset[str], arrangement: Arrangement, budget_bytes: float
) -> Plan:
    """From `start`, in which every layer of the stages in `auto` recomputes everything, towards keeping more; where it
    does not fit, towards host memory.

    Each time the one change that saves most seconds for each byte of its devices' peak. A stage with a larger share of
    what there is to save gets a larger share of the memory that way, whichever device it is on. A stage on devices that
    are too full as it is stays as it is, and so do stages that are not in `auto`."""
    plan = _relieved(costs, dict(start), auto, arrangement, budget_bytes)
    while True:
        best, best_rate = None, 0.0
        for stage, choices, saved_s in _changes(costs, plan, auto):
            near = _near(costs, stage, arrangement)
            needed = predicted_bytes(near, {**plan, stage: choices}, arrangement)
            added = max(1.0, _added(near, plan, stage, choices, arrangement))
            if needed <= budget_bytes and saved_s / added > best_rate:
                best, best_rate = (stage, choices), saved_s / added
        if best is None:
            return plan
        plan[best[0]] = best[1]


def _changes(
    costs: Mapping[str, StageCosts], plan: Plan, auto: frozenset[str]
) -> Iterator[tuple[str, RecomputePolicies, float]]:
    """Plans of a stage in which one layer recomputes less, and the seconds that saves.

    Of layers alike, the last that recomputes as much: what it keeps is freed first."""
    for stage in sorted(auto & set(costs)):
        known, choices = costs[stage], plan[stage]
        last = {(known.kinds[index], choice): index for index, choice in enumerate(choices)}
        for (kind, choice), index in last.items():
            for other, cost in known.layers[kind].items():
                if other == OFFLOAD:
                    continue  # it saves no time, whatever one measurement says
                saved_s = known.layers[kind][choice].replay_s - cost.replay_s
                if saved_s > 0:
                    yield stage, (*choices[:index], other, *choices[index + 1 :]), saved_s


def filled_plan(
    costs: Mapping[str, StageCosts], start: Plan, auto: frozenset[str], arrangement: Arrangement, budget_bytes: float
) -> Plan:
    """The same in a fraction of the time, for layers of which many are alike, as those of a forecast are: for each kind
    of layer, steps between choices by seconds saved a byte, each for as many layers as there is room for."""
    plan = dict(start)
    most_bytes = max(budget_bytes, predicted_bytes(costs, plan, arrangement))
    for stage, places, choice, other in _steps(costs, auto):
        own = [at for at in places if plan[stage][at] == choice]
        most = len(own)
        least = 0
        while least < most:  # of the last ones: what they keep is freed first
            count = (least + most + 1) // 2
            tried = {**plan, stage: _changed(plan[stage], own[len(own) - count :], other)}
            if predicted_bytes(costs, tried, arrangement) <= most_bytes:
                least = count
            else:
                most = count - 1
        plan[stage] = _changed(plan[stage], own[len(own) - least :], other)
    return plan


def _steps(costs: Mapping[str, StageCosts], auto: frozenset[str]) -> list[tuple[str, list[int], str, str]]:
    """Of each stage and kind of layer, the places of such layers, and from which choice to which other one: along the
    convex hull of bytes and seconds, the steps that save most for each byte first."""
    found: list[tuple[float, str, list[int], str, str]] = []
    for stage in sorted(auto & set(costs)):
        known = costs[stage]
        alike: dict[tuple[tuple[str, LayerCost], ...], list[int]] = {}
        for at, kind in enumerate(known.kinds):
            alike.setdefault(tuple(sorted(known.layers[kind].items())), []).append(at)
        for choices, places in alike.items():
            left = {choice: cost for choice, cost in choices if choice != OFFLOAD}
            now = max(left, key=lambda choice: left[choice].replay_s)
            while steps := [
                ((left[now].replay_s - cost.replay_s) / max(cost.held_bytes - left[now].held_bytes, 1.0), choice)
                for choice, cost in left.items()
                if cost.replay_s < left[now].replay_s
            ]:
                rate, other = max(steps)
                found.append((rate, stage, places, now, other))
                now = other
    return [step[1:] for step in sorted(found, key=lambda step: -step[0])]


def _changed(choices: RecomputePolicies, places: Sequence[int], other: str) -> RecomputePolicies:
    new = dict.fromkeys(places, other)
    return tuple(new.get(at, choice) for at, choice in enumerate(choices))


def offloaded(costs: Mapping[str, StageCosts], plan: Plan, auto: frozenset[str]) -> Plan:
    """The plan in which all layers of the stages in `auto` keep in host memory what enters them, as far as that was
    measured."""
    found = dict(plan)
    for stage in auto & set(costs):
        known = costs[stage]
        layers = zip(known.kinds, plan[stage], strict=True)
        found[stage] = tuple(OFFLOAD if OFFLOAD in known.layers[kind] else choice for kind, choice in layers)
    return found


def _relieved(
    costs: Mapping[str, StageCosts],
    plan: dict[str, RecomputePolicies],
    auto: frozenset[str],
    arrangement: Arrangement,
    most: float,
) -> dict[str, RecomputePolicies]:
    """Where even that takes more than `most` bytes, host memory keeps what enters some layers: as few as may be, those
    first that hold it longest."""
    least = offloaded(costs, plan, auto)
    while (before := predicted_bytes(costs, plan, arrangement)) > most:
        best, best_bytes = None, before
        for stage in sorted(auto & set(costs)):
            changed = (at for at, pair in enumerate(zip(plan[stage], least[stage], strict=True)) if pair[0] != pair[1])
            at = next(changed, None)
            if at is not None:
                choices = (*plan[stage][:at], OFFLOAD, *plan[stage][at + 1 :])
                needed = predicted_bytes(costs, {**plan, stage: choices}, arrangement)
                if best is None or needed < best_bytes:
                    best, best_bytes = (stage, choices), needed
        if best is None:
            return plan
        plan[best[0]] = best[1]
    return plan


def _near(costs: Mapping[str, StageCosts], stage: str, arrangement: Arrangement) -> dict[str, StageCosts]:
    """The stages that share devices with this one, itself included: its memory matters to no others."""
    names = frozenset[str]().union(*(stages for stages in arrangement.sharing if stage in stages))
    return {name: of_stage for name, of_stage in costs.items() if name in names}


def _added(
    near: Mapping[str, StageCosts], plan: Plan, stage: str, choices: RecomputePolicies, arrangement: Arrangement
) -> float:
    """Bytes that a change adds to the peak of the devices that the stage is on."""
    added = predicted_bytes(near, {**plan, stage: choices}, arrangement) - predicted_bytes(near, plan, arrangement)
    # A change below the peak costs nothing now, but what it holds may be in a later one's way.
    held = near[stage].held_bytes(choices) - near[stage].held_bytes(plan[stage])
    return max(added, 0.01 * held)
