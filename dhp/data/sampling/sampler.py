"""Chooses a step's samples by seed, epoch and layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from dhp.config.ranges import MEAN, PAPER
from dhp.core.errors import DataError
from dhp.data.balance.packs import TEXT_ROOM, Limits, Loads

RANDOM = "random"
# Of `Sampler.order`, where rows are balanced.
FULLEST_FIRST, LENGTHS, ROWS = "fullest_first", "checksum of the lengths", "checksum of the rows"
_CAUSES = {
    FULLEST_FIRST: "data.fullest_first; where that is null, recompute=auto decides it",
    LENGTHS: "images, the tokenizer or what decides their tokens have changed, or samples that were defective are not "
    "any more",
    ROWS: "another release of dhp or of a library it uses plans other rows of the same samples",
}


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch divides over text data replicas and micro-batches.

    A row is what one replica holds in one micro-batch. There are as many a step for any number of replicas, so that a
    run may go on with another one; where it does not divide them, the last micro-batch has places without a row.

    micro_batch_size: samples a row; in the mean where rows are balanced. unfilled: places without a row."""

    replicas: int
    micro_batches: int
    micro_batch_size: int
    unfilled: int = 0

    @property
    def batch_size(self) -> int:
        """Samples a step, over all replicas and micro-batches."""
        return self.rows * self.micro_batch_size

    @property
    def rows(self) -> int:
        """Rows a step."""
        return self.places - self.unfilled

    @property
    def places(self) -> int:
        """Places for rows, over all replicas and micro-batches."""
        return self.replicas * self.micro_batches


@dataclass(frozen=True)
class StepBatch:
    """The indices of a step's samples. Unlike the samples they are cheap to send.

    step, epoch: 0-based. done: epochs after this step, with a fraction.

    samples: [micro_batch][replica] -> indices within the epoch.

    defects: one message for each sample that is left out before anything is read.

    measure_s: seconds spent on choosing the samples, which includes measuring their lengths."""

    step: int
    epoch: int
    done: float
    samples: tuple[tuple[tuple[int, ...], ...], ...]
    defects: tuple[str, ...] = ()
    measure_s: float = 0.0


class Sampler:
    """Steps in order, and any step by its number. Iterating hands out the next ones and moves `position` on."""

    def __init__(self, layout: BatchLayout, seed: int) -> None:
        self.layout, self.seed = layout, seed
        self.position = 0

    def batch(self, step: int) -> StepBatch:
        """The samples of a step (0-based): depends on the constructor's arguments and `step` alone."""
        raise NotImplementedError

    def steps(self, epochs: int) -> int:
        """Steps of that many epochs from the first on."""
        raise NotImplementedError

    def order(self, step: int = 0) -> dict[str, Any]:
        """All that decides which samples the steps before `step` have, as plain values.

        Two samplers of equal order hand out the same steps, also to different numbers of replicas."""
        raise NotImplementedError

    def first(self, step: int) -> np.ndarray:
        """Samples of the first epoch whose lengths steps up to `step` need, as far as is known; by default none."""
        return np.arange(0)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        self.position += 1
        return self.batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: plain values."""
        return self.state(self.position)

    def state(self, step: int) -> dict[str, Any]:
        """The state after so many steps, which `load_state_dict` takes."""
        return {"step": step, "order": self.order(step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler stopped, also one with another number of replicas: no sample is lost or seen
        twice. Raises DataError when its steps would be others."""
        now = self.order(state["step"])
        other = [key for key in now if state["order"].get(key) != now[key]]
        if other:
            causes = {key: f" ({cause})" for key, cause in _CAUSES.items()}
            changes = "; ".join(f"{k} was {state['order'].get(k)} and is {now[k]}{causes.get(k, '')}" for k in other)
            raise DataError(
                f"the run cannot go on in the middle of its data, which has another order now: {changes}. Set what it "
                "had, or begin anew with training.resume=never"
            )
        self.position = state["step"]


