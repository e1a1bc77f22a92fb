"""What a device does in a second, from dhp's tables of devices and links, by factors that a fit changes; the passes of
training from a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dhp.config.devices import find_device, find_link
from dhp.models.flops import OPERATIONS
from dhp.plan.count import rates
from dhp.plan.count.rates import Operations, Rates
from experiments.published.shapes import Decoder
from experiments.published.tables import read_table

FORMAT, NODE = "bfloat16", 8
PASSES = 4  # forwards that a recomputed layer's launches are like: forward, again, and a backward of two
ROUNDS, STEP = 80, 0.8  # of a fit


@dataclass(frozen=True)
class Fitted:
    """Factors of time, 1 where nothing is fitted. device: all that it computes; attention: that alone, beside the
    former; host: launches; gathered: launches of layers whose weights are gathered (ZeRO-3), beside the former. fixed:
    seconds of a step."""

    device: float = 1.0
    attention: float = 1.0
    host: float = 1.0
    gathered: float = 1.0
    fixed: float = 0.0


def rates_of(name: str, network: str, fitted: Fitted) -> Rates:
    """Of one device, with network cards of that link; host_s is a plain layer's."""
    host_s = fitted.host * read_table("profiles")["host_ms"] / 1e3 / PASSES
    plain = rates.rates_of(find_device(name), FORMAT, host_s, NODE, find_link(network))
    return replace(
        plain,
        products=plain.products / fitted.device,
        attention=plain.attention / fitted.device / fitted.attention,
        elementwise=plain.elementwise / fitted.device,
    )


def trained(forward: Operations, recompute: float = 1.0) -> Operations:
    """A forward, the recomputed share of it, and a backward, whose attention makes its weights once more."""
    again = 1 + recompute
    return replace(
        forward,
        products=(again + 2) * forward.products,
        attention=(again + read_table("profiles")["flash_backward"]) * forward.attention,
        elementwise=(again + 2) * forward.elementwise,
    )


def head_of(decoder: Decoder, rows: float, ranks: int) -> Operations:
    """The head's forward and backward with its loss, for so many tokens."""
    moved = read_table("profiles")["loss"] * rows * decoder.words / ranks
    return Operations(3 * OPERATIONS * decoder.work.target * rows / ranks, elementwise=moved)


def fit(start: Fitted, wanted: Mapping[str, tuple[float, Callable[[Fitted], float]]], rounds: int = ROUNDS) -> Fitted:
    """The factors with which each of these has its published seconds. wanted: by the factor that it fits."""
    for _ in range(rounds):
        for name, (published, seconds) in wanted.items():
            factor = getattr(start, name) * (published / seconds(start)) ** STEP
            start = replace(start, **{name: factor})
    return start
