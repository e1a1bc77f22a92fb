"""The parts of a model in a configuration, by name."""

from __future__ import annotations

from dataclasses import fields

from dhp.config.part import PartConfig
from dhp.config.schema import Config

DECODER = "text"  # the part after all others: it has the samples' rows and the loss
HEARING = "audio"  # the part that a run has where it may use sound


def sections(config: Config) -> dict[str, PartConfig]:
    """Sections of all parts by name, in the order of the data flow: encoders, and then the decoder."""
    every = {field.name: getattr(config, field.name) for field in fields(config)}
    found = {name: section for name, section in every.items() if isinstance(section, PartConfig)}
    return {name: section for name, section in found.items() if name != DECODER} | {DECODER: found[DECODER]}


PARTS = tuple(sections(Config()))  # names of all that a configuration can have
# Those that some models alone have: a run has such a part where its section has actors.
OPTIONAL = tuple(name for name, section in sections(Config()).items() if not section.num_actors)


def parts(config: Config) -> dict[str, PartConfig]:
    """Sections of the run's parts by name, in the order of the data flow: encoders, and then the decoder."""
    return {name: part for name, part in sections(config).items() if part.num_actors or name not in OPTIONAL}


def encoders(config: Config) -> dict[str, PartConfig]:
    """The parts before the decoder, by name."""
    return {name: section for name, section in parts(config).items() if name != DECODER}


def decoder(config: Config) -> PartConfig:
    """The last part's section. Its data replicas share the samples of a step."""
    return parts(config)[DECODER]


def model_name(config: Config) -> str:
    """The model's directory or hub id, which all parts of a resolved configuration have in common."""
    return decoder(config).model_name
