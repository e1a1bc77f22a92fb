"""Row: what there is, and whether it serves. Deviates where two processes may not share the GPU."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_check import older_torch
from experiments.gpu_check.setting import Setting

NEEDED = ("torch", "transformers")
USED = ("dhp.trainers.vision", "dhp.trainers.text", "dhp.batching.scatter", "dhp.run.chain", "dhp.models.flops")
PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "triton", "deepspeed", "ray", "hydra-core", "av")


def check(setting: Setting) -> dict[str, Any]:
    """Versions, device, driver, compute mode, and by which way attention over segments goes. With "serves" false no
    other row can run: "error" says what there is and what is wanted."""
    lacking = _find_lacking()
    if lacking is not None:
        return {"error": lacking, "serves": False}
    found = {
        "ok": True,
        "serves": True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wanted": _wanted(),
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


def _find_lacking() -> str | None:
    """What keeps dhp from being imported, once for all rows."""
    try:
        for name in USED:
            import_module(name)
    except ImportError as error:
        wanted = _wanted()
        told = ", ".join(f"{name} {_version(name)} is here, {wanted[name]} is wanted" for name in NEEDED)
        return (
            f"dhp cannot be imported: {told} ({error}). Bring the wheel along, pip install --no-index --no-deps "
            "--target SITE, and set PYTHONPATH=SITE; an older torch serves where dhp can be imported"
        )
    return None


def _wanted() -> dict[str, str]:
    pins = (Path(__file__).parents[2] / "requirements.txt").read_text(encoding="utf-8")
    return {name: re.search(rf"^{name}==(\S+)", pins, re.MULTILINE)[1] for name in NEEDED}


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
