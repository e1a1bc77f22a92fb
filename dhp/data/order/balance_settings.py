"""Limits of a balanced row: as configured, else from the lengths of the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dhp.config.ranges import MEAN, PAPER
from dhp.data.balance.packs import TEXT_ROOM, Limits, Loads
from dhp.data.order.sampler import RANDOM

FULL_SLACK = 32  # a row counts as full when it holds Q − Q / 32; published: Q − 128 for Q = 4,096, of text alone
# ISF closes a pack at either limit. Images go to any vision rank of a step, so it is text that should be even, and the
# limit of vision is there for packs of images alone.
LOOSE = 2


@dataclass(frozen=True)
class BalanceSettings:
    """How rows are balanced; see `dhp.config.schema.DataConfig.balance`.

    vision, text: image tokens and tokens that a row may hold; None: by the rule.

    full_vision, full_text: ISF keeps a row that holds so many; None: a little less than it may hold.

    window: samples that are balanced together; None: an epoch.

    long: tokens from which on samples are kept apart from shorter ones; None: none are.

    rule: where limits that are None come from, MEAN or PAPER. isf_passes, group_window: see `Limits`.
    """

    method: str = RANDOM
    vision: int | None = None
    text: int | None = None
    full_vision: int | None = None
    full_text: int | None = None
    window: int | None = None
    long: int | None = None
    rule: str = MEAN
    isf_passes: int = 10
    group_window: int = 50

    def limits(self, loads: Loads, samples: int) -> Limits:
        """Limits for rows of `samples` samples in the mean, of data like `loads`."""
        text, vision = self._longest(loads) if self.rule == PAPER else self._of_mean(loads, samples)
        text, vision = self.text or text, self.vision or vision
        less = (0, TEXT_ROOM) if self.rule == PAPER else (vision // FULL_SLACK, min(text // FULL_SLACK, TEXT_ROOM))
        full_vision = vision - less[0] if self.full_vision is None else self.full_vision
        full_text = max(1, text - less[1]) if self.full_text is None else self.full_text
        soft = self.text is None and self.rule == MEAN
        turns = (self.isf_passes, self.group_window)
        return Limits(vision, text, samples, full_vision, full_text, soft, *turns)

    def _of_mean(self, loads: Loads, samples: int) -> tuple[int, int]:
        """Tokens and image tokens of a row, from the mean sample's."""
        loose = LOOSE if self.method == "isf" else 1
        text, vision = float(loads.text.mean()), float(loads.vision.mean())
        return max(1, ceil(samples * text)), max(1, ceil(loose * samples * vision))

    def _longest(self, loads: Loads) -> tuple[int, int]:
        """As published: the longest sample, and its length times the share of image tokens in all tokens."""
        text = self.text or int(loads.text.max())
        return text, max(1, round(text * float(loads.vision.sum()) / float(loads.text.sum())))
