"""The best plan: as little recomputing as the budget admits, chosen by seconds saved for each byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dhp.base.messages import Choices
from dhp.planner.costs import Arrangement, PartCosts, Plan, predicted_bytes


def best_plan(
    costs: Mapping[str, PartCosts],
    start: Plan,
    auto: frozenset[str],
    arrangement: Arrangement,
    budget_bytes: float,
) -> Plan:
    """From `start`, in which every layer of the parts in `auto` recomputes everything, towards keeping more.

    Each time the one change that saves most seconds for each byte of the fullest device's peak. A part with a larger
    share of what there is to save gets a larger share of the memory that way, whichever device it is on. Parts that are
    not in `auto` stay as they are. When nothing fits, `start` comes back.
    """
    plan = dict(start)
    used = predicted_bytes(costs, plan, arrangement)
    while used <= budget_bytes:
        best, best_rate, best_bytes = None, 0.0, 0.0
        for part, choices, saved_s in _changes(costs, plan, auto):
            # Devices of their own: what one part takes is nothing to the other, so only its own peak counts.
            needed = predicted_bytes(costs, {**plan, part: choices}, arrangement)
            added = max(1.0, _added(costs, plan, part, choices, arrangement))
            if needed <= budget_bytes and saved_s / added > best_rate:
                best, best_rate, best_bytes = (part, choices), saved_s / added, needed
        if best is None:
            break
        plan[best[0]], used = best[1], best_bytes
    return plan


def _changes(costs: Mapping[str, PartCosts], plan: Plan, auto: frozenset[str]) -> Iterator[tuple[str, Choices, float]]:
    """Plans of a part in which one layer recomputes less, and the seconds that saves.

    Of layers alike, the last that recomputes as much: what it keeps is freed first.
    """
    for part in sorted(auto & set(costs)):
        known, choices = costs[part], plan[part]
        last = {(known.kinds[index], choice): index for index, choice in enumerate(choices)}
        for (kind, choice), index in last.items():
            for other, cost in known.layers[kind].items():
                saved_s = known.layers[kind][choice].replay_s - cost.replay_s
                if saved_s > 0:
                    yield part, (*choices[:index], other, *choices[index + 1 :]), saved_s


def _added(costs: Mapping[str, PartCosts], plan: Plan, part: str, choices: Choices, arrangement: Arrangement) -> float:
    """Bytes that a change adds: to the fullest device's peak where parts share devices, else to the part's own."""
    known = costs if arrangement.shared else {part: costs[part]}
    added = predicted_bytes(known, {**plan, part: choices}, arrangement) - predicted_bytes(known, plan, arrangement)
    # A change below the peak costs nothing now, but what it holds may be in a later one's way.
    held = costs[part].held_bytes(choices) - costs[part].held_bytes(plan[part])
    return max(added, 0.01 * held)
