"""Whether what a part's adapters leave out can be drawn by token: its own code on the meta device, before a run."""

from __future__ import annotations

import torch

from dhp.core.draws import TokenKeys, drawing
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import AdapterSettings
from dhp.engine.traced import TraceSettings, trace_part
from dhp.engine.traced_rows import TracedRows
from dhp.models.family import Family
from dhp.models.tower import Tower

_TOKENS = 12


def check_draws(source: str, family: Family, name: str, asked: AdapterSettings) -> None:
    """Raises ConfigError where an adapter with dropout stands beside a matrix whose rows are not the part's tokens. One
    layer of each kind is looked at. Where the part's code asks for more than shapes, its first step says so."""
    part = family.parts[name]
    tower = part if isinstance(part, Tower) else None
    if not asked.dropout or (tower and tower.tile):
        return  # rows of pictures are numbered, however many they are
    unit = tower.merge_unit if tower else 1
    kinds = part.layers.kinds
    layers = sorted({kinds.index(kind) for kind in kinds})
    settings = TraceSettings("float32", 1, ("none",) * len(layers), adapters={name: asked}, layers=layers)
    rows = TracedRows(0, patches=_TOKENS * unit) if tower else TracedRows(_TOKENS)
    keys = torch.empty(_TOKENS * unit, dtype=torch.long, device="meta")
    with drawing(TokenKeys(keys, unit)):
        try:
            trace_part(source, family, name, rows, settings)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error
        except ModelError:
            return
