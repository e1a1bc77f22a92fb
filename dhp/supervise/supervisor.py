"""Starts a run's driver, watches it, restarts it after faults."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import psutil

from dhp.core.files import private_folder
from dhp.core.process import INTERRUPTED as INTERRUPTED_STATUS
from dhp.core.process import STOPPING, say_line
from dhp.supervise.attempt import (
    COMPLETED,
    INTERRUPTED,
    KILLED,
    REFUSED,
    RETRY,
    SAVING,
    TRAINING,
    Attempt,
    Choice,
    ElasticLayouts,
    Verdict,
    verdict_file,
    write_verdict,
)
from dhp.supervise.policy import Ended, Restart, Rules, Stop, decide

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
GRACE_S = 5.0  # for what the driver left to end by itself: Ray's servers take a moment
KILLED_GRACE_S = 1.0  # of a driver that was killed: nothing below it is being ended in order
_EXIT_POLL_S = 0.1
_QUIET = 3  # looks in a row that find nothing: one may miss a process whose parent ends just then
_KILLED_S = 5.0  # the kernel takes a moment, on a busy machine more of one


def adopt_orphans() -> None:
    """From here on a process below this one whose parent ends becomes this one's child, so that none is out of sight.
    Ray's agents change their titles, and with them what else would tell whose they are."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Driver:
    """A started driver, in a session of its own: a terminal's Ctrl-C reaches it once, through its supervisor. It gets
    SIGTERM where the supervisor dies."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        """environment: beside that of this process."""
        supervisor = os.getpid()
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        self._known: set[psutil.Process] = set()
        self._process = subprocess.Popen(
            list(command),
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=lambda: _die_with(supervisor),
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def look(self) -> None:
        """Remember what it has started: a process whose parent ends while they are listed is in no list."""
        self._below()

    def poll(self) -> int | None:
        """Its exit status, minus the number of a signal that ended it; None: it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> int:
        """End it and everything below it at once, also what is stopped; its exit status."""
        _send(self._below(), signal.SIGKILL)
        self._process.kill()
        return self._process.wait()

    def end_others(self, grace_s: float = GRACE_S) -> list[str]:
        """Once it has ended, end what it left: names of the processes that did not end by themselves in `grace_s`."""
        deadline = time.monotonic() + grace_s
        quiet = 0
        while quiet < _QUIET and time.monotonic() < deadline:
            quiet = 0 if self._below() else quiet + 1
            time.sleep(_EXIT_POLL_S)
        left = self._below()
        names = [_name(process) for process in left]
        deadline = time.monotonic() + _KILLED_S
        while left and time.monotonic() < deadline:
            _send(left, signal.SIGKILL)
            time.sleep(_EXIT_POLL_S)
            left = self._below()
        return names

    def _below(self) -> list[psutil.Process]:
        """Living processes that the driver started, or that lost their parent since; not the driver itself."""
        apart = {*self._others, self._process.pid}
        found = {process for process in psutil.Process().children(recursive=True) if process.pid not in apart}
        ended = {process for process in found | self._known if _has_ended(process)}
        for process in ended & found:
            with suppress(OSError):  # not adopted yet
                os.waitpid(process.pid, os.WNOHANG)
        self._known = (self._known | found) - ended
        return list(self._known)


def _die_with(supervisor: int) -> None:
    """In the child before its program: SIGTERM when the supervisor dies, and now if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        os._exit(1)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _name(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [process.name()])[0].split(" ")[0]
    except psutil.Error:
        return f"process {process.pid}"


def _send(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


STOPPING_S = 30.0  # of the teardown, once it is known that and why the run ends
LOGGERS_S = 30.0  # the longest that it waits for loggers beside that
_POLL_S = 0.2
_LOOK_S = 5.0  # from one look at what the driver has started to the next


@dataclass(frozen=True)
class Begun:
    """What is known of the attempts so far, by which the next one's command is made.

    opened: one of them has made run_dir its own. saved: one of them has finished a checkpoint. layout: the settings of
    another layout than the run's own."""

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
                with private_folder("dhp-attempt-") as folder:
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

    def _choose_layout(self, layouts: ElasticLayouts | None, verdict: Verdict, saved: bool) -> bool:
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
