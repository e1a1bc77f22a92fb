"""What a part keeps of a micro-batch, from traces of some of its layers, which stand for others that are alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp.config.parts import DECODER
from dhp.core.errors import ModelError
from dhp.core.reports import RecomputePolicies
from dhp.engine.traced import TraceSettings, trace_moments
from dhp.engine.traced_moments import Traced
from dhp.engine.traced_rows import TracedRows
from dhp.models.family import VISION, Family
from dhp.trainer.row_bytes import PartBytes, of_all_layers, trace_bytes

How = Mapping[str, Any]  # fields of TraceSettings, but for what layers recompute and which are traced


def trace_layers(
    source: str, family: Family, part: str, stands: Mapping[int, int], how: How, first_apart: bool
) -> PartBytes:
    """Of the whole part on a rank. stands: for each layer the one that is traced for it. first_apart: the first layer
    keeps less than others. Raises ModelError where the part cannot be traced."""
    try:
        return _of_some(source, family, part, stands, how, first_apart)
    except ModelError:  # layers may read what others make, as keys that they share
        if len(set(stands.values())) == len(stands):
            raise
        return _of_some(source, family, part, {at: at for at in stands}, how, first_apart)


def _of_some(
    source: str, family: Family, part: str, stands: Mapping[int, int], how: How, first_apart: bool
) -> PartBytes:
    layers = sorted(set(stands.values()))

    def trace(rows: TracedRows, choices: RecomputePolicies) -> Traced:
        return trace_moments(source, family, part, rows, TraceSettings(**how, recompute=choices, layers=layers))

    features = 64 * (VISION in family.parts)
    base = TracedRows(256, features, 64) if part == DECODER else TracedRows(0, patches=1024, windows=64)
    kinds = [family.parts[part].layers.kinds[at] for at in layers]
    return of_all_layers(trace_bytes(kinds, base, trace, first_apart), stands)
