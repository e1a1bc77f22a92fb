"""Train a configuration through the real entry, and the unmodified model in one process beside it."""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dhp.batch.reader import make_reader
from dhp.checkpoint.folder import find_checkpoint
from dhp.checkpoint.shard_reader import read_shards
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.observe.metrics import read_metrics
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import plan_run
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import stage_settings
from dhp.trainer.trainer import run
from tests.helpers.oracle import Oracle, Step


def compare(config: Config, device: str) -> dict[str, Any]:
    """Largest relative deviation of loss and gradient norm over the steps; distance of the final weights from the
    plain model's over the distance that training went; median step of both, seconds, the first step left out."""
    config = prepare(config)
    run(config)
    metrics = read_metrics(config.run_dir)
    start, taken, seconds, end = _plain(config, device, len(metrics))
    checkpoint = find_checkpoint(Path(config.run_dir))
    trained = read_shards(checkpoint / "vision") | read_shards(checkpoint / "text")
    plain_step_s, step_s = median(seconds[1:]), median(m.step_s for m in metrics[1:])
    return {
        "loss_error": max(abs(m.loss / p.loss - 1) for m, p in zip(metrics, taken, strict=True)),
        "norm_error": max(abs(m.grad_norm / p.norm - 1) for m, p in zip(metrics, taken, strict=True)),
        "update_error": _distance(trained, end) / _distance(start, end), "dhp_step_s": step_s,
        "plain_step_s": plain_step_s, "ratio": step_s / plain_step_s, "steps": len(metrics),
        "vision_tokens": metrics[-1].vision_tokens, "tokens": metrics[-1].tokens,
    }  # fmt: skip


def _plain(config: Config, device: str, steps: int) -> tuple[dict, list[Step], list[float], dict]:
    graph = plan_run(config).graph
    update = stage_settings(config, graph, graph.stages[-1], device, steps).update
    oracle = Oracle(config.text.model_name, getattr(torch, config.text.dtype), update, device)
    torch.backends.cudnn.allow_tf32 = False
    start, feed, taken, seconds = oracle.weights(), make_reader(feed_settings(config)), [], []
    for step in range(steps):
        samples = [s for rows in feed.samples(step).samples for row in rows for s in row]
        begin = time.perf_counter()
        taken.append(oracle.step(samples))
        seconds.append(time.perf_counter() - begin)
    return start, taken, seconds, oracle.weights()


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return sum(float((left[name].to(w) - w).norm() ** 2) for name, w in right.items()) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-name", default="tiny")
    parser.add_argument("--config-path")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    config = compose_config(given.config_name, given.config_path, ["training.warmup_steps=0", *given.overrides])
    device = "cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu"
    print(json.dumps(compare(config, device)))


if __name__ == "__main__":
    main()
