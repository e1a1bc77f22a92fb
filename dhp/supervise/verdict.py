"""How an attempt of a run ended: what failed, where, and whether another attempt may do better."""

from __future__ import annotations

import json
import re
import time
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
    NoCluster,
    PartFailed,
    RecordError,
    TooFewDevices,
)
from dhp.core.files import write_whole

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
    since 1970.
    """

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
