"""What libraries that transformers asks for would otherwise look for, and speak of."""

import os

import torch


def name_accelerator() -> None:
    """Tell DeepSpeed that there is no GPU where there is none. accelerate, which transformers and peft ask when they
    save or adapt a model, imports it, and it would print a warning of its own search."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
