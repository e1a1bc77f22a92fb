"""Small chains of units, made by a seed, and every way to cut them."""

from dataclasses import replace
from itertools import combinations

import numpy as np

from dhp.plan.cut.problem import PartitionProblem, bounds_of
from dhp.plan.cut.simulate import Programs, pipeline_programs
from dhp.plan.cut.units import Saved, StageLink, Unit

PLAIN = {"none": Saved(8.0), "all": Saved(1.0, 7.0, 1.0)}


def unit(name: str = "text", forward_s: float = 1.0, **others) -> Unit:
    """A decoder's layer, backward twice as long as forward."""
    own = {"parameters": 1, "states_bytes": 4.0, "saved": PLAIN, "output_bytes": 1.0, "backward_s": 2 * forward_s}
    return Unit(name, others.pop("part", "text"), others.pop("layers", 1), forward_s, **(own | others))


def chain(seed: int, units: int) -> tuple[Unit, ...]:
    """A tower and a decoder of layers that all differ; the first part is frozen in a third of the seeds. Bytes are
    whole numbers, so that sums of them are exact in any order."""
    rng = np.random.default_rng(seed)
    frozen, border = bool(rng.integers(3) == 0), units // 3
    found = []
    for at in range(units):
        forward_s, held = float(rng.uniform(0.3, 2.0)), float(rng.integers(8, 30))
        trains = not (frozen and at < border)
        saved = {
            "none": Saved(held),
            "light": Saved(held // 2, held // 2, 0.1 * forward_s),
            "all": Saved(1.0, held - 1, forward_s),
        }
        found.append(
            Unit(
                f"{at}",
                "vision" if at < border else "text",
                1,
                forward_s,
                float(rng.uniform(1.0, 2.5)) * forward_s,
                int(rng.integers(1, 9)),
                float(rng.integers(2, 9)),
                saved,
                float(rng.uniform(0.0, 0.5)),
                trains,
                "never" if at == border - 2 else "may",
            )
        )
    return tuple(found)


def programs(stages: int, micro_batches: int, kind: str = "1f1b", chunks: int = 1) -> Programs:
    """As a run has them."""
    return pipeline_programs(kind, stages, chunks, micro_batches)


def problem(seed: int, units: int, stages: int, micro_batches: int, budget: float = float("inf")) -> PartitionProblem:
    """A chain to be cut for 1F1B, with hand-overs of their bytes in seconds."""
    return PartitionProblem(chain(seed, units), programs(stages, micro_batches), StageLink(1.0), budget)


def cuts_of(asked: PartitionProblem) -> list[tuple[int, ...]]:
    """Every way to cut it, one by one."""
    return [
        cuts
        for cuts in combinations(range(1, len(asked.units)), asked.runs - 1)
        if all(asked.units[cut - 1].cut != "never" for cut in cuts)
        and all(not any(u.cut == "always" for u in asked.units[a : b - 1]) for a, b in bounds_of(asked, cuts))
    ]


def with_choice(asked: PartitionProblem, choices: tuple[str, ...]) -> PartitionProblem:
    """The same units, each with one choice of recompute, whose seconds are part of its backward."""
    units = tuple(
        replace(one, backward_s=one.backward_s + one.saved[choice].replay_s, saved={"none": one.saved[choice]})
        for one, choice in zip(asked.units, choices, strict=True)
    )
    return replace(asked, units=units, budget_bytes=float("inf"))
