"""What is asserted of a run that met a fault, from its files alone, beside the run that met none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dhp.checkpoint.folder import checkpoints, step_of
from dhp.checkpoint.manifest import check_checkpoint
from dhp.checkpoint.source import read_shards
from dhp.core.errors import CheckpointError
from experiments.chaos.points import USERS_FILES
from experiments.chaos.run import Observed

SAME = ("loss", "grad_norm", "sample_digest")  # of a line of metrics.jsonl, to the bit
_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Judged:
    """What is known of a fault.

    completed: the run ended with all its steps. identical: losses, norms, samples and the newest checkpoint are those
    of the undisturbed run. samples_lost, samples_repeated: trained on less, or more, often than there. lost_steps:
    steps that were made again. detect_s: from the fault until its verdict was known; rebuild_s: until a step
    after it could begin; first_step_s: from the fault until that step had ended. problems: what was not as it should
    be.
    """

    completed: bool
    identical: bool
    samples_lost: int
    samples_repeated: int
    lost_steps: int | None
    detect_s: float | None
    rebuild_s: float | None
    first_step_s: float | None
    message: str
    problems: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """As it is printed."""
        rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return rounded | {"problems": list(self.problems)}


def judge(observed: Observed, reference: Path, batch: int, names_rank: bool) -> Judged:
    """Compare. reference: run_dir of the undisturbed run. names_rank: the message is to name a part and its rank."""
    ours, theirs = read_lines(observed.run_dir), read_lines(reference)
    different = list(_differences(ours, theirs))
    weights = list(_newest_differs(observed.run_dir, reference))
    problems = [*different, *weights, *_damaged(observed.run_dir), *observed.left]
    problems += _leftovers(observed.run_dir, ends_killed=not observed.faults)
    problems += [f"{name} of the user's is gone" for name in USERS_FILES if not (observed.run_dir / name).is_file()]
    completed = observed.code == 0 and {step for kind, step in theirs if kind == "train"} <= {
        step for kind, step in ours if kind == "train"
    }
    if not completed:
        problems.append(f"exit status {observed.code}: {observed.output[-600:]}")
    if observed.fired is None:
        problems.append("the point was not reached")
    lost, repeated = _samples(observed.run_dir, reference, batch)
    verdict: Mapping[str, Any] = observed.faults[0] if observed.faults else {}
    if names_rank and observed.fired is not None:
        problems += _unnamed(verdict, str(observed.fired["process"]))
    at = None if observed.fired is None else float(observed.fired["at"])
    since = lambda time: None if at is None or time is None else time - at
    detected = since(verdict.get("at"))
    first = since(observed.first_step)
    between = None if detected is None or first is None else first - detected
    said = str(verdict.get("message", "")).partition("\n")[0]
    step = None if verdict.get("step") is None else int(verdict["step"])
    lost_steps = None if step is None else max(0, step - _resumed_at(observed, verdict))
    same = not different and not weights
    return Judged(completed, same, lost, repeated, lost_steps, detected, between, first, said, tuple(problems))


def read_lines(run_dir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Lines of metrics.jsonl, by kind and step."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {(line["kind"], line["step"]): line for line in lines}


def _differences(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Iterator[str]:
    for key, line in theirs.items():
        if key not in ours:
            yield f"{key[0]} {key[1]} is missing"
            continue
        for field in SAME:
            if ours[key].get(field) != line.get(field):
                yield f"{key[0]} {key[1]}: {field} {ours[key].get(field)} is not {line.get(field)}"


def _newest_differs(run_dir: Path, reference: Path) -> Iterator[str]:
    """In what the newest checkpoint is not the undisturbed run's of that step: weights, masters, moments, counts."""
    newest = next(iter(checkpoints(run_dir / "checkpoints")), None)
    if newest is None:
        yield "there is no checkpoint"
        return
    other = reference / "checkpoints" / newest.name
    if not other.is_dir():
        yield f"{newest.name} has no checkpoint to compare with"
        return
    for part in json.loads((other / "checkpoint.json").read_text())["parts"]:
        for below in ("", _OPTIMIZER):
            ours, theirs = read_shards(newest / part / below), read_shards(other / part / below)
            if ours.keys() != theirs.keys():
                yield f"{newest.name}/{part}/{below}: other tensors"
                continue
            for name in theirs:
                if not torch.equal(ours[name], theirs[name]):
                    yield f"{newest.name}/{part}/{below}: {name} differs"


def _damaged(run_dir: Path) -> Iterator[str]:
    """Complete checkpoints that do not pass their checksums."""
    for checkpoint in checkpoints(run_dir / "checkpoints"):
        try:
            check_checkpoint(checkpoint)
        except CheckpointError as error:
            yield f"{checkpoint.name} of step {step_of(checkpoint)}: {error}"


def _leftovers(run_dir: Path, ends_killed: bool) -> Iterator[str]:
    """ends_killed: the last attempt itself was killed, behind its end: its lock's file stays, and is no obstacle."""
    for pattern in ("*.partial", "*.removed", "*.tmp", *(() if ends_killed else (".attempt.json", ".running*"))):
        for path in (run_dir / "checkpoints").glob(pattern):
            yield f"checkpoints/{path.name} is left"


def _samples(run_dir: Path, reference: Path, batch: int) -> tuple[int, int]:
    """Samples of steps that are not there, and of steps that are there twice."""
    digests = [_digests(folder) for folder in (run_dir, reference)]
    ours, theirs = digests
    lost = sum(max(0, theirs.count(one) - ours.count(one)) for one in set(theirs))
    repeated = sum(max(0, ours.count(one) - theirs.count(one)) for one in set(ours))
    return lost * batch, repeated * batch


def _digests(run_dir: Path) -> list[str]:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [str(line["sample_digest"]) for line in lines if line["kind"] == "train"]


def _unnamed(verdict: Mapping[str, Any], process: str) -> Sequence[str]:
    """What a verdict does not say about the death of an actor."""
    part, _, rank = process.partition("-")
    wanted = {"part": part, "rank": int(rank)} if part.partition(".")[0] in ("vision", "text") and rank else {}
    wrong = [f"verdict: {key}={verdict.get(key)!r}, not {value!r}" for key, value in wanted.items()]
    wrong = [text for text, (key, value) in zip(wrong, wanted.items()) if verdict.get(key) != value]
    if not verdict:
        return ["there is no verdict"] if wanted else []
    if verdict.get("state") in ("training", "saving") and verdict.get("step") is None and wanted:
        wrong.append("verdict: no step")
    if wanted and not verdict.get("action"):
        wrong.append("verdict: no action")
    return wrong


def _resumed_at(observed: Observed, verdict: Mapping[str, Any]) -> int:
    """The step after which the attempt behind the fault went on."""
    followed = str(verdict.get("followed_by", ""))
    name = followed.rpartition("step_")[2]
    return int(name) if "step_" in followed and name.isdigit() else 0
