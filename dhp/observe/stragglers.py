"""How long each rank computes for the work that it has, beside its peers; ranks that are slow are named."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

SLOW = 1.2  # times the median of the peers
STEPS = 50  # in a row, that count
TOGETHER = 5  # steps, in the mean: one in which something else took a core, or the others, begins no count anew

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
    """One run's. A rank is slow after a step where both its seconds and its seconds over work, of the last `TOGETHER`
    steps, are beyond `SLOW` times the median of its stage's other ranks. A rank with more work has more of the one, one
    with less work, whose fixed costs weigh more, has more of the other: uneven work alone gives no rank both."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}  # the message about each
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._in_a_row: dict[str, int] = {}

    def add(self, stages: Mapping[str, Sequence[RankShare]]) -> list[str]:
        """A step has ended. Messages about ranks that were slow after `STEPS` steps in a row, each once. A step in
        which a rank or all of its peers had no work does not count."""
        messages = []
        for shares in stages.values():
            working = [self._together(share) for share in shares if share.work > 0]
            if len(working) < 2:
                continue
            seconds = _Peers([share.seconds for share in working])
            each = _Peers([share.seconds / share.work for share in working])
            for own in working:
                peers_s, peers_each = seconds.median(own.seconds), each.median(own.seconds / own.work)
                slow = own.seconds > SLOW * peers_s and own.seconds / own.work > SLOW * peers_each
                in_a_row = self._in_a_row.get(own.who, 0) + 1 if slow else 0
                self._in_a_row[own.who] = in_a_row
                if in_a_row >= STEPS and own.who not in self.named:
                    self.named[own.who] = _message(own, peers_s)
                    messages.append(self.named[own.who])
        return messages

    def _together(self, share: RankShare) -> RankShare:
        """Of the last steps in which it had work, in the mean."""
        recent = self._recent.setdefault(share.who, deque(maxlen=TOGETHER))
        recent.append((share.seconds, share.work))
        return RankShare(share.who, *(sum(of) / len(recent) for of in zip(*recent, strict=True)))


class _Peers:
    """A stage's values, sorted once: for a median per rank, each sorting the others' would take longer than a step of
    a thousand ranks may."""

    def __init__(self, values: Sequence[float]):
        """values: of two ranks or more."""
        self._sorted = sorted(values)

    def median(self, own: float) -> float:
        """Of all values but one that equals `own`, which is among them."""
        at, middle = bisect_left(self._sorted, own), len(self._sorted) // 2
        if len(self._sorted) % 2 == 0:  # an odd number of others
            return self._without(at, middle - 1)
        return (self._without(at, middle - 1) + self._without(at, middle)) / 2

    def _without(self, at: int, index: int) -> float:
        """The value at `index` where the one at `at` is left out."""
        return self._sorted[index if index < at else index + 1]


def _message(share: RankShare, peers_s: float) -> str:
    return (
        f"{share.who} is slow: for {STEPS} steps in a row it has computed for more than {SLOW:g} times as long as the "
        f"median of its peers, for as much work (now {share.seconds:.3g} s, they {peers_s:.3g} s). Each step waits for "
        "it. Its log's first line names its node: see what else runs there, its clocks and its temperature, or run "
        "without that device"
    )
