"""Rows: what there is, and whether it serves; and which kernel computes what of a model here."""

import platform
import re
import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_check import stand_ins
from experiments.gpu_check.setting import Setting

LAYERS = 2  # of the parts that are asked which kernels they got
NEEDED = ("torch", "transformers")
USED = (
    "dhp.engine.encoder_engine", "dhp.engine.text_engine", "dhp.batch.shard", "dhp.plan.recompute.planner",
    "dhp.plan.count.state_bytes", "dhp.doctor.trial", "experiments.gpu_check.stand_ins", "dhp.cluster.worker",
)  # fmt: skip
PACKAGES = (
    "transformers", "tokenizers", "safetensors", "numpy", "triton", "deepspeed", "ray", "hydra-core", "av", "peft",
    "bitsandbytes",
)  # fmt: skip


def check_machine(setting: Setting) -> dict[str, Any]:
    """Versions, device, driver, compute mode, free memory. Deviates where two processes may not share the GPU. With
    "serves" false no other row can run: "error" says what there is and what is wanted."""
    lacking = _find_lacking()
    if lacking is not None:
        return {"error": lacking, "serves": False}
    found = {
        "ok": True, "serves": True, "python": platform.python_version(), "torch": torch.__version__,
        "wanted": _wanted(), "packages": {name: _version(name) for name in PACKAGES},
    }  # fmt: skip
    if not setting.cuda:
        return found | {"device": "cpu"}
    about = torch.cuda.get_device_properties(0)
    unused, whole = torch.cuda.mem_get_info()
    driver, mode = _ask_driver("driver_version", "compute_mode")
    return found | {
        "ok": mode in ("Default", ""), "device": about.name, "capability": f"{about.major}.{about.minor}",
        "memory_bytes": whole, "free_bytes": unused, "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "driver": driver, "compute_mode": mode,
    }  # fmt: skip


def check_registry(setting: Setting) -> dict[str, Any]:
    """Which kernel serves each kind of layer of both parts of the model with real layers, as the product asks.

    Deviates on a GPU where attention is not in one call, or norms, rotary positions and gates lack the fastest kernel
    that can be there."""
    from dhp.parallel.attention.attention_kernels import choose_kernel, has_varlen
    from dhp.parallel.tensor.loss import CHUNK_ROWS
    from experiments.gpu_check.pair import make_shape, start

    device, folder = torch.device(setting.device), make_shape(setting, LAYERS)
    uses = {
        part: [f"{use.kind} {use.kernel}" for use in start(setting, part, folder).describe_kernels()]
        for part in ("vision", "text")
    }
    best = {"norm torch", "rotary compiled", "gate compiled"} if find_spec("triton") else {"norm torch"}
    varlen = has_varlen(device, setting.dtype)
    block = choose_kernel(torch.empty(1, 16, 128, device=device, dtype=setting.dtype))
    return {
        "ok": not setting.cuda or (varlen and all(set(found) >= best for found in uses.values())),
        "attention": f"one call for all segments ({stand_ins.WAY})" if varlen else "SDPA, length by length",
        "ring_block": type(block).__name__, "loss": f"in chunks of {CHUNK_ROWS} rows", "kernels": uses,
    }  # fmt: skip


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
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ("",) * len(fields)
    return tuple(value.strip() for value in done.stdout.strip().split(","))
