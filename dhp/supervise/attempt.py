"""What a supervised driver says to its supervisor, in a folder of their own: its state, its checkpoints, its end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dhp.core.files import write_whole
from dhp.supervise.elastic import Layouts, read_layouts, written
from dhp.supervise.verdict import Verdict, read_verdict, verdict_of, write_verdict

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

    def has_layouts(self, layouts: Layouts) -> None:
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
    def layouts(self) -> Layouts | None:
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
    """Whether something supervises this driver that may start it again after an error."""
    attempt = this_attempt()
    return attempt is not None and verdict_of(error, attempt.number).restartable


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


def tell_layouts(find: Callable[[], Layouts]) -> None:
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
    except BaseException as error:
        if attempt := this_attempt():
            attempt.ended(error)
        raise
    if attempt := this_attempt():
        attempt.ended(None)
