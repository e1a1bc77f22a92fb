"""Chains of made-up units: a tower and a decoder with costs, hand-overs, frozen parts and choices of recompute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp.planner.partition.problem import PartitionProblem
from dhp.planner.partition.tables import needed_bytes
from dhp.planner.units import Link, Saved, Unit
from dhp.trainer.programs import pipeline_programs

# What a choice keeps of a layer's bytes, and its seconds by those of a forward, as dhp's own layers have it.
CHOICES = {"none": (1.0, 0.0), "light": (0.5, 0.03), "mlp": (0.3, 0.35), "linear": (0.15, 0.7), "all": (0.07, 1.0)}


def layer(
    name: str, part: str, forward_s: float, parameters: int, held: float, output: float, trained: bool, behind: bool
) -> Unit:
    """A layer with every choice of recompute. trained: it trains, in mixed precision, 16 bytes a parameter; else it has
    2. behind: something before it trains, so that gradients pass."""
    saved = {
        choice: Saved(round(held * kept), round(held * (1 - kept)), forward_s * again)
        for choice, (kept, again) in CHOICES.items()
    }
    backward_s = forward_s * (2.0 if trained else 1.0 if behind else 0.0)
    return Unit(
        name,
        part,
        1,
        forward_s,
        backward_s,
        parameters,
        parameters * (16.0 if trained else 2.0),
        saved,
        output,
        trained,
    )


def joined(tower: list[Unit], decoder: list[Unit], ends: tuple[float, float, float, float]) -> tuple[Unit, ...]:
    """Both parts' layers with what is around them. ends: seconds of a forward through patch embedding, merger, token
    embedding and head."""
    (v, d), (patches, merger, tokens, head) = (tower[0], decoder[0]), ends

    def end(name: str, of: Unit, forward_s: float, output: float, cut: bool) -> Unit:
        factor = of.backward_s / of.forward_s
        size, states = of.parameters, of.states_bytes
        kept = {"none": Saved(output)} if of.backward_s else {"none": Saved(0.0)}
        may = "may" if cut else "never"
        return Unit(name, of.part, 0, forward_s, forward_s * factor, size, states, kept, output, of.trains, may)

    return (
        end("patch embedding", v, patches, v.output_bytes, False),
        *tower[:-1],
        replace(tower[-1], cut="never"),
        end("merger", v, merger, v.output_bytes // 2, True),
        end("embedding", d, tokens, d.output_bytes, False),
        *decoder[:-1],
        replace(decoder[-1], cut="never"),
        replace(end("head", d, head, 0.0, True), output_bytes=0.0),
    )


def random_problem(rng: np.random.Generator) -> PartitionProblem:
    """13 to 30 units over 3 to 8 stages; in half of the problems a budget that makes some of them recompute."""
    while True:
        units = _random_units(rng)
        stages = int(rng.integers(3, 9))
        if stages > sum(unit.cut == "may" for unit in units):
            continue
        micro_batches = stages * int(rng.choice([1, 2, 4]))
        span = sum(unit.forward_s for unit in units) / len(units)
        link = Link(max(unit.output_bytes for unit in units) / (span * float(rng.choice([0.01, 0.1, 0.5]))))
        free = PartitionProblem(units, pipeline_programs("1f1b", stages, 1, micro_batches), link)
        if rng.random() < 0.5:
            return free
        # Between what the fullest stage takes with everything recomputed and with nothing.
        none = replace(free, units=tuple(replace(u, saved={"none": u.saved["none"]}) for u in units))
        least, most = needed_bytes(free), needed_bytes(none)
        return replace(free, budget_bytes=round(least + float(rng.uniform(0.05, 0.8)) * (most - least)))


def _random_units(rng: np.random.Generator) -> tuple[Unit, ...]:
    tower_trains, decoder_trains = [(True, True), (True, True), (False, True), (True, False)][rng.integers(4)]
    count = int(rng.integers(9, 27))  # besides the four ends
    of_tower = int(rng.integers(2, count - 2))
    both = [
        _layers(rng, "vision", of_tower, tower_trains, tower_trains),
        _layers(rng, "text", count - of_tower, decoder_trains, tower_trains or decoder_trains),
    ]
    ends = tuple(float(rng.uniform(0.02, most)) for most in (0.3, 1.0, 0.1, 2.0))
    return joined(both[0], both[1], (ends[0], ends[1], ends[2], ends[3]))


def _layers(rng: np.random.Generator, part: str, count: int, trained: bool, gradients: bool) -> list[Unit]:
    """Layers of one or two kinds, in runs or in turn."""
    kinds = [
        {
            "forward_s": float(rng.uniform(0.3, 2.0)),
            "parameters": int(rng.integers(20, 400)) * 10**6,
            "held": float(rng.integers(100, 1500)) * 1e6 * gradients,
        }
        for _ in range(int(rng.integers(1, 3)))
    ]
    output = float(rng.integers(10, 60)) * 1e6
    every = int(rng.integers(1, 5))
    return [
        layer(
            f"{part} {at}", part, **kinds[(at // every) % len(kinds)], output=output, trained=trained, behind=gradients
        )
        for at in range(count)
    ]
