"""Rows: Qwen2.5-VL 3B at full depth in one process: dhp's two parts in turn, and the plain model beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dhp.core.batch import StepInfo
from dhp.core.reports import DeviceInfo
from dhp.data.sample.sample import Sample
from dhp.observe.planned import known_peaks
from experiments.gpu_check.dry_run import agree, footprint_of
from experiments.gpu_check.pair import free, shared_pair, time_steps
from experiments.gpu_check.plain_loop import PlainLoop
from experiments.gpu_check.samples import deal, make_samples, sizes
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.shape import make_shape
from experiments.pair import TEXT, VISION


def check(setting: Setting, samples: int, recompute: str, compiled: bool = False) -> dict[str, Any]:
    """A whole step of one micro-batch. That it does not fit is an answer too."""
    return _or_too_large(lambda: _time_pair(setting, samples, recompute, compiled))


def check_beside_plain(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
    """The same step, and then the same data through the plain model with fused AdamW and float32 masters."""
    return _or_too_large(lambda: _time_both(setting, samples, recompute))


def check_states(setting: Setting) -> dict[str, Any]:
    """What both parts' states take between steps against what a dry run says of the same parameters."""
    pair, data = shared_pair(setting), _data(setting, 1)
    pair.choose("full")
    pair.step(data)
    said = [footprint_of(setting, make_shape(setting), part) for part in (VISION, TEXT)]
    kept = torch.cuda.memory_allocated() if setting.cuda else sum(map(_tensor_bytes, (pair.vision, pair.text)))
    least, most = sum(one.states.weights + one.states.optimizer for one in said), sum(one.states.total for one in said)
    told = {"dry_run_least_bytes": least, "dry_run_most_bytes": most}
    return {"ok": agree(kept, *said), "between_steps_bytes": kept, **told}


def _data(setting: Setting, samples: int) -> Any:
    folder = make_shape(setting)
    return deal(setting, folder, make_samples(folder, sizes(setting, samples)))


def _or_too_large(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"ok": True, "fits": True, **measure()}
    except torch.OutOfMemoryError as error:
        told = str(error).partition(". ")[0]
    free()  # behind the handler: its traceback holds what the step had computed
    return {"ok": True, "fits": False, "told": told}


def _time_pair(setting: Setting, samples: int, recompute: str, compiled: bool) -> dict[str, Any]:
    pair, data = shared_pair(setting, compiled), _data(setting, samples)
    if not compiled:
        pair.choose(recompute)
    _reset(setting)
    times = time_steps(setting, lambda mark: pair.step(data, mark))
    return _judged(setting, times, data.info, pair.text.describe_device(False))


def _time_both(setting: Setting, samples: int, recompute: str) -> dict[str, Any]:
    ours = _time_pair(setting, samples, recompute, compiled=False)
    device, info = shared_pair(setting).text.describe_device(False), _data(setting, samples).info
    free()
    folder = make_shape(setting)
    made = make_samples(folder, sizes(setting, samples))
    theirs = _or_too_large(lambda: _time_plain(setting, folder, made, recompute, info, device))
    if not theirs["fits"]:
        return ours | {"plain": theirs}
    overhead = 100 * (ours["step_ms"] / theirs["step_ms"] - 1)
    return ours | {"plain": theirs, "overhead_percent": round(overhead, 2)}


def _time_plain(
    setting: Setting, folder: str, samples: tuple[Sample, ...], recompute: str, info: StepInfo, device: DeviceInfo
) -> dict[str, Any]:
    loop = PlainLoop(setting, folder, samples, recompute != "none")
    _reset(setting)
    return _judged(setting, time_steps(setting, lambda _: loop.step()), info, device)


def _reset(setting: Setting) -> None:
    if setting.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _judged(setting: Setting, times: dict[str, float], info: StepInfo, device: DeviceInfo) -> dict[str, Any]:
    """Times, and what follows from them. Useful operations alone are counted (`dhp.models.flops`)."""
    seconds, flops = times["step_ms"] / 1e3, sum(info.flops.values())
    peak = known_peaks().get((device.name, device.format))
    return {
        **times,
        "tokens_per_s": round(info.tokens / seconds),
        "patches_per_s": round(info.vision_tokens / seconds),
        "tflop": round(flops / 1e12, 6),
        "mfu": None if peak is None else round(flops / seconds / peak, 4),
        "reserved_bytes": torch.cuda.max_memory_reserved() if setting.cuda else None,
        "allocated_bytes": torch.cuda.max_memory_allocated() if setting.cuda else None,
    }


def _tensor_bytes(trainer: Any) -> int:
    """Parameters, and the optimizer's state but its counters, where there is no allocator to ask."""
    state = (one for of in trainer.optimizer.optimizer.state.values() for one in of.values() if one.dim())
    return sum(tensor.nbytes for tensors in (trainer.model.parameters(), state) for tensor in tensors)
