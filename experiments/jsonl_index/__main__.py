"""`python -m experiments.jsonl_index [--lines N]`: how long a large JSONL file takes to open, and how much memory."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH = 50_000  # lines that are written at once
READS = 2_000


def write(path: Path, lines: int) -> None:
    """A file of `lines` samples of about 300 bytes, no two alike."""
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, lines, BATCH):
            file.writelines(_line(number) for number in range(start, min(start + BATCH, lines)))


def _line(number: int) -> str:
    talk = [
        {"from": "human", "value": f"<image>\nWhat is at the bottom of receipt {number}, and what does that mean?"},
        {"from": "gpt", "value": f"The total, {number % 9973} crowns." + " Thank you for your visit." * (number % 4)},
    ]
    return json.dumps({"id": number, "image": f"receipts/{number // 1000}/{number}.jpg", "conversations": talk}) + "\n"


def measure(path: Path) -> dict[str, float]:
    """Open the file as a run does, make the order of an epoch, read lines at random; in a process of its own."""
    from dhp.data.read.annotations import read_annotations
    from dhp.data.sampling.sampler import epoch_order

    before = _peak_mib()
    begin = time.perf_counter()
    annotations = read_annotations("set", path, path.parent)
    opened = time.perf_counter()
    after_open = _peak_mib()
    begin_order = time.perf_counter()
    order = epoch_order(len(annotations), 0, 0, True)
    ordered = time.perf_counter()
    for index in order[:READS]:
        annotations.record(int(index))
    done = time.perf_counter()
    return {
        "lines": len(annotations),
        "file_mib": round(path.stat().st_size / 2**20, 1),
        "seconds": round(opened - begin, 2),
        "order_s": round(ordered - begin_order, 2),
        "us_a_record": round((done - ordered) / min(READS, len(annotations)) * 1e6, 1),
        "rss_before_mib": round(before, 1),
        "peak_rss_opened_mib": round(after_open, 1),
        "peak_rss_mib": round(_peak_mib(), 1),
        "index_mib": round(len(annotations) * np.dtype(np.int64).itemsize / 2**20, 1),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.jsonl_index", description=__doc__)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        write(path, arguments.lines)
        # Writing took memory too, so another process measures.
        command = [sys.executable, "-m", "experiments.jsonl_index", "--measure", str(path)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()
