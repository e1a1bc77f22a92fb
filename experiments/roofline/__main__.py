"""`python -m experiments.roofline`: a step of Qwen2.5-VL 3B as a roofline has it. Nothing is computed or measured.

Prints a table for each size and device; --out adds the rows to a file.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.commands import command_of

SHAPES = Path(__file__).parents[2] / "configs" / "model" / "shapes"
CHOICES = ("none", "norms and gates", "written", "compiled", "all")  # of experiments.roofline.fused
TIMES = ("product_ms", "attention_ms", "elementwise_ms", "collective_ms", "vocabulary_ms", "ms")


def main() -> None:
    """Print the figures."""
    given = _arguments()
    from experiments.fake_cuda.device import compile_guard, load_guard

    # A kernel that is tried for shapes that it refuses is no error, and torch would print one.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    with tempfile.TemporaryDirectory() as folder:
        load_guard(compile_guard(Path(folder)))
    for samples in given.samples:
        for fused in given.fused:
            _run(given, samples, fused)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="Qwen/Qwen2.5-VL-3B-Instruct", help="a shipped shape, or a model's directory"
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8], help="of a micro-batch")
    parser.add_argument("--grid", type=int, nargs=3, default=[1, 68, 72], help="patches of a sample's image")
    parser.add_argument("--text-tokens", type=int, default=300, help="of a sample, beside the image's")
    parser.add_argument("--fused", nargs="+", default=["compiled"], choices=CHOICES)
    parser.add_argument("--device", nargs="+", default=["H100", "H200"], help="of devices.yaml")
    parser.add_argument("--keys", nargs="*", default=[], help="of a layout, as text.recompute=full")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _run(given: argparse.Namespace, samples: int, fused: str) -> None:
    import torch

    from experiments.fake_cuda.layout import Sizes
    from experiments.roofline.device import read_device
    from experiments.roofline.simulate import rows_of, simulate

    torch.set_num_threads(1)
    shipped = SHAPES / f"{given.shape}.json"
    model = str(shipped) if shipped.is_file() else given.shape
    step = simulate(model, Sizes(samples, tuple(given.grid), given.text_tokens), fused, given.keys)
    command = command_of("roofline")
    for device in given.device:
        about = {"shape": given.shape, "device": device, "samples": samples, "fused": fused, "keys": given.keys}
        rows = [{**about, **row, "command": command} for row in rows_of(step, read_device(device))]
        _show(f"{given.shape}, {samples} samples, fused: {fused}, {device} (simulated)", rows)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    *phases, step = rows
    print(f"\n{title}")
    heads = [name.removesuffix("_ms") for name in TIMES[:-1]] + ["all, ms", "GB", "kernels"]
    print(f"{'':48}" + "".join(f"{head:>13}" for head in heads))
    for row in phases:
        name = row["phase"] + (f", assumed: {row['assumed']}" if "assumed" in row else "")
        shown = [f"{row[time]:.1f}" if time in row else "" for time in TIMES]
        shown += [f"{row['elementwise_bytes'] / 1e9:.1f}", f"{row['kernels']:,}"]
        print(f"{name:48}" + "".join(f"{one:>13}" for one in shown))
    print(
        f"forward and backward {step['passes_ms']:,.0f} ms, step {step['ms']:,.0f} ms, useful "
        f"{step['useful_flops'] / 1e12:,.1f} TFLOP of {step['counted_flops'] / 1e12:,.1f} counted, "
        f"MFU {step['mfu']:.1%}, {step['kernels']:,} kernels",
        flush=True,
    )


if __name__ == "__main__":
    main()
