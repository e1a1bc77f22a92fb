"""Rows: whether the same steps give the same bits, as they are and with `training.deterministic`."""

from __future__ import annotations

import time
from typing import Any

import torch

from experiments.gpu_check.pair import free, start_pair
from experiments.gpu_check.samples import deal, make_samples, sizes
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import make_shape

LAYERS, STEPS = 2, 2


def check(setting: Setting, deterministic: bool) -> dict[str, Any]:
    """Both parts begun twice from the same seed. Where it is promised the bits must be equal, else it is an answer."""
    free()
    folder = make_shape(setting, LAYERS)
    data = deal(setting, folder, make_samples(folder, sizes(setting, 2)))
    runs = [_run(setting, folder, data, deterministic) for _ in range(2)]
    (first, losses, _), (second, others, seconds) = runs
    differing = sorted(name for name in first if not torch.equal(first[name], second[name]))
    equal = not differing and losses == others
    return {
        "ok": equal or not deterministic,
        "equal": equal,
        "losses": [losses, others],
        "differing_weights": len(differing),
        "first_differing": differing[:3],
        "step_ms": round(seconds * 1e3, 3),
    }


def _run(setting: Setting, folder: str, data: Any, deterministic: bool) -> tuple[dict[str, Any], list[float], float]:
    """Weights at the end, the loss of each step, and the seconds of the last step."""
    pair, losses, seconds = start_pair(setting, folder, "light", deterministic=deterministic), [], 0.0
    for _ in range(STEPS):
        setting.wait()
        begin = time.perf_counter()
        losses.append(pair.step(data)[1].loss)
        setting.wait()
        seconds = time.perf_counter() - begin
    named = (one for trainer in (pair.vision, pair.text) for one in trainer.model.named_parameters())
    return {name: parameter.detach().cpu().clone() for name, parameter in named}, losses, seconds
