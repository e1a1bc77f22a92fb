"""The state of torch's random number generators on one rank, on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dhp.checkpoint.files import damaged, reading, writing
from dhp.checkpoint.tensor_file import write_tensors
from dhp.core.reports import WrittenFile


def random_state() -> dict[str, Tensor]:
    """The states of this rank's generators, the CPU's and where there is one the GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def save_random_state(folder: Path, rank: int, states: Mapping[str, Tensor] | None = None) -> WrittenFile:
    """Write a rank's generators into `folder`; states: None: as they are now."""
    file = _file(folder, rank)
    with writing(file):
        folder.mkdir(parents=True, exist_ok=True)
        written, _ = write_tensors(random_state() if states is None else states, file)
    return written


def load_random_state(folder: Path, rank: int) -> None:
    """Set this rank's generators. A rank that the checkpoint's layout did not have keeps those that it was seeded with:
    no number that trains depends on them where layouts differ. Raises CheckpointError for a damaged file."""
    file = _file(folder, rank)
    if not file.is_file():
        return
    with reading(file):
        states = load_file(file)
    if "cpu" not in states:
        raise damaged(file, "it holds no state of the CPU's generator")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"
