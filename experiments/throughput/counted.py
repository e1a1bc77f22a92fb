"""Live bytes of a device in a step: of both its ranks, which take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import StageSettings
from dhp.parallel.recompute.meter import LiveStorages
from experiments.pair import TEXT, VISION
from experiments.plan_accuracy.layout import Layout, running

# In the order in which a step of one micro-batch calls a device's ranks.
TURNS = (
    (VISION, "forward_step"), (TEXT, "forward_step"), (TEXT, "backward_step"), (VISION, "backward_step"),
    (VISION, "optimizer_step"), (TEXT, "optimizer_step"),
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """Of a rank's call. most: bytes inside it; left: when it ended."""

    most: int
    left: int


class CountedTurns:
    """An engine with all its methods, of which each call in a step is counted."""

    def __init__(self, engine: Any):
        self._engine, self._live = engine, LiveStorages(shares=False)
        self._live.add_present()
        self._before, self._turns = self._live.bytes, dict[str, Turn]()

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._engine, name)
        return self._counted(name, own) if any(name == method for _, method in TURNS) else own

    def turns(self) -> list[tuple[int, dict[str, Turn]]]:
        """Bytes before the last step, and its calls; alone in a list, since a tuple would be as many results."""
        return [(self._before, dict(self._turns))]

    def _counted(self, name: str, own: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if name == "forward_step":
                self._before = self._live.bytes
            with self._live:
                self._live.add([getattr(one, "__dict__", one) for one in arguments])
                self._live.begin()
                found = own(*arguments)
            self._turns[name] = Turn(self._live.peak, self._live.bytes)
            return found

        return run


def make_counted(settings: StageSettings) -> CountedTurns:
    """One rank of a stage, counted."""
    return CountedTurns(make_rank(settings))


def count_device(layout: Layout) -> int:
    """The most bytes of a device in the second step, when optimizer states are there."""
    with running(layout, make_counted) as run:
        run.train(1)
        answers: Mapping[str, Sequence[Any]] = run.ask("turns")
    ranks = len(answers[VISION])
    return max(device_peak({part: answers[part][rank][0] for part in answers}) for rank in range(ranks))


def device_peak(ranks: Mapping[str, tuple[int, Mapping[str, Turn]]]) -> int:
    """Of a device's rank of each part: what one has at most in its turn, and what the others have at that time."""
    held = {part: before for part, (before, _) in ranks.items()}
    peak = sum(held.values())
    for part, method in TURNS:
        turn = ranks[part][1][method]
        peak = max(peak, turn.most + sum(nbytes for other, nbytes in held.items() if other != part))
        held[part] = turn.left
    return peak
