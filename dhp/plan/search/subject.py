"""What a search for layouts is about: a composed configuration, its model, and the space of its layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhp.config.parts import parts
from dhp.config.ranges import resolve_lora
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.models.family import Family
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.samples import Samples
from dhp.plan.model_checks import having_parts
from dhp.plan.search.free_keys import DEVICES, ROWS, SCHEDULE, Held, freed, one_actor_each
from dhp.plan.search.space import Space, WholeRun
from dhp.plan.trainable import adapters_of, training_rules
from dhp.tiny.tiny_model import make_tiny


@dataclass(frozen=True)
class Subject:
    """config: composed. plain: the same on one device, resolved. source: of the model's configuration. family: of the
    model, having the run's parts."""

    config: Config
    plain: Config
    source: str
    family: Family


def read_subject(config: Config, say: Callable[[str], None]) -> Subject:
    """The model of a composed configuration; the tiny one is made where it is asked for. Raises ConfigError and
    ModelError."""
    if config.tiny_assets is not None:
        make_tiny(config, config.tiny_assets, say)
    plain = resolve(one_actor_each(config))
    source = config_source(plain.text.model_name)
    return Subject(config, plain, source, having_parts(config, load_family(source)))


def make_space(subject: Subject, held: Held, machine: Machine, samples: Samples, say: Callable[[str], None]) -> Space:
    """All layouts of the configuration that keep what is held. Raises ConfigError and ModelError."""
    config, family = subject.config, subject.family
    own: dict[str, Any] = {name: replace(part, lora=resolve_lora(part.lora)) for name, part in parts(config).items()}
    adapters = adapters_of(replace(config, **own))
    rules = training_rules(config.training, family, adapters)
    cache = Path(subject.plain.data.cache_dir or "")
    counted = Counted(
        family, subject.source, rules, adapters, config.training.objective, cache, say, config.training.optimizer
    )
    given = freed(config, held)
    whole = WholeRun(given, counted)
    return Space(given, whole, counted, machine, samples, held.layouts(config), **keys_of_run(held))


def keys_of_run(held: Held) -> dict[str, Any]:
    """What a search keeps that is of no part, as `Space` has it."""
    keys = {"rows_held": ROWS, "schedule_held": SCHEDULE, "devices_held": DEVICES}
    return {name: key in held.keys for name, key in keys.items()}
