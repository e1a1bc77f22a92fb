"""The state of torch's random number generators on one rank, on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from dhp.checkpoint.files import damaged, reading, sync, writing
from dhp.checkpoint.shards import save_tensors


def save_random_state(folder: Path, rank: int) -> None:
    """Write this rank's generators, the CPU's and where there is one the GPU's, into `folder`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    file = _file(folder, rank)
    with writing(file):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(states, file)
        sync(file)


def load_random_state(folder: Path, rank: int) -> None:
    """Set this rank's generators. Raises CheckpointError when the rank's file is missing or damaged."""
    file = _file(folder, rank)
    with reading(file):
        states = load_file(file)
    if "cpu" not in states:
        raise damaged(file, "it holds no state of the CPU's generator")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"
