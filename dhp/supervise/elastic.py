"""The layouts of a run by devices, and which of them an attempt has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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


@dataclass(frozen=True)
class Choice:
    """Which layout a run's attempts have, one after another.

    layouts: that it may have. now: of the next attempt. before: the smaller one that it grew from, until it has trained
    in the larger one. failed: numbers of devices of layouts that it could not train in, though their devices were said
    to be there: it does not grow to these again.
    """

    layouts: Layouts
    now: Layout
    before: Layout | None = None
    failed: frozenset[int] = frozenset()

    @property
    def larger(self) -> tuple[int, ...]:
        """Devices at which a larger layout is to be taken."""
        return tuple(devices for devices in self.layouts.larger_than(self.now) if devices not in self.failed)

    def after(self, there: int | None, trained: bool, ended: bool) -> Choice:
        """What follows an attempt. there: devices that the run could have, where the attempt ended for their number.
        trained: it came as far as that. ended: no other attempt would do better in this layout."""
        if self.before is not None and not trained and (ended or there is not None):
            return replace(self, now=self.before, before=None, failed=self.failed | {self.now.devices})
        kept = replace(self, before=None) if trained else self
        if there is None:
            return kept
        chosen = self.layouts.for_devices(there) or self.now
        grows = chosen.devices > self.now.devices
        return replace(kept, now=chosen, before=self.now if grows else kept.before)


def read_layouts(values: Sequence[tuple[int, Sequence[str]]]) -> Layouts:
    """What `written` gave, the run's own layout first."""
    own, *smaller = (Layout(int(devices), tuple(words)) for devices, words in values)
    return Layouts(own, tuple(smaller))


def written(layouts: Layouts) -> list[tuple[int, Sequence[str]]]:
    """As JSON has them."""
    return [(one.devices, one.words) for one in (layouts.own, *layouts.smaller)]