class RandomSampler(Sampler):
    """`micro_batch_size` samples a row, in random or file order."""

    def __init__(self, samples: int, layout: BatchLayout, seed: int, shuffle: bool) -> None:
        super().__init__(layout, seed)
        self._samples, self._shuffle = samples, shuffle

    def batch(self, step: int) -> StepBatch:
        indices = step_indices(step, self._samples, self.layout, self.seed, self._shuffle)
        return StepBatch(
            step=step,
            epoch=epoch_of(step, self._samples, self.layout),
            done=(step + 1) / self.steps(1),
            samples=tuple(map(tuple, slots(indices, self.layout))),
        )

    def steps(self, epochs: int) -> int:
        return epochs * steps_per_epoch(self._samples, self.layout)

    def order(self, step: int = 0) -> dict[str, Any]:
        return {
            "balance": RANDOM,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "samples": self._samples,
            "rows": self.layout.rows,
            "samples a row": self.layout.micro_batch_size,
        }


@lru_cache(maxsize=2)  # for millions of samples an order takes longer than a step's reading
def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of n samples in one epoch: int64 [n], a permutation of 0..n-1, in file order unless shuffled.

    Read-only, because it is shared."""
    order = np.random.default_rng([seed, epoch]).permutation(n) if shuffle else np.arange(n)
    order.flags.writeable = False
    return order


def steps_per_epoch(n: int, layout: BatchLayout) -> int:
    """Steps that show each of n samples once; the last may be short, nothing is dropped."""
    return ceil(n / layout.batch_size)


def epoch_of(step: int, n: int, layout: BatchLayout) -> int:
    """The epoch (0-based) that a step (0-based) belongs to."""
    return step // steps_per_epoch(n, layout)


def step_indices(step: int, n: int, layout: BatchLayout, seed: int, shuffle: bool) -> tuple[int, ...]:
    """The dataset indices of one step (0-based), in order; fewer than batch_size at the end of an epoch."""
    epoch, step_in_epoch = divmod(step, steps_per_epoch(n, layout))
    start = step_in_epoch * layout.batch_size
    order = epoch_order(n, seed, epoch, shuffle)
    return tuple(int(index) for index in order[start : start + layout.batch_size])


def slots(indices: Sequence[int], layout: BatchLayout) -> list[list[tuple[int, ...]]]:
    """Divide a global batch: [micro_batch][replica] -> its indices.

    Micro-batches are filled one after another, and within one its replicas. In a short batch the later
    slots are therefore smaller or empty."""
    size = layout.micro_batch_size
    starts = [
        [(micro * layout.replicas + replica) * size for replica in range(layout.replicas)]
        for micro in range(layout.micro_batches)
    ]
    return [[tuple(indices[start : start + size]) for start in row] for row in starts]


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

    rule: where limits that are None come from, MEAN or PAPER. isf_passes: see `Limits`.

    fullest_first: the first window of the first epoch begins with its fullest steps."""

    method: str = RANDOM
    vision: int | None = None
    text: int | None = None
    full_vision: int | None = None
    full_text: int | None = None
    window: int | None = None
    long: int | None = None
    rule: str = MEAN
    isf_passes: int = 10
    fullest_first: bool = False

    def limits(self, loads: Loads, samples: int) -> Limits:
        """Limits for rows of `samples` samples in the mean, of data like `loads`."""
        text, vision = self._longest(loads) if self.rule == PAPER else self._of_mean(loads, samples)
        text, vision = self.text or text, self.vision or vision
        less = (0, TEXT_ROOM) if self.rule == PAPER else (vision // FULL_SLACK, min(text // FULL_SLACK, TEXT_ROOM))
        full_vision = vision - less[0] if self.full_vision is None else self.full_vision
        full_text = max(1, text - less[1]) if self.full_text is None else self.full_text
        soft = self.text is None and self.rule == MEAN
        return Limits(vision, text, samples, full_vision, full_text, soft, self.isf_passes)

    def _of_mean(self, loads: Loads, samples: int) -> tuple[int, int]:
        """Tokens and image tokens of a row, from the mean sample's."""
        loose = LOOSE if self.method == "isf" else 1
        text, vision = float(loads.text.mean()), float(loads.vision.mean())
        return max(1, ceil(samples * text)), max(1, ceil(loose * samples * vision))

    def _longest(self, loads: Loads) -> tuple[int, int]:
        """As published: the longest sample, and its length times the share of image tokens in all tokens."""
        text = self.text or int(loads.text.max())
        return text, max(1, round(text * float(loads.vision.sum()) / float(loads.text.sum())))
