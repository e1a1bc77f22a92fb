"""Rows: milliseconds of two real layers of one part, forward and backward, and what of the device's peak they use."""

from __future__ import annotations

from typing import Any

from dhp.base.messages import DeviceInfo
from dhp.base.passes import NO_BACKWARD
from dhp.observe.mfu import known_peaks
from experiments.gpu_check.setting import Setting, Spent, spend
from experiments.gpu_check.two_layers import OnePart, sizes
from experiments.pair import TEXT, VISION


def check(setting: Setting, part: str, samples: int, recompute: str) -> dict[str, Any]:
    """Fails on no number: they are for people to read. Useful operations alone are counted (`dhp.models.flops`)."""
    wanted = sizes(setting, samples)
    one = OnePart(setting, part, recompute, wanted)
    forward, backward, _ = spend(setting, one.forward, one.backward, one.forget)
    info = one.data.info
    device = one.trainer.describe_device(False)
    whole, ahead = info.flops[part], _forward_flops(one, part)
    return {
        "ok": True,
        "rows": info.vision_tokens if part == VISION else info.tokens,
        "tflop": round(whole / 1e12, 4),
        **_told("forward", forward, ahead, device),
        **_told("backward", backward, whole - ahead, device),
    }


def _forward_flops(one: OnePart, part: str) -> int:
    family, info = one.trainer.family, one.data.info
    if part == TEXT:
        return family.decoder.work.flops(one.data.work[TEXT][0][0].lengths, info.target_tokens, passes=NO_BACKWARD)
    return family.tower.work.flops([family.tower.image_layout(one.sizes.grid)] * info.images, passes=NO_BACKWARD)


def _told(name: str, spent: Spent, flops: int, device: DeviceInfo) -> dict[str, Any]:
    speed = flops / (spent.ms * 1e-3)
    peak = known_peaks().get((device.name, device.format))
    share = {} if peak is None else {f"{name}_share_of_peak": round(speed / peak, 4)}
    return spent.told(name) | {f"{name}_tflops": round(speed / 1e12, 4)} | share
