"""transformers 4 in a folder of its own, beside the installed version, and logits by either."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

REQUIREMENTS = ("transformers==4.57.3", "huggingface-hub==0.36.0", "tokenizers==0.22.1")
LOGITS = """
import sys, torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
for folder in sys.argv[2:]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 200, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.save(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, f"{folder}/{sys.argv[1]}.pt")
    assert AutoTokenizer.from_pretrained(folder).decode([ids[0, 0]]) is not None
"""


def install(parent: Path) -> Path:
    """The folder with version 4 in `parent`, made where it is not there yet; the test is skipped where it cannot be."""
    folder = parent / "transformers_4"
    if not folder.is_dir():
        partial = folder.with_suffix(f".{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), *REQUIREMENTS]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{' '.join(REQUIREMENTS)} cannot be installed here")
        if not folder.is_dir():
            partial.rename(folder)
    return folder


def logits(version: str, path: Path | None, folders: Sequence[Path]) -> list[Tensor]:
    """Of one row of tokens by each model, in a process that finds its modules in `path` first."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own |= {} if path is None else {"PYTHONPATH": str(path)}
    command = [sys.executable, "-c", LOGITS, version, *map(str, folders)]
    run = subprocess.run(command, env=own, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [torch.load(folder / f"{version}.pt") for folder in folders]
