"""Parts of a configuration by name, and resolved values."""

import re
from dataclasses import fields
from typing import TypeVar

from dhp.config.data import DataConfig
from dhp.config.schema import Config, PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError

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


Value = TypeVar("Value")


def resolved(value: Value | None) -> Value:
    """The value. Raises ValueError for one that `dhp.config.resolve` has not filled in."""
    if value is None:
        raise ValueError("the configuration was not resolved: dhp.config.resolve.resolve fills in what is unset")
    return value


_SHARE = re.compile(r"(.+)%([^%]*)")


def split_share(text: str) -> tuple[str, float]:
    """The dataset's name, and the share of its samples that is used, 0 < share <= 1. Raises ConfigError."""
    found = _SHARE.fullmatch(text)
    if found is None:
        return text, 1.0
    name, percent = found.groups()
    if not re.fullmatch(r"\d+(\.\d+)?", percent) or not 0 < float(percent) <= 100:
        raise ConfigError(
            f"data.datasets: {text} asks for {percent or 'no number of'} percent of {name}, but 0 < percent <= 100; "
            f"write {name}%50 for half of it. More than once is data.data_registry.{name}.weight"
        )
    return name, float(percent) / 100


def read_datasets(data: DataConfig) -> list[str]:
    """Names in the registry of all datasets that a run reads, to train on and to evaluate, each once."""
    return list(dict.fromkeys(split_share(text)[0] for text in (*data.datasets, *data.eval_datasets)))


def degrees(part: PartConfig) -> Degrees:
    """The degrees of each stage of a resolved part."""
    return Degrees.read(lambda axis: resolved(getattr(part, axis)))
