"""Spares libraries that transformers imports a search for accelerators, and its warnings."""

import os

import torch


def name_accelerator() -> None:
    """Set DeepSpeed's accelerator to the CPU where there is no GPU. accelerate, which transformers and peft call to
    save or adapt a model, imports DeepSpeed, whose own search would print a warning."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
