"""How long each rank computes for the work that it has, beside its peers; ranks that are slow are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

SLOW = 1.2  # times the median of the peers
STEPS = 50  # in a row, that count

Pace = dict[str, float | str]


@dataclass(frozen=True)
class RankShare:
    """A rank's part of a step. who: `text rank 1`. seconds: in which it computed, without those in collectives, where
    it waits for others. work: what it had to compute, relative to its stage's other ranks."""

    who: str
    seconds: float
    work: float


def pace(shares: Sequence[RankShare], predicted_s: float | None) -> Pace | None:
    """Of a stage's ranks the least, the median and the most of seconds / predicted seconds, and which rank has the
    most; None where none has work. predicted_s: of the mean rank; None: what the mean rank took."""
    busy = [share for share in shares if share.work > 0]
    if not busy:
        return None
    mean_s = predicted_s or mean(share.seconds for share in shares)
    mean_work = mean(share.work for share in shares)
    if mean_s <= 0:
        return None
    ratios = {share.who: share.seconds * mean_work / (mean_s * share.work) for share in busy}
    slowest = max(ratios, key=lambda who: ratios[who])
    return {
        "min": min(ratios.values()),
        "median": median(ratios.values()),
        "max": ratios[slowest],
        "rank": slowest,
    }


class Stragglers:
    """One run's. A rank is slow in a step where both its seconds and its seconds over work are beyond `SLOW` times the
    median of its stage's other ranks. A rank with more work has more of the one, one with less work, whose fixed costs
    weigh more, has more of the other: uneven work alone gives no rank both."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}  # the message about each
        self._in_a_row: dict[str, int] = {}

    def add(self, stages: Mapping[str, Sequence[RankShare]]) -> list[str]:
        """A step has ended. Messages about ranks that were slow for `STEPS` steps in a row, each once. A step in which
        a rank or all of its peers had no work does not count."""
        messages = []
        for shares in stages.values():
            for share in shares:
                others = [other for other in shares if other is not share and other.work > 0]
                if not others or share.work <= 0:
                    continue
                in_a_row = self._in_a_row.get(share.who, 0) + 1 if _is_slow(share, others) else 0
                self._in_a_row[share.who] = in_a_row
                if in_a_row >= STEPS and share.who not in self.named:
                    self.named[share.who] = _message(share, others)
                    messages.append(self.named[share.who])
        return messages


def _is_slow(share: RankShare, others: Sequence[RankShare]) -> bool:
    seconds = median(other.seconds for other in others)
    each = median(other.seconds / other.work for other in others)
    return share.seconds > SLOW * seconds and share.seconds / share.work > SLOW * each


def _message(share: RankShare, others: Sequence[RankShare]) -> str:
    seconds = median(other.seconds for other in others)
    return (
        f"{share.who} is slow: for {STEPS} steps in a row it has computed for more than {SLOW:g} times as long as the "
        f"median of its peers, for as much work (now {share.seconds:.3g} s, they {seconds:.3g} s). Each step waits for "
        "it. Its log's first line names its node: see what else runs there, its clocks and its temperature, or run "
        "without that device"
    )
