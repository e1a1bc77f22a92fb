"""Plans of the measuring steps: the second of the four steps of adaptive recomputation.

OmniBal (Yao et al. 2025) tries settings and adds recomputing where one fails. A training step that fails is not to be
survived, so here the bytes that a layer adds while it is recomputed bound what it can keep, before anything is tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dhp.config.recompute import CHOICES, OFFLOAD
from dhp.planner.costs import LayerCost, Plan, StageCosts

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
    there is where nothing else fits.
    """
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
