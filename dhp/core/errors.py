"""Errors for users: what, which values, why, what next."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from dhp.core.text import one_line


class DhpError(Exception):
    """Base of all errors raised on purpose; its text is complete without a traceback."""


class ConfigError(DhpError):
    """A configuration that cannot run: an unknown key, an impossible value or combination."""


class RunEnded(DhpError):
    """A call of a run that is over, or that a failed call has ended."""


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise one error that lists all of them, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "".join(f"\n  {error}" for error in dict.fromkeys(map(str, errors)))
        raise ConfigError(f"{len(errors)} things are wrong:{lines}")


class DataError(DhpError):
    """A dataset, sample or image that cannot be used; the text names dataset, position and reason.

    It may quote untrusted text, so it is one line, with control characters escaped."""

    def __init__(self, text: str, *more: object):
        super().__init__(one_line(text), *more)


class UnreadableVideo(DataError):
    """A long video that proved broken when its frames were read. file: which, as `dhp.data.media.sources` has it."""

    def __init__(self, text: str, file: object):
        super().__init__(text, file)
        self.file = file

    def __str__(self) -> str:
        return str(self.args[0])


class ModelError(DhpError):
    """A model directory that cannot be loaded, split or exported."""


class CheckpointError(DhpError):
    """A checkpoint that is missing, incomplete or does not belong to the model."""


class RecordError(DhpError):
    """A run directory that cannot be written, as its disk is full or gone, or read, as it is no run's."""


class ClusterError(DhpError):
    """Ray that could not be started or joined, or ended during the run: then in this step, from 1."""

    def __init__(self, text: str, step: int | None = None):
        super().__init__(text)
        self.step = step


class TooFewDevices(ConfigError):
    """The cluster has fewer devices than a run asks for. there: how many it could have now."""

    def __init__(self, text: str, there: int):
        super().__init__(text)
        self.there = there


class NoCluster(ConfigError):
    """No Ray answers at the address that a run is to join."""


class MoreDevices(DhpError):
    """The cluster has the devices of a larger layout of the run. there: how many the run could have."""

    def __init__(self, text: str, there: int):
        super().__init__(text)
        self.there = there


RAISED, DIED, LOST, DRAINED, HUNG = "raised", "died", "lost", "drained", "hung"


@dataclass(frozen=True)
class Fault:
    """What failed, as far as it is known.

    kind: RAISED an error; the process DIED; its node or the connection to it is LOST; its node was DRAINED, which was
    announced; nothing moved any more, it HUNG. who: `text rank 1`. action: its call. node: as a person knows it.
    step: from 1; None: before the first, or between two. short: of its GPU's memory."""

    kind: str = RAISED
    who: str = ""
    action: str = ""
    node: str = ""
    step: int | None = None
    short: bool = False

    @property
    def part(self) -> str:
        """Of the stage that failed: `text` of `text.0 rank 1`; "" where that is not known."""
        return self.who.partition(" ")[0].partition(".")[0]


class Diverged(DhpError):
    """Losses or gradients that are not finite, in more steps than a run may have in a row."""


class PartFailed(DhpError):
    """A rank of a part raised or died; the text names part, rank and the rank's own error."""

    def __init__(self, text: str, fault: Fault = Fault()):
        super().__init__(text)
        self.fault = fault

    def at_step(self, step: int) -> Self:
        """The same error, named by the step (from 1) that was being done; its text as it is where its first line names
        the step."""
        if self.fault.step is not None:
            return self
        first = str(self).partition("\n")[0]
        text = str(self) if re.search(rf"step {step}\b", first) else f"step {step}: {self}"
        return type(self)(text, replace(self.fault, step=step))


class MoreRecompute(DhpError):
    """A rank ran out of memory under a plan that keeps activations, where nothing could be made again: the run goes on
    with other settings. words: these, as on a command line. saved: it had finished a checkpoint."""

    def __init__(self, text: str, words: tuple[str, ...], saved: bool):
        super().__init__(text)
        self.words, self.saved = words, saved


class RankRaised(PartFailed):
    """An unforeseen exception in an actor, named by the actor itself."""
