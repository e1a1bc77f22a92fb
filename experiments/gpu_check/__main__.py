"""`python -m experiments.gpu_check [--device cuda] [--out FILE]`: does a GPU give the plain model's numbers?

Trains the tiny model through the real entry with 1+1 and 2+2 actors, and beside it the unmodified transformers model
in this process on the same device, on the same samples. One JSON object a layout, printed and written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from dhp.config.load import compose_config
from dhp.observe.summary import versions
from experiments.beside_plain.compare import compare

LAYOUTS = {
    "1+1": ["vision.parallelism=none", "vision.num_actors=1", "text.parallelism=none", "text.num_actors=1"],
    "2+2": ["vision.parallelism=sequence", "vision.num_actors=2", "text.parallelism=tensor", "text.num_actors=2"],
}
LIMITS = {"loss_error": 1e-5, "norm_error": 1e-4, "update_error": 1e-3}  # float32; Adam amplifies the noise of updates


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
    found = compare(compose_config("tiny", overrides=overrides), device)
    return {
        "layout": layout,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "equal": all(found[name] < limit for name, limit in LIMITS.items()),
        **found,
        "versions": versions(),
    }


def main() -> int:
    """Check every layout; status 1 if one deviates, 2 without a device."""
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
