"""Kinds of stages and of plugins: a record each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageKind:
    """part: its section of the configuration. engine: `module:class` of the engine of its ranks.

    tokens: of an encoder, the kinds of tokens (mm_token_type_ids) in whose places its rows go; text has kind 0.

    counted: the field of `dhp.core.batch.StepInfo` that says whether a step has anything for it; "": each step has."""

    part: str
    engine: str
    tokens: tuple[int, ...] = ()
    counted: str = ""


VISION = StageKind("vision", "dhp.engine.encoder_engine:EncoderEngine", tokens=(1, 2), counted="images")
AUDIO = StageKind("audio", "dhp.engine.encoder_engine:EncoderEngine", tokens=(3,), counted="clips")
DECODER = StageKind("text", "dhp.engine.text_engine:TextEngine")
KINDS = {kind.part: kind for kind in (VISION, AUDIO, DECODER)}  # in the order of the data flow


def tokens_of(part: str, kinds: Any, parts: Collection[str]) -> Any:
    """Which tokens are an encoder's: those that are no text and no other encoder's of the run. kinds: of each token,
    an array or a tensor. parts: of the run."""
    found = kinds > 0
    for other in KINDS.values():
        for token in other.tokens if other.part in parts and other.part != part else ():
            found = found & (kinds != token)
    return found


_TABLES: dict[str, Mapping[str, Any]] = {}


def takes(key: str, table: Mapping[str, Any]) -> None:
    """A table takes entries of modules. key: of the configuration, whose value names an entry."""
    _TABLES[key] = table


def registered() -> list[Any]:
    """All entries of the tables whose modules are imported by now."""
    return [entry for table in _TABLES.values() for entry in table.values()]


def names(key: str) -> tuple[str, ...]:
    """The names of a table's entries; none where its module is not imported, since then nobody added any."""
    return tuple(_TABLES.get(key, ()))
