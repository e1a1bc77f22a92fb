"""The space of a search: configuration, model, machine, samples, checks."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dhp.config.layout import DEGREES, resolve_part
from dhp.config.parts import DECODER, model_name, parts, sections
from dhp.config.ranges import resolve_lora
from dhp.config.resolve import check_together, resolve
from dhp.config.schema import Config
from dhp.core.errors import DhpError
from dhp.models.family import Family
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.samples import Samples
from dhp.plan.model_checks import check_fit, having_parts
from dhp.plan.search.free_keys import DEVICES, PASSES, ROWS, SCHEDULE, FixedKeys, freed, one_actor_each
from dhp.plan.search.layouts import PartLayout, PlanChecks, Refused
from dhp.plan.search.scorer import Rows, Scorer, Scores
from dhp.plan.trainable import adapters_of, check_frozen_part, trained_stage, training_rules
from dhp.tiny.tiny_model import make_tiny


class WholeRun:
    """One composed configuration, into which layouts of its parts are put.

    counted: the model. plans: None where the plans of tensor parallelism are not to be checked, which takes a second
    for the first layout.

    What needs samples, weights or a search for cuts is left to the run: `dhp.trainer.preflight.prepare`."""

    def __init__(self, config: Config, counted: Counted, plans: PlanChecks | None = None):
        self._config, self._counted, self._plans = config, counted, plans
        self._family = counted.family
        self._resolved: Config | None = None

    def composed(self, layouts: Mapping[str, PartLayout]) -> Config:
        """The configuration with these layouts, by part, not resolved."""
        own: dict[str, Any] = {
            name: replace(sections(self._config)[name], **layout.settings) for name, layout in layouts.items()
        }
        return replace(self._config, **own)

    def refusal(self, layouts: Mapping[str, PartLayout]) -> str | None:
        """The message with which a run with these layouts would end before it starts; None: none. A part that is not
        among them is as it was composed.

        The first time the configuration is resolved as a whole; then its parts alone are, and the rules checked."""
        try:
            config = self._with(layouts)
            family = having_parts(config, self._family)
            check_fit(config, family)
            for name, part in parts(config).items():
                refusal = self._plans.refusal(name, part) if self._plans else None
                if refusal:
                    return refusal
                if part.zero_stage:  # or the model would be made for nothing
                    check_frozen_part(name, part, self.trained[name])
        except DhpError as error:
            return str(error)
        return None

    @cached_property
    def trained(self) -> dict[str, bool]:
        """By part, whether something of it is trained. Where `training` selects parameters, the model is made without
        weights, which takes a second."""
        trains = trained_stage(self._counted.rules, lambda: self._counted.parameters)
        return {name: trains(name, ()) for name in self.family.parts}

    @property
    def family(self) -> Family:
        """Having the run's parts."""
        return having_parts(self._config, self._family)

    def resolved(self, config: Config, layouts: Mapping[str, PartLayout]) -> Config:
        """A composed configuration with these layouts in it, resolved and checked. Raises ConfigError."""
        if self._resolved is None:
            self._resolved = resolve(self.composed(layouts))
        model = model_name(self._resolved)
        own: dict[str, Any] = {name: replace(one.section, model_name=model) for name, one in layouts.items()}
        asked, training = config.training, self._resolved.training
        training = replace(
            training, micro_batch_size=asked.micro_batch_size, schedule=asked.schedule, vision_batch=asked.vision_batch
        )
        config = replace(self._resolved, cluster=config.cluster, training=training, **own)
        check_together(config)
        check_fit(config, self.family)
        return config

    def _with(self, layouts: Mapping[str, PartLayout]) -> Config:
        """Resolved and checked. Raises ConfigError."""
        if self._resolved is None:
            self._resolved = resolve(self.composed(layouts))
            return self._resolved
        model = model_name(self._resolved)
        own: dict[str, Any] = {
            name: replace(layouts[name].section if name in layouts else resolve_part(name, part), model_name=model)
            for name, part in parts(self._config).items()
        }
        config = replace(self._resolved, **own)
        check_together(config)
        return config


_ROWS = (1, 2, 4, 8)  # samples of a row that are tried
_PASSES = (4,)  # micro-batches of a tower's pass that are tried beside one and all


@dataclass(frozen=True)
class Scored:
    """Layouts of both parts on so many devices. scores: of the decoder and the tower, if there is one, by division of a
    step; count: of all of them. refused: what cannot be."""

    scores: tuple[tuple[Scores, Scores | None], ...]
    refused: tuple[Refused, ...]
    count: int


@dataclass(frozen=True)
class Space:
    """What is searched. config: composed, not resolved. held: keys of each part that stay (`held_keys`); rows_held:
    training.micro_batch_size stays; schedule_held, devices_held, passes_held: training.schedule, cluster.collocate,
    training.vision_batch.

    known, scored: what was made before, which spaces share that differ in devices and their memory alone."""

    config: Config
    whole: WholeRun
    counted: Counted
    machine: Machine
    samples: Samples
    held: Mapping[str, Collection[str]]
    rows_held: bool = False
    schedule_held: bool = False
    devices_held: bool = False
    passes_held: bool = False
    known: dict[object, RunLoads] = field(default_factory=dict, compare=False)
    scored: dict[tuple[int, int | None], Scored] = field(default_factory=dict, compare=False)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.counted, self.machine, self.loads)

    def divisions(self) -> Iterator[Rows]:
        """Of a step's batch."""
        training = self.config.training
        for size in (training.micro_batch_size,) if self.rows_held else _ROWS:
            for replicas in range(1, self.machine.count + 1):
                if training.batch_size % (size * replicas) == 0:
                    count = training.batch_size // (size * replicas)
                    yield from (Rows(size, replicas, count, batch) for batch in self._batches(count))

    def _batches(self, micro_batches: int) -> list[int]:
        """How many micro-batches a pass of the tower may have."""
        if self.passes_held or len(parts(self.config)) == 1:
            return [min(micro_batches, self.config.training.vision_batch or micro_batches)]
        return sorted({1, micro_batches, *(batch for batch in _PASSES if batch < micro_batches)})

    def loads(self, layout: PartLayout, rows: Rows) -> RunLoads:
        """Of a division, quickly."""
        packing = self.config.data.packing or (layout.part == DECODER and layout.degrees.sequence > 1)
        key = (rows, packing)
        if key not in self.known:
            text = replace(sections(self.config)[DECODER], **_replicas(rows.replicas))
            training = replace(self.config.training, micro_batch_size=rows.micro_batch_size, vision_batch=rows.batch)
            data = replace(self.config.data, packing=packing)
            config = replace(self.config, text=text, training=training, data=data)
            self.known[key] = self.samples.loads(config, quick=True)
        return self.known[key]


def _replicas(count: int) -> dict[str, Any]:
    return {**dict.fromkeys(DEGREES, 1), "parallelism": "data", "num_actors": count, "data": count}


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


def make_space(
    subject: Subject, held: FixedKeys, machine: Machine, samples: Samples, say: Callable[[str], None]
) -> Space:
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


def keys_of_run(held: FixedKeys) -> dict[str, Any]:
    """What a search keeps that is of no part, as `Space` has it."""
    keys = {"rows_held": ROWS, "schedule_held": SCHEDULE, "devices_held": DEVICES, "passes_held": PASSES}
    return {name: key in held.keys for name, key in keys.items()}
