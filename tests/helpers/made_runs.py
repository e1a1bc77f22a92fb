"""Directories of runs that never ran: two vision ranks and two text ranks, with times that a test chooses."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dhp.core.text import json_safe
from dhp.observe.metrics import EvalMetrics, StepMetrics
from dhp.observe.ranks import RankLine

CONFIG: dict[str, Any] = {
    "vision": {"num_actors": 2, "ulysses": 2},
    "text": {"num_actors": 2, "tensor": 2},
    "training": {"save_steps": 5},
    "data": {"balance": "random", "num_workers": 1},
}


def healthy_ranks() -> dict[str, dict[str, list[float]]]:
    """Seconds of a step, as ranks.jsonl has them: all of it computing but some 4%."""
    own = {"forward": [0.15, 0.15], "backward": [0.3, 0.3], "optimizer": [0.02, 0.02], "comm": [0.01, 0.01]}
    return {
        "vision": {kind: list(of) for kind, of in own.items()},
        "text": {kind: list(of) for kind, of in own.items()},
    }


def make_run(
    run_dir: Path,
    steps: int = 20,
    seconds: Callable[[int], Mapping[str, Any]] = lambda step: healthy_ranks(),
    work: Callable[[int], Mapping[str, list[float]]] = lambda step: {"vision": [1.0, 1.0], "text": [1.0, 1.0]},
    step_s: Callable[[int], float] = lambda step: 1.0,
    data_s: float = 0.0,
    flops: Callable[[int], int] = lambda step: 1000,
    loss: Callable[[int], float] = lambda step: 6.0 / step**0.5,
    losses: Callable[[int], Mapping[str, list[Any]]] = lambda step: {},
    epoch: Callable[[int], float | None] = lambda step: None,
    saves: Mapping[int, float] | None = None,
    config: Mapping[str, Any] | None = None,
    status: str | None = "completed",
) -> Path:
    """Write the directory; saves: by step, seconds in which training waited. status: None: it has no summary.json."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG | dict(config or {})))
    lines: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        busy = {name: sum((of[0] for of in kinds.values()), 0.0) for name, kinds in seconds(step).items()}
        metrics = StepMetrics(
            step=step,
            epoch=epoch(step),
            loss=loss(step),
            grad_norm=1.0,
            stage_norms={"vision": 0.6, "text": 0.8},
            lr={"text": 1e-3},
            tokens=500,
            vision_tokens=300,
            target_tokens=40,
            step_s=step_s(step),
            data_s=data_s,
            busy_s=busy,
            flops={"text": flops(step)},
            comm_bytes={"text": {"all_reduce": 2**20}},
            dist_ratio={"text": 0.0},
            pad_ratio=0.0,
        )
        lines.append(asdict(metrics))
        samples = {"shapes": [step, step + 1]}
        known = {"seconds": seconds(step), "work": work(step), "samples": samples, "losses": losses(step)}
        ranks.append(asdict(RankLine(step=step, **known)))
    lines.append(asdict(EvalMetrics(step=steps, dataset="held_out", loss=2.0, accuracy=0.5)))
    _write(run_dir / "metrics.jsonl", lines)
    _write(run_dir / "ranks.jsonl", ranks)
    saved = [{"event": "save", "step": at, "time": 100.0 + at, "seconds": of} for at, of in (saves or {}).items()]
    _write(run_dir / "events.jsonl", [{"event": "start", "step": 0, "time": 100.0}, *saved])
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status, "tokens_per_s": 500.0}))
    return run_dir


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(json_safe(line)) + "\n" for line in lines))
