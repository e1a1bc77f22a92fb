"""The layouts of a run by devices, and which of them an attempt has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One layout of a run. devices: that it takes. words: its settings, as on a command line; none: the run's own."""

    devices: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layouts:
    """All of a run. own: the configured one. smaller: for fewer devices, the largest first."""

    own: Layout
    smaller: tuple[Layout, ...] = ()

    def for_devices(self, there: int) -> Layout | None:
        """The largest for which there are enough; None: there are too few for any."""
        return next((layout for layout in (self.own, *self.smaller) if layout.devices <= there), None)

    def larger_than(self, layout: Layout) -> tuple[int, ...]:
        """Devices of the layouts that are larger."""
        return tuple(one.devices for one in (self.own, *self.smaller) if one.devices > layout.devices)


def read_layouts(values: Sequence[tuple[int, Sequence[str]]]) -> Layouts:
    """What `written` gave, the run's own layout first."""
    own, *smaller = (Layout(int(devices), tuple(words)) for devices, words in values)
    return Layouts(own, tuple(smaller))


def written(layouts: Layouts) -> list[tuple[int, Sequence[str]]]:
    """As JSON has them."""
    return [(one.devices, one.words) for one in (layouts.own, *layouts.smaller)]
