"""Every collective of this process as a span, whoever begins it: our code, transformers' tensor plan, DeepSpeed.

They have one place in common, the functions of torch.distributed, so these are wrapped, and only while a run is
traced. A collective that runs beside computation shows as the time that somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dhp.spans import COLLECTIVE, span

_BLOCKING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_MARK = "_dhp_timed"


def trace_collectives() -> None:
    """From now on each collective is a span; calling it again changes nothing."""
    for name in _BLOCKING:
        setattr(dist, name, _timed(name, getattr(dist, name)))
    # What DTensor begins is waited for here, when its result is first used.
    functional.wait_tensor = _timed("wait_tensor", functional.wait_tensor)


def _timed(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(collective, _MARK):
        return collective

    @wraps(collective)
    def timed(*arguments: Any, **named: Any) -> Any:
        with span(name, COLLECTIVE):
            return collective(*arguments, **named)

    setattr(timed, _MARK, True)
    return timed
