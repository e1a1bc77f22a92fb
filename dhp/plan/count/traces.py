"""What each part of a run keeps of a micro-batch, traced without its weights (`dhp.plan.count.traced`)."""

from __future__ import annotations

from dhp.config.layout import read_choices
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.rules import read_kernels
from dhp.config.schema import Config
from dhp.core.axes import Degrees
from dhp.core.parameters import TrainingRules
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.models.family import Family
from dhp.plan.count.decoder_units import assumed_rows
from dhp.plan.count.traced import TracedRows
from dhp.plan.trainable import adapters_of

_WINDOWS = 64  # of the assumed picture


def traced(
    config: Config,
    family: Family,
    source: str,
    name: str,
    rules: TrainingRules,
    trained_before: bool,
    choices: RecomputePolicies | None = None,
) -> StageUsage:
    """Bytes that a rank of the part keeps of an assumed micro-batch (`assumed_rows`). choices: what its layers
    recompute; None: as the configuration has it, everything with auto. Raises ModelError where it is not known."""
    from dhp.plan.count.traced import (
        TraceSettings,  # imports torch, and modeling code
        trace_part,
    )

    section = parts(config)[name]
    written = read_choices(resolved(section.recompute), len(family.parts[name].layers.kinds))
    settings = TraceSettings(
        dtype=section.dtype,
        tensor=resolved(section.tensor),
        recompute=written if choices is None else choices,
        trains=rules.trains,
        receives_gradients=trained_before,
        adapters=adapters_of(config),
        mlp_chunks=section.mlp_chunks,
        sequence_sharded_norms=section.sequence_sharded_norms,
        objective=config.training.objective,
        kernels=read_kernels(name, section.kernels),
    )
    return trace_part(source, family, name, traced_rows(config, family, name), settings)


def traced_rows(config: Config, family: Family, name: str) -> TracedRows:
    """Of one rank: an encoder's replicas share a step's pictures, and the ranks of a sequence its rows."""
    assumed, sections = assumed_rows(config), parts(config)
    degrees = Degrees.read(lambda axis: resolved(getattr(sections[name], axis)))
    unit = family.tower.merge_unit
    replicas = resolved(sections[DECODER].data) / degrees.data if name != DECODER else 1
    share = replicas * assumed.samples / degrees.sequence
    pictures = _whole_windows(share * assumed.pictures)
    return TracedRows(
        tokens=max(1, round(share * assumed.tokens)),
        features=pictures,
        targets=max(1, round(share * assumed.targets)),
        patches=pictures * unit,
        windows=_WINDOWS,
    )


def picture_patches(config: Config, family: Family) -> int:
    """Patches of the assumed picture; 0 where there is none."""
    return _whole_windows(assumed_rows(config).pictures) * family.tower.merge_unit


def _whole_windows(tokens: float) -> int:
    """So many tokens of pictures, as windows of equal size."""
    return max(1, round(tokens / _WINDOWS)) * _WINDOWS if tokens else 0
