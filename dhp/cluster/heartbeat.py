"""A rank's heartbeat: what it does and since when, in a file that other processes read while it answers no call."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dhp.core.collectives import RECORD, CallRecord

SUFFIX = ".heartbeat"
PERIOD_S = 0.5
AGAIN_S = 0.01  # until a beat that was being written is read again
SAVING = frozenset({"save", "saved"})  # methods in which a rank may write for as long as training.save_timeout_s
IN_STEP = frozenset({"forward_step", "backward_step", "tied_gradient", "grad_norm_sq", "optimizer_step"})


@dataclass(frozen=True)
class Beat:
    """What a rank does. In its file, times are readings of the host's clock `time.monotonic`; `read_beat` has them in
    seconds until now.

    step: from 1; of methods that are no part of a step, as saving, the last step done. verb: the engine's method; "":
    the rank waits for its next call. micro_batch: where the method has one. verb_s: since when.

    held_s: how long one collective has held it; None: none does. device: the rank's kernels run on a GPU, so that
    collectives do not hold its process; then those count as held that have begun one, and no other since, in this verb.

    saved_s: since when it has been done with the last method of `SAVING`; None: it has run none.

    counts: collectives begun, by group. group, number, members, call: of the last one its group, its number there, the
    ranks of the group, and what it is, in words.
    """

    step: int
    verb: str = ""
    micro_batch: int | None = None
    verb_s: float = 0.0
    held_s: float | None = None
    device: bool = False
    saved_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    number: int = 0
    members: tuple[int, ...] = ()
    call: str = ""

    def __str__(self) -> str:
        calls = ", ".join(f"{count} in group {name}" for name, count in sorted(self.counts.items()))
        last = f"; collectives so far: {calls}; the last call: {self.call}" if self.call else "; no collective so far"
        held = "" if self.held_s is None else f", in one collective for {self.held_s:.0f} s"
        return f"{self.action} for {self.verb_s:.0f} s{held}{last}"

    @property
    def action(self) -> str:
        """`step 3, forward_step of micro-batch 1`."""
        if not self.verb:
            before = f"after step {self.step - 1}, " if self.step > 1 else ""
            return f"{before}waits for its next call"
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"step {self.step}, {self.verb}{of}" if self.verb in IN_STEP else f"{self.verb}{of}"


class Heart:
    """What a rank does, as `Beat` has it. One thread writes, another one may read."""

    def __init__(self, done: int, device: bool, record: CallRecord = RECORD):
        """done: steps before the run."""
        self._done, self._device, self._record = done, device, record
        self._doing: tuple[str, int | None, float] = ("", None, time.monotonic())
        self._saved: float | None = None

    def begin(self, verb: str, micro_batch: int | None = None) -> None:
        """The rank begins a method."""
        self._doing = (verb, micro_batch, time.monotonic())

    def end(self, steps: int = 0) -> None:
        """It has answered. steps: that it completed with this method."""
        self._done += steps
        if self._doing[0] in SAVING:
            self._saved = time.monotonic()
        self._doing = ("", None, time.monotonic())

    def beat(self) -> Beat:
        """Now; times by the clock."""
        verb, micro_batch, since = self._doing
        last, held, begun = self._record.last, self._record.held_since, self._record.last_begun
        if self._device:
            held = begun if verb and begun > since else None
        found = Beat(self._done + 1, verb, micro_batch, since, held, self._device, self._saved, self._record.numbers)
        if last is None:
            return found
        return replace(found, group=last.group, number=last.number, members=last.members, call=str(last))


def keep_heartbeat(file: int, beat: Callable[[], Beat], period_s: float = PERIOD_S) -> None:
    """Write what `beat` says to the open file whenever it has changed, looking every `period_s` seconds for as long as
    the process lives."""
    threading.Thread(target=_write_changes, args=(file, beat, period_s), name="heartbeat", daemon=True).start()


def read_beat(path: str) -> Beat | None:
    """The last one that a rank wrote, by its node's clock; None: there is none. One that is being written is read once
    more: without a beat the rank would count as one that is behind its peers."""
    values = _values(path)
    if values is None:
        time.sleep(AGAIN_S)
        values = _values(path)
    if values is None:
        return None
    now = time.monotonic()
    values |= {key: None if values[key] is None else now - values[key] for key in ("verb_s", "held_s", "saved_s")}
    return Beat(**{**values, "members": tuple(values["members"])})


def _values(path: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError):
        return None


def _write_changes(file: int, beat: Callable[[], Beat], period_s: float) -> None:
    written, stop = b"", threading.Event()
    while not stop.wait(period_s):
        line = f"{json.dumps(asdict(beat()))}\n".encode()
        if line != written:
            # A disk that is full or away for a while (ENOSPC, ESTALE, EIO) must not end the thread: others would take
            # the last beat for what the rank does from then on. It is written again after the next period.
            with suppress(OSError):
                os.pwrite(file, line, 0)
                os.ftruncate(file, len(line))
                written = line
