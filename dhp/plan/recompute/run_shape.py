"""What measurements of a run depend on, and what of a stage's reports counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.core.reports import StageReport, StageUsage
from dhp.plan.recompute.profile import fullest


def usage_of(reports: Sequence[StageReport]) -> StageUsage | None:
    """The usage of a stage's fullest rank; None when none had work."""
    usages = [report.usage for report in reports if report.usage is not None]
    return fullest(usages) if usages else None


def run_shape(
    config: Config, device: str, model: Mapping[str, Any], fixed: Mapping[str, Any], world: Mapping[str, Any]
) -> dict[str, Any]:
    """All that decides what a layer costs: runs that agree in it share their measurements. fixed: what each part
    recomputes where the configuration says it; world: its actors and degrees."""
    sizes = {"micro_batch_size": config.training.micro_batch_size, "packing": config.data.packing}
    pixels = {
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
        "max_tiles": config.data.max_tiles,
    }
    sections = parts(config)
    return {
        "model": {key: _plain(value) for key, value in model.items() if key.endswith(("model_type", "_config"))},
        "world": dict(world),
        "trained": {"trainable": list(config.training.trainable), "frozen": list(config.training.frozen)},
        "parallelism": {name: part.parallelism for name, part in sections.items()},
        "mlp_chunks": {name: part.mlp_chunks for name, part in sections.items()},
        "sharded_norms": {name: part.sequence_sharded_norms for name, part in sections.items()},
        "dtype": {name: part.dtype for name, part in sections.items()},
        "fixed": {name: list(choices) for name, choices in fixed.items()},
        "datasets": list(config.data.datasets),
        "device": device,
        **sizes,
        **pixels,
        "video": [config.data.video_fps, config.data.video_max_frames, config.data.video_max_pixels],
    }


def _plain(value: Any) -> Any:
    """Numbers, text and lists of a model's configuration; what else it holds says nothing of its shape."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if not str(key).startswith("_")}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
