"""How much a row holds where rows are balanced: as configured, else from the lengths of the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dhp.data.balance.packs import TEXT_ROOM, Limits, Loads
from dhp.data.order.sampler import RANDOM

FULL_SLACK = 32  # a row counts as full when it holds Q − Q / 32; published: Q − 128 for Q = 4,096, of text alone
# ISF closes a pack at either limit. Images go to any vision rank of a step, so it is text that should be even, and the
# limit of vision is there for packs of images alone.
LOOSE = 2


@dataclass(frozen=True)
class BalanceSettings:
    """How rows are balanced; see `dhp.config.schema.DataConfig.balance`.

    vision, text: image tokens and tokens that a row may hold; None: from the mean sample of the dataset.

    full_vision, full_text: ISF keeps a row that holds so many; None: a little less than it may hold.

    window: samples that are balanced together; None: an epoch.

    long: tokens from which on samples are kept apart from shorter ones; None: none are.
    """

    method: str = RANDOM
    vision: int | None = None
    text: int | None = None
    full_vision: int | None = None
    full_text: int | None = None
    window: int | None = None
    long: int | None = None

    def limits(self, loads: Loads, samples: int) -> Limits:
        """For rows of `samples` samples in the mean, of data like `loads`."""
        loose = LOOSE if self.method == "isf" else 1
        vision = self.vision or max(1, ceil(loose * samples * float(loads.vision.mean())))
        text = self.text or max(1, ceil(samples * float(loads.text.mean())))
        full_vision = vision - vision // FULL_SLACK if self.full_vision is None else self.full_vision
        full_text = text - min(text // FULL_SLACK, TEXT_ROOM) if self.full_text is None else self.full_text
        return Limits(vision, text, samples, full_vision, full_text, soft=self.text is None)
