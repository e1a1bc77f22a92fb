"""Row: what there is. Deviates where two processes may not share the GPU."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from experiments.gpu_check import older_torch
from experiments.gpu_check.setting import Setting

PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "triton", "deepspeed", "ray", "hydra-core", "av")


def check(setting: Setting) -> dict[str, Any]:
    """Versions, device, driver, compute mode, and by which way attention over segments goes."""
    found = {
        "ok": True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "varlen_attn": older_torch.WAY,
    }
    if not setting.cuda:
        return found | {"device": "cpu"}
    about = torch.cuda.get_device_properties(0)
    driver, mode = _ask_driver("driver_version", "compute_mode")
    return found | {
        "ok": mode in ("Default", ""),
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": driver,
        "compute_mode": mode,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ask_driver(*fields: str) -> tuple[str, ...]:
    """By nvidia-smi; empty where it is not installed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ("",) * len(fields)
    return tuple(value.strip() for value in done.stdout.strip().split(","))
