"""Derives costs of layers from measured steps."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.config.steps import vision_batch
from dhp.core.reports import LayerUsage, StageReport, StageUsage
from dhp.plan.count.costs import LayerCost, StageCosts

# Costs of a layer that `LayerUsage` reports under the same names: the most of bytes, the median of seconds.
BYTES = tuple(field.name for field in fields(LayerCost) if field.name.endswith("_bytes"))
SECONDS = tuple(field.name for field in fields(LayerCost) if field.name.endswith("_s"))
HELD = "held_bytes"


def fullest(usages: Sequence[StageUsage]) -> StageUsage:
    """The rank of a part whose usage decides: the one with the largest peak."""
    return max(usages, key=lambda usage: usage.peak_bytes)


class Profile:
    """Measurements of one part. Bytes and seconds are stored per patch or token."""

    def __init__(self, known: StageCosts | None = None, counted: bool = False):
        """known: what an earlier run saw. counted: it was counted, and its seconds stay."""
        self._counted = counted
        self._known = known
        self._rows = self._all_rows = 0 if known is None else known.rows
        self._before = 0.0 if known is None else known.before_bytes / known.rows
        self._after = 0.0 if known is None else known.after_bytes / known.rows
        self._kinds: tuple[str, ...] = () if known is None else known.kinds
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        self._seconds: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(self, usage: StageUsage, timed: bool) -> None:
        """A step that ran. timed: its seconds say something, which those of a first step do not."""
        self._rows, self._all_rows = max(self._rows, usage.rows), max(self._all_rows, usage.all_rows)
        self._kinds = tuple(layer.kind for layer in usage.layers)
        least = _least_held(usage.layers)
        more = sum(layer.held_bytes - least[layer.kind, layer.choice] for layer in usage.layers)
        self._before = max(self._before, (usage.before_bytes + more) / usage.rows)
        self._after = max(self._after, usage.after_bytes / usage.rows)
        for layer in usage.layers:
            key = (layer.kind, layer.choice)
            seen, seconds = self._seen.setdefault(key, {}), self._seconds.setdefault(key, {})
            for name in BYTES:
                taken = least[key] if name == HELD else getattr(layer, name)
                seen[name] = max(seen.get(name, 0.0), taken / usage.rows)
            for name in SECONDS if timed else ():
                seconds.setdefault(name, []).append(getattr(layer, name) / usage.all_rows)

    def costs(self) -> StageCosts | None:
        """Costs of the layers with the largest micro-batch, and the largest step, seen; None before any step."""
        if not self._rows:
            return None
        layers: dict[str, dict[str, LayerCost]] = {kind: {} for kind in self._kinds}
        scale = 1.0 if self._known is None else self._rows / self._known.rows
        for kind, costs in ({} if self._known is None else self._known.layers).items():
            for choice, cost in costs.items():
                grown = {name: getattr(cost, name) * scale for name in BYTES}
                layers[kind][choice] = replace(cost, **grown)
        for (kind, choice), seen in self._seen.items():
            known, timed = layers[kind].get(choice), self._seconds[kind, choice]
            seconds = {name: median(timed[name]) * self._all_rows if name in timed else 0.0 for name in SECONDS}
            if known is not None:
                kept = SECONDS if self._counted else [name for name in SECONDS if name not in timed]
                seconds |= {name: getattr(known, name) for name in kept}
            layers[kind][choice] = LayerCost(**{name: value * self._rows for name, value in seen.items()}, **seconds)
        return StageCosts(self._rows, self._kinds, self._before * self._rows, self._after * self._rows, layers)


def _least_held(layers: Sequence[LayerUsage]) -> dict[tuple[str, str], int]:
    """By kind and choice, what each such layer holds. What one holds beyond others alike is not its kind's: positions
    that the first one makes for all, or what mergers keep that run behind an inner layer of a tower."""
    least: dict[tuple[str, str], int] = {}
    for layer in layers:
        key = (layer.kind, layer.choice)
        least[key] = min(layer.held_bytes, least.get(key, layer.held_bytes))
    return least


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
    if vision_batch(config) > 1:
        sizes["vision_batch"] = vision_batch(config)
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
