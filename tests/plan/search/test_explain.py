"""Why a layout loses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dhp.plan.forecast.forecast import Forecast
from dhp.plan.search.explain import loses_by, refusals
from dhp.plan.search.layout_search import Found
from dhp.plan.search.layouts import Refused


def step(**kinds: float) -> Forecast:
    """A forecast of these seconds."""
    return cast(Forecast, SimpleNamespace(step_s=sum(kinds.values()), kinds=lambda: kinds))


def test_the_kinds_that_make_most_of_the_gap_are_named() -> None:
    best = step(products=1.0, sent=0.1, recompute=0.0)
    assert loses_by(step(products=1.0, sent=0.6, recompute=0.1), best) == "600 ms: exchanges in layers"
    assert loses_by(step(products=0.9, sent=0.48, recompute=0.4), best) == "680 ms: recomputing, exchanges in layers"
    assert loses_by(step(products=1.005, sent=0.1, recompute=0.0), best) == "as fast, less simple"


def test_each_message_is_shown_once_and_equations_first() -> None:
    reasons = ["zero_stage from 1 on", "plain", "heads(28) % tensor(8) = 4", "plain"]
    refused: Any = tuple(Refused({}, reason) for reason in reasons)
    found = refusals(Found((), None, refused, 0, 0), 3)
    assert [one.reason for one in found] == ["heads(28) % tensor(8) = 4", "plain", "zero_stage from 1 on"]
