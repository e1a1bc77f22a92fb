"""`python -m dhp export RUN_OR_CHECKPOINT OUT_DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dhp.checkpoint.folder import MODEL, find_checkpoint, read_about
from dhp.checkpoint.shards import read_shards
from dhp.models.whole import save_whole


def main(arguments: Sequence[str]) -> int:
    """Put the parts of a checkpoint together and write them where plain transformers can load them."""
    parser = argparse.ArgumentParser(prog="python -m dhp export", description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run directory: its newest one")
    parser.add_argument("out_dir", type=Path, help="a new or empty directory")
    given = parser.parse_args(arguments)
    checkpoint = find_checkpoint(given.checkpoint)
    about = read_about(checkpoint, ("step", "parts"))
    weights = {name: tensor for part in about["parts"] for name, tensor in read_shards(checkpoint / part).items()}
    save_whole(checkpoint / MODEL, weights, given.out_dir)
    print(f"{given.out_dir}: {len(weights)} weights of step {about['step']}, from {checkpoint}")
    return 0
