"""A rank whose live storages are counted while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.parallel.recompute.meter import LiveStorages

FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"
MOMENTS = {"forward_step": FORWARD, "backward_step": BACKWARD, "grad_norm_sq": UPDATE, "optimizer_step": UPDATE}


@dataclass(frozen=True)
class Peak:
    """Of a rank in a step. moment: in which it was; shared: bytes at it by the moment that made them."""

    nbytes: int
    moment: str
    shared: dict[str, int]


class CountedRank:
    """An engine with all its methods, whose storages are counted in those of a step."""

    def __init__(self, engine: Any):
        self._engine, self._live = engine, LiveStorages()
        if isinstance(engine, TextEngine):
            engine._share = self._named(LOSS, engine._share)  # type: ignore[method-assign]
        self._live.add_present()

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._engine, name)
        return self._counted(MOMENTS[name], own) if name in MOMENTS else own

    def begin_counting(self) -> None:
        """The peak is of the steps from here on."""
        self._live.begin()

    def peak_bytes(self) -> list[Peak]:
        """The most since `begin_counting`; alone in a list, since a tuple would be as many results."""
        return [Peak(self._live.peak, self._live.peak_moment, dict(self._live.shared))]

    def _named(self, moment: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self._live.during(moment):
                return own(*arguments)

        return run

    def _counted(self, moment: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self._live.during(moment), self._live:
                self._live.add([_tensors(one) for one in arguments])
                return own(*arguments)

        return run


def _tensors(value: Any) -> Any:
    """What an argument has inside: tensors of a bundle, or of a micro-batch's work."""
    return vars(value) if hasattr(value, "__dict__") else value


def make_counted(settings: StageSettings) -> CountedRank:
    """One rank of a stage, counted."""
    return CountedRank(make_rank(settings))
