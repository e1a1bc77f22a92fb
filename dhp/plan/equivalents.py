"""What a configuration asks for that a model has not, where another layout does the same: it is taken, and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dhp.config.layout import resolve_part
from dhp.config.parts import parts, resolved
from dhp.config.rules import DEEPSPEED
from dhp.config.schema import Config
from dhp.models.family import Family


def take_whole_pictures(config: Config, family: Family) -> tuple[Config, tuple[str, ...]]:
    """The resolved configuration, and what to say. A ring of a tower that takes pictures whole: no sequence is divided,
    and its ranks share the pictures, as those of Ulysses do."""
    notes = []
    for name, part in parts(config).items():
        ring, ulysses = resolved(part.ring), resolved(part.ulysses)
        if name not in family.encoders or ring == 1 or not family.encoders[name].shares_whole:
            continue
        together = replace(part, ring=1, ulysses=ring * ulysses)
        notes.append(
            f"{name}.ring={ring} of a {family.config.model_type} model, whose tower takes each picture whole: its "
            f"actors share the pictures, as with {name}.ring=1 and {name}.ulysses={ring * ulysses}, which is taken"
        )
        of_part: dict[str, Any] = {name: resolve_part(name, together)}
        config = replace(config, **of_part)
    return config, tuple(notes)


def take_no_states(config: Config, trains: Mapping[str, bool]) -> tuple[Config, tuple[str, ...]]:
    """The same for ZeRO's stages 1 and 2 of a part of which nothing is trained: they cut what training keeps, and it
    keeps nothing. trains: by part, whether something of it is trained."""
    notes = []
    for name, part in parts(config).items():
        if part.zero_stage not in (1, 2) or trains[name]:
            continue
        notes.append(
            f"{name}.zero_stage={part.zero_stage} with nothing of {name} trained: there are no gradients and states "
            f"that it would cut, and {name}.zero_stage=0 is taken"
        )
        kind = "data" if part.parallelism == DEEPSPEED else part.parallelism
        of_part: dict[str, Any] = {name: replace(part, zero_stage=0, parallelism=kind)}
        config = replace(config, **of_part)
    return config, tuple(notes)
