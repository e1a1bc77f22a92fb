"""`python -m experiments.gpu_check [--device cuda] [--out results/gpu.json]`: does a GPU give the plain model's numbers?

Trains the tiny model through the real entry with 1+1 and 2+2 actors, and beside it the unmodified transformers model
in this process on the same device, on the same samples. One JSON object a layout, printed and written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dhp.checkpoint.folder import find_checkpoint
from dhp.checkpoint.shards import read_shards
from dhp.config.load import compose_config
from dhp.config.schema import Config
from dhp.driver import run
from dhp.feed import make_feed
from dhp.observe.metrics import StepMetrics, read_metrics
from dhp.observe.summary import versions
from dhp.preflight import prepare
from dhp.wiring import feed_settings, part_settings
from tests.helpers.oracle import Oracle

LAYOUTS = {
    "1+1": ["vision.parallelism=none", "vision.num_actors=1", "text.parallelism=none", "text.num_actors=1"],
    "2+2": ["vision.parallelism=sequence", "vision.num_actors=2", "text.parallelism=tensor", "text.num_actors=2"],
}
SINGLE = {"loss": 1e-5, "norm": 1e-4, "update": 1e-3}  # float32, as in the parity tests; update: Adam amplifies noise


def check(layout: str, device: str, steps: int, folder: Path) -> dict[str, Any]:
    """Deviations of one layout from the plain model, and the time of a step in both, seconds."""
    overrides = [
        f"tiny_assets={folder / 'assets'}",
        f"run_dir={folder / layout}",
        f"training.max_steps={steps}",
        "training.warmup_steps=0",
        f"cluster.device={device}",
        *LAYOUTS[layout],
    ]
    config = prepare(compose_config("tiny", overrides=overrides))
    run(config)
    metrics = read_metrics(config.run_dir)
    plain = _plain(config, device, steps)
    found = {
        "loss": max(abs(m.loss / p["loss"] - 1) for m, p in zip(metrics, plain["steps"], strict=True)),
        "norm": max(abs(m.grad_norm / p["norm"] - 1) for m, p in zip(metrics, plain["steps"], strict=True)),
        "update": _update_error(config, plain),
    }
    return {
        "layout": layout,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "equal": all(found[name] < limit for name, limit in SINGLE.items()),
        **{f"{name}_error": error for name, error in found.items()},
        "step_s": _median_step(metrics),
        "plain_step_s": median(p["step_s"] for p in plain["steps"][1:]),
        "steps": steps,
        "versions": versions(),
    }


def _plain(config: Config, device: str, steps: int) -> dict[str, Any]:
    update = part_settings(config, "text", device, steps).update
    oracle = Oracle(config.text.model_name, torch.float32, update, device)
    torch.backends.cudnn.allow_tf32 = False
    start, feed, taken = oracle.weights(), make_feed(feed_settings(config)), []
    for step in range(steps):
        samples = [s for rows in feed.samples(step).samples for row in rows for s in row]
        begin = time.perf_counter()
        result = oracle.step(samples)
        taken.append({"loss": result.loss, "norm": result.norm, "step_s": time.perf_counter() - begin})
    return {"steps": taken, "start": start, "end": oracle.weights()}


def _update_error(config: Config, plain: dict[str, Any]) -> float:
    """Distance of the trained weights from the plain model's, over the distance that training went."""
    checkpoint = find_checkpoint(Path(config.run_dir))
    trained = read_shards(checkpoint / "vision") | read_shards(checkpoint / "text")
    apart = sum(float((trained[n].to(w) - w).norm() ** 2) for n, w in plain["end"].items())
    went = sum(float((plain["start"][n] - w).norm() ** 2) for n, w in plain["end"].items())
    return (apart / went) ** 0.5


def _median_step(metrics: list[StepMetrics]) -> float:
    return median(m.step_s for m in metrics[1:])


def main() -> int:
    """Check every layout; status 1 if one deviates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked (--device cpu tries the script itself)")
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        rows = [check(layout, given.device, given.steps, Path(folder)) for layout in LAYOUTS]
    for row in rows:
        print(json.dumps(row))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
