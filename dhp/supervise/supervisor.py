"""Starts a run's driver, watches it, and starts it again after a fault, as `dhp.supervise.policy` decides.

    starting → loading → training ⇄ saving → (end or fault) → stopping → waiting → starting …

The driver says its state itself. `stopping` begins with its verdict, or with a signal to the supervisor. It is limited:
what has not ended by then is killed, with all that it started. `waiting` is between two attempts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from dhp.core.own_folder import own_folder
from dhp.core.process import INTERRUPTED as INTERRUPTED_STATUS
from dhp.core.process import STOPPING, say_line
from dhp.supervise.attempt import SAVING, TRAINING, Attempt
from dhp.supervise.driver import GRACE_S, KILLED_GRACE_S, Driver, adopt_orphans
from dhp.supervise.elastic import Choice, Layouts
from dhp.supervise.policy import Ended, Restart, Rules, Stop, decide
from dhp.supervise.verdict import (
    COMPLETED,
    INTERRUPTED,
    KILLED,
    REFUSED,
    RETRY,
    Verdict,
    verdict_file,
    write_verdict,
)

STOPPING_S = 30.0  # of the teardown, once it is known that and why the run ends
LOGGERS_S = 30.0  # the longest that it waits for loggers beside that
_POLL_S = 0.2
_LOOK_S = 5.0  # from one look at what the driver has started to the next


@dataclass(frozen=True)
class Begun:
    """What is known of the attempts so far, by which the next one's command is made.

    opened: one of them has made run_dir its own. saved: one of them has finished a checkpoint. layout: the settings of
    another layout than the run's own.
    """

    opened: bool = False
    saved: bool = False
    layout: tuple[str, ...] = ()


Commands = Callable[[Begun], Sequence[str]]


class Supervisor:
    """One run, in as many attempts as it takes. Main thread only: it takes STOPPING signals and hands them on."""

    def __init__(
        self,
        commands: Commands,
        run_dir: Path,
        rules: Rules,
        say: Callable[[str], None] = say_line,
        stopping_s: float = STOPPING_S,
        ends_once: bool = True,
        saving_s: float = 0.0,
    ):
        """commands: the driver's command line. ends_once: the driver ends when it says that it has completed, so that
        it is ended where it hangs then; false where more stages may follow. saving_s: that a driver has besides, once a
        signal came, to end its steps and save them."""
        self._commands, self._run_dir, self._rules, self._say = commands, run_dir, rules, say
        self._stopping_s, self._ends_once, self._saving_s = stopping_s, ends_once, saving_s
        self._history: list[Ended] = []
        self._begun = Begun()
        self._newest: str | None = None  # of this run's checkpoints
        self._first: int | None = None  # number of this run's first verdict in run_dir
        self._signals: list[int] = []
        self._restarts = 0
        self._choice: Choice | None = None  # of its layouts, once they are known
        self._device = ""

    @property
    def opened(self) -> bool:
        """Whether an attempt made run_dir its own: else what is there is another run's."""
        return self._begun.opened

    def run(self) -> int:
        """Run until the run has completed or is not started again; the exit status."""
        adopt_orphans()
        with self._taking_signals():
            while True:
                with own_folder("dhp-attempt-") as folder:
                    decision = self._attempt(str(folder))
                if isinstance(decision, Stop):
                    return decision.status
                if not self._wait(decision.after_s):
                    return INTERRUPTED_STATUS
                self._restarts += 1

    def _attempt(self, folder: str) -> Restart | Stop:
        """Run the driver once, and decide what follows."""
        known = self._choice is not None
        larger = self._choice.larger if self._choice is not None else ()
        attempt = Attempt(folder, len(self._history) + 1, self._restarts, larger, self._device, not known)
        verdict = self._drive(attempt)
        self._newest = attempt.checkpoint or self._newest
        self._device = attempt.device_said or self._device
        moves = self._choose_layout(attempt.layouts, verdict, attempt.checkpoint is not None)
        words = () if self._choice is None else self._choice.now.words
        self._begun = Begun(self._begun.opened or attempt.has_opened, self._newest is not None, words)
        self._history.append(Ended(verdict, attempt.checkpoint is not None, moves))
        decision = decide(self._history, self._rules)
        if self._signals and isinstance(decision, Restart):
            decision = Stop(INTERRUPTED_STATUS)
        self._conclude(verdict, decision)
        return decision

    def _drive(self, attempt: Attempt) -> Verdict:
        """Run the driver, and leave nothing of it; how it ended."""
        driver = Driver(self._commands(self._begun), attempt.environment())
        sent = 0  # of the signals that came
        deadline = inf
        killed = False
        looked = time.monotonic()
        while (code := driver.poll()) is None:
            if len(self._signals) > sent:  # a second one ends a driver that saves
                sent += 1
                driver.send(self._signals[sent - 1])
                saving_s = self._saving_s if sent == 1 and attempt.state in (TRAINING, SAVING) else 0.0
                deadline = min(deadline, time.monotonic() + self._stopping_s + saving_s)
            if self._is_ending(attempt):
                deadline = min(deadline, time.monotonic() + self._stopping_s)
            if time.monotonic() > deadline:
                self._say("the driver has not ended in its time: killing it with all that it started")
                code, killed = driver.kill(), True
                break
            if time.monotonic() - looked > _LOOK_S:
                driver.look()
                looked = time.monotonic()
            time.sleep(_POLL_S)
        ended_at = time.time()
        left = driver.end_others(KILLED_GRACE_S if code < 0 else GRACE_S)
        if left:
            self._say(f"ended what the driver left: {', '.join(sorted(left))}")
        return judge(attempt, code, killed, interrupted=sent > 0, at=ended_at)

    def _choose_layout(self, layouts: Layouts | None, verdict: Verdict, saved: bool) -> bool:
        """Choose the layout of the next attempt; whether it is another one."""
        if self._choice is None and layouts is not None:
            self._choice = Choice(layouts, layouts.own)
        if self._choice is None:
            return False
        before, trained = self._choice, saved or verdict.state in (TRAINING, SAVING)
        self._choice = before.after(verdict.devices, trained, ended=verdict.kind == REFUSED)
        return self._choice.now != before.now

    def _is_ending(self, attempt: Attempt) -> bool:
        verdict = attempt.verdict
        return verdict is not None and (self._ends_once or verdict.kind != COMPLETED)

    def _conclude(self, verdict: Verdict, decision: Restart | Stop) -> None:
        """Say and keep what follows an attempt."""
        if isinstance(decision, Restart):
            number, limit = decision.number, self._rules.max_restarts
            count = f"restart {number} of {limit}" if number else f"restart, not counted, for {decision.uncounted}"
            start = "where it began" if self._newest is None else self._newest
            words = f", in the layout {' '.join(self._begun.layout)}" if self._begun.layout else ""
            follows = f"{count}, after {decision.after_s:g} s, from {start}{words}"
            self._say(f"attempt {verdict.attempt} failed. {verdict.headline()}\n{follows}")
            verdict = replace(verdict, followed_by=follows)
        else:
            if decision.reason:
                newest = f"the newest checkpoint is {self._newest}, from which training.resume=auto goes on"
                left = "there is no checkpoint" if self._newest is None else newest
                self._say(f"attempt {verdict.attempt} failed, and there is no other one: {decision.reason}; {left}")
            verdict = replace(verdict, followed_by=decision.reason or f"exit status {decision.status}")
        self._history[-1] = replace(self._history[-1], verdict=verdict)
        self._keep()

    def _keep(self) -> None:
        """Write the verdicts to run_dir, but of a run that simply completed or was refused before it had one."""
        failed = any(one.verdict.kind not in (COMPLETED, INTERRUPTED) for one in self._history)
        if not failed or not self._begun.opened or not self._run_dir.is_dir():
            return
        if self._first is None:
            self._first = 1
            while verdict_file(self._run_dir, self._first).exists():  # of the run that this one continues
                self._first += 1
        with suppress(OSError):  # a full disk ends no supervisor
            for number, one in enumerate(self._history, self._first):
                write_verdict(verdict_file(self._run_dir, number), one.verdict)

    def _wait(self, seconds: float) -> bool:
        """Wait for that long; False: a signal came first."""
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
        return not self._signals

    @contextmanager
    def _taking_signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in STOPPING}

        def heed(number: int, _frame: Any) -> None:
            self._signals.append(number)

        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, heed)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def judge(attempt: Attempt, code: int, killed: bool, interrupted: bool, at: float | None = None) -> Verdict:
    """How an attempt ended, by what its driver said and by its exit status. killed: by the supervisor, for it had not
    ended in time; interrupted: by a signal to the supervisor. at: when it ended, seconds since 1970; None: now."""
    known = attempt.verdict
    ended = replace(known, exit_code=code) if known is not None else None
    if ended is not None and not (ended.kind == COMPLETED and code > 0):
        return ended
    silent = Verdict(attempt.number, KILLED, state=attempt.state, exit_code=code, at=time.time() if at is None else at)
    if interrupted or code == INTERRUPTED_STATUS:
        return replace(silent, kind=INTERRUPTED)
    if code == 0:
        return replace(silent, kind=COMPLETED)
    if code < 0 and not killed:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = "out of memory, or Ray's core, which aborts a process that lost its servers"
        text = f"the driver was ended by {name} while {attempt.state}, without a word; frequent causes: {why}"
        return replace(silent, message=text, restartable=True)
    return replace(silent, kind=REFUSED, message=f"the driver ended with status {code}", restartable=code == RETRY)
