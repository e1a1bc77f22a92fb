"""What a supervised attempt leaves: state, checkpoint, layout, outcome."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dhp.core.errors import (
    RAISED,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Diverged,
    Fault,
    ModelError,
    MoreDevices,
    MoreRecompute,
    NoCluster,
    PartFailed,
    RecordError,
    TooFewDevices,
)
from dhp.core.files import write_whole


@dataclass(frozen=True)
class ElasticLayout:
    """One layout of a run. devices: that it takes. words: its settings, as on a command line; none: the run's own."""

    devices: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class ElasticLayouts:
    """All of a run. own: the configured one. smaller: for fewer devices, the largest first."""

    own: ElasticLayout
    smaller: tuple[ElasticLayout, ...] = ()

    def for_devices(self, there: int) -> ElasticLayout | None:
        """The largest for which there are enough; None: there are too few for any."""
        return next((layout for layout in (self.own, *self.smaller) if layout.devices <= there), None)

    def larger_than(self, layout: ElasticLayout) -> tuple[int, ...]:
        """Devices of the layouts that are larger."""
        return tuple(one.devices for one in (self.own, *self.smaller) if one.devices > layout.devices)


@dataclass(frozen=True)
class Choice:
    """Which layout a run's attempts have, one after another.

    layouts: that it may have. now: of the next attempt. before: the smaller one that it grew from, until it has trained
    in the larger one. failed: numbers of devices of layouts that it could not train in, though their devices were said
    to be there: it does not grow to these again."""

    layouts: ElasticLayouts
    now: ElasticLayout
    before: ElasticLayout | None = None
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


def read_layouts(values: Sequence[tuple[int, Sequence[str]]]) -> ElasticLayouts:
    """What `written` gave, the run's own layout first."""
    own, *smaller = (ElasticLayout(int(devices), tuple(words)) for devices, words in values)
    return ElasticLayouts(own, tuple(smaller))


def written(layouts: ElasticLayouts) -> list[tuple[int, Sequence[str]]]:
    """As JSON has them."""
    return [(one.devices, one.words) for one in (layouts.own, *layouts.smaller)]


COMPLETED, INTERRUPTED, REFUSED, CLUSTER, KILLED = "completed", "interrupted", "refused", "cluster", "killed"
FEWER, MORE, GONE = "fewer devices", "more devices", "no cluster"
ONCE_TRAINED = (FEWER, GONE)  # that another attempt may do better is known where one has trained
FOLDER = "faults"  # in run_dir
RETRY = 75  # exit status of an attempt after which another one may do better

# What another attempt would meet again: configuration, data, model, checkpoints, a full disk.
_NEVER = (ConfigError, DataError, ModelError, CheckpointError, RecordError, Diverged)
_RANK = re.compile(r"(?P<part>\S+) rank (?P<rank>\d+)")


@dataclass(frozen=True)
class Verdict:
    """How one attempt ended.

    attempt: from 1. kind: completed | interrupted | refused (nothing that another attempt would change) | raised (an
    exception of the run's own) | died, lost, drained, hung (see `dhp.core.errors.Fault`) | cluster (Ray itself) |
    killed (the driver ended without a word) | fewer devices (are there than its layout takes) | more devices (are
    there, for a larger layout: it ended behind a checkpoint) | no cluster (answers at its address).

    error, message: type and text of the exception. part, rank, node, step, action: where, as far as it is known.

    devices: where there are fewer or more, how many the run could have.

    state: what the driver was doing. restartable: whether another attempt may do better. exit_code: of the driver,
    minus a signal's number where one ended it. followed_by: what was done about it. at: when it was known, seconds
    since 1970."""

    attempt: int
    kind: str
    error: str = ""
    message: str = ""
    part: str = ""
    rank: int | None = None
    node: str = ""
    step: int | None = None
    action: str = ""
    devices: int | None = None
    state: str = ""
    restartable: bool = False
    exit_code: int | None = None
    followed_by: str = ""
    at: float = field(default_factory=time.time, compare=False)

    def headline(self) -> str:
        """What failed, in one line."""
        first = self.message.partition("\n")[0]
        return f"{self.error}: {first}" if self.error else first or self.kind


def verdict_of(error: BaseException | None, attempt: int, state: str = "") -> Verdict:
    """What the driver itself knows about its end. error: that ended it; None: it completed."""
    if error is None:
        return Verdict(attempt, COMPLETED, state=state)
    if isinstance(error, KeyboardInterrupt):
        return Verdict(attempt, INTERRUPTED, state=state)
    verdict = Verdict(attempt, RAISED, type(error).__name__, str(error), state=state)
    if isinstance(error, TooFewDevices | MoreDevices):
        kind = FEWER if isinstance(error, TooFewDevices) else MORE
        return replace(verdict, kind=kind, devices=error.there, restartable=True)
    if isinstance(error, NoCluster):
        return replace(verdict, kind=GONE, restartable=True)
    if isinstance(error, _NEVER):
        return replace(verdict, kind=REFUSED)
    if isinstance(error, ClusterError):
        return replace(verdict, kind=CLUSTER, step=error.step, restartable=True)
    if isinstance(error, PartFailed):
        return replace(verdict, restartable=True, **_where(error.fault))
    return replace(verdict, restartable=isinstance(error, Exception))


def _where(fault: Fault) -> dict[str, Any]:
    found = _RANK.fullmatch(fault.who)
    rank = {"part": found["part"], "rank": int(found["rank"])} if found else {"part": fault.who}
    return {"kind": fault.kind, "node": fault.node, "step": fault.step, "action": fault.action, **rank}


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write it whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(asdict(verdict), indent=1) + "\n")


