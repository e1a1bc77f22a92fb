"""Rows: ranks of both parts that share the GPU, over gloo, against the plain model on the same GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from dhp.base.degrees import Degrees
from dhp.cluster.transport.shared_memory import CUDA_IPC
from experiments.gpu_check.carried import TRAINERS
from experiments.gpu_check.setting import Setting
from tests.helpers.batches import mixed_step, step_with_one_window
from tests.helpers.layouts import Case, compare, compare_rounding
from tests.helpers.tiny import save_model

LAYOUTS = {
    "1+1": (Degrees(), Degrees()),
    "2+2": (Degrees(ulysses=2), Degrees(tensor=2)),
    "ring+data": (Degrees(ring=2), Degrees(data=2)),
    "data+fsdp": (Degrees(data=2), Degrees(data=2)),
}
EXACT = {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-4, "update": 1e-3}  # relative; Adam amplifies rounding in updates
ROUNDED = 2.5  # times the error of one plain process in 16 bits


def check(setting: Setting, layout: str, dtype: str, recompute: str, carrier: str) -> dict[str, Any]:
    """Two steps of made samples. In float32 deviations from the plain model, in bfloat16 from double precision, as
    multiples of the plain 16-bit process's."""
    if carrier == CUDA_IPC:
        setting.require_cuda("CUDA IPC")
    torch.backends.cudnn.allow_tf32 = False
    folder = setting.folder / "parity"
    if not folder.exists():
        save_model(folder.with_name("unfinished")).rename(folder)
    vision, text = LAYOUTS[layout]
    stage = 3 if layout == "data+fsdp" else 0
    case = Case(
        vision,
        text,
        dtype=dtype,
        packing=True,
        recompute=recompute,
        zero_stage=stage,
        text_zero_stage=stage,
        fsdp=stage > 0,
        device=setting.device,
    )
    steps = [mixed_step(), step_with_one_window()]
    if dtype == "bfloat16":
        found = asdict(compare_rounding(str(folder), case, steps, TRAINERS[carrier]))
        ok = all(found[name] < ROUNDED for name in ("loss", "gradient", "update"))
    else:
        found = asdict(compare(str(folder), case, steps, TRAINERS[carrier]))
        ok = all(found[name] < limit for name, limit in EXACT.items())
    return {"ok": ok, "limits": ROUNDED if dtype == "bfloat16" else EXACT, **found}