def read_verdict(path: Path) -> Verdict | None:
    """What was written there; None: nothing, or no whole one."""
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def verdict_file(run_dir: Path, number: int) -> Path:
    """Where the verdict of an attempt is kept."""
    return run_dir / FOLDER / f"{number:03}.json"


VARIABLE = "DHP_ATTEMPT"  # in the environment of a supervised driver
STARTING, LOADING, TRAINING, SAVING = "starting", "loading", "training", "saving"
_OPENED, _STATE, _CHECKPOINT, _VERDICT = "opened", "state", "checkpoint", "verdict.json"
_LAYOUTS, _DEVICE = "layouts.json", "device"


@dataclass(frozen=True)
class Attempt:
    """One attempt of a supervised run. folder: where driver and supervisor meet. number: from 1; restarts: before it
    in this run. larger: devices of each layout of the run that is larger than this attempt's. device: cpu or cuda, as
    the attempts before had; "": not known. asks_layouts: the layouts that the run may have are to be said. Nothing that
    is said here ever fails the run."""

    folder: str
    number: int
    restarts: int
    larger: Sequence[int] = ()
    device: str = ""
    asks_layouts: bool = False

    def environment(self) -> Mapping[str, str]:
        """What the driver finds it by."""
        return {VARIABLE: json.dumps(asdict(self))}

    def opened(self) -> None:
        """run_dir is the run's own now: what it replaces is gone."""
        self._say(_OPENED, "")
        with suppress(OSError):
            (Path(self.folder) / _VERDICT).unlink(missing_ok=True)  # of the stage before

    def in_state(self, state: str) -> None:
        """What the driver is doing."""
        self._say(_STATE, state)

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete."""
        self._say(_CHECKPOINT, str(checkpoint))

    def has_layouts(self, layouts: ElasticLayouts) -> None:
        """The layouts that the run may have are known."""
        self._say(_LAYOUTS, json.dumps(written(layouts)))

    def has_device(self, device: str) -> None:
        """What the run computes on."""
        self._say(_DEVICE, device)

    def ended(self, error: BaseException | None) -> Verdict:
        """The run has ended, of `error` or None; its teardown begins. The first one that is said stays."""
        known = self.verdict
        if known is not None and error is not None:
            return known
        verdict = verdict_of(error, self.number, self.state)
        with suppress(OSError):
            write_verdict(Path(self.folder) / _VERDICT, verdict)
        return verdict

    @property
    def has_opened(self) -> bool:
        """Whether run_dir is the run's own."""
        return (Path(self.folder) / _OPENED).exists()

    @property
    def state(self) -> str:
        """What the driver was doing when it last said so."""
        return self._read(_STATE) or STARTING

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint that this attempt finished."""
        return self._read(_CHECKPOINT)

    @property
    def layouts(self) -> ElasticLayouts | None:
        """The layouts that the run may have; None: this attempt did not say."""
        text = self._read(_LAYOUTS)
        return None if text is None else read_layouts(json.loads(text))

    @property
    def device_said(self) -> str | None:
        """What the run computes on; None: this attempt did not say."""
        return self._read(_DEVICE)

    @property
    def verdict(self) -> Verdict | None:
        """What the driver said about its end."""
        return read_verdict(Path(self.folder) / _VERDICT)

    def _say(self, name: str, text: str) -> None:
        with suppress(OSError):
            write_whole(Path(self.folder) / name, text)

    def _read(self, name: str) -> str | None:
        with suppress(OSError):
            return (Path(self.folder) / name).read_text(encoding="utf-8")
        return None


def this_attempt() -> Attempt | None:
    """The attempt that this process is the driver of; None: nothing supervises it."""
    try:
        said = json.loads(os.environ[VARIABLE])
        return Attempt(**said | {"larger": tuple(said["larger"])})
    except (KeyError, ValueError, TypeError):
        return None


def restarts() -> int:
    """How often the run was started again before this attempt."""
    attempt = this_attempt()
    return 0 if attempt is None else attempt.restarts


def goes_on(error: BaseException) -> bool:
    """Whether the run goes on after an error: by itself, or because something supervises this driver that may start it
    again."""
    attempt = this_attempt()
    return isinstance(error, MoreRecompute) or (attempt is not None and verdict_of(error, attempt.number).restartable)


def tell_state(state: str) -> None:
    """Say what this driver is doing, if something supervises it."""
    if attempt := this_attempt():
        attempt.in_state(state)


def tell_opened() -> None:
    """Say that run_dir is this run's own."""
    if attempt := this_attempt():
        attempt.opened()


def tell_saved(checkpoint: Path) -> None:
    """Say that a checkpoint is complete."""
    if attempt := this_attempt():
        attempt.saved(checkpoint)


def tell_layouts(find: Callable[[], ElasticLayouts]) -> None:
    """Say which layouts the run may have, if something supervises it that does not know them yet."""
    attempt = this_attempt()
    if attempt is not None and attempt.asks_layouts:
        attempt.has_layouts(find())


def tell_device(device: str) -> None:
    """Say what the run computes on."""
    if attempt := this_attempt():
        attempt.has_device(device)


def known_device() -> str:
    """What the attempts before this one computed on; "": not known."""
    attempt = this_attempt()
    return "" if attempt is None else attempt.device


def larger_layouts() -> Sequence[int]:
    """Devices of each layout of the run that is larger than that of this attempt."""
    attempt = this_attempt()
    return () if attempt is None else attempt.larger


@contextmanager
def telling_end() -> Iterator[None]:
    """Say how this block ended, before the teardown that follows it: that may take the process with it, or hang."""
    try:
        yield
    except MoreRecompute:  # the same driver goes on
        raise
    except BaseException as error:
        if attempt := this_attempt():
            attempt.ended(error)
        raise
    if attempt := this_attempt():
        attempt.ended(None)
