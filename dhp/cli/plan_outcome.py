"""Finds all that `dhp plan` shows, before formatting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from dhp.cli.plan_request import PlanRequest, find_machine, find_samples, measured_device, with_memory
from dhp.config.devices import GIB, known_devices
from dhp.config.parts import DECODER, encoders, parts
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.registry import import_plugins
from dhp.plan.batches import unreached
from dhp.plan.bench.machine import Machine
from dhp.plan.count.loads import window_length
from dhp.plan.count.samples import Samples
from dhp.plan.search.candidates import Candidate
from dhp.plan.search.free_keys import FixedKeys, freed
from dhp.plan.search.inverse import (
    Ways,
    devices_in_time,
    fewest_devices,
    largest_rows,
    longest_row,
    samples_a_step,
    smallest_memory,
)
from dhp.plan.search.layout_search import Found, search
from dhp.plan.search.needs import Needs, needs_of, useful_operations
from dhp.plan.search.run_devices import measured_here
from dhp.plan.search.space import Space, WholeRun, keys_of_run, make_space, read_subject
from dhp.plan.search.verdict import TooLarge, equations, too_large

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

BYTES_ERROR = 0.03  # of a forecast's bytes
SECONDS_ERROR = 0.13  # of its seconds, by data sheets


@dataclass(frozen=True)
class PlanQuery:
    """One question. config: composed. named: the configuration, in a word."""

    config: Config
    named: str
    request: PlanRequest
    held: FixedKeys
    measure: bool = False


@dataclass(frozen=True)
class Outcome:
    """config: what the search was given. notes: what is assumed. table: lengths of the samples, where they are known.
    seconds: that the search took. samples_s: of the best layout. changes: single ones with which something fits, where
    nothing does."""

    asked: PlanQuery
    config: Config
    space: Space
    notes: tuple[str, ...]
    samples: Samples
    table: Table | None
    found: Found
    seconds: float
    ways: Ways
    needs: Needs | None
    large: tuple[TooLarge, ...]
    changes: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine:
        return self.space.machine

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return next(iter(self.found.candidates), None)

    @property
    def samples_of_epoch(self) -> int | None:
        """None: not known."""
        return self.asked.request.samples or self.samples.count

    @property
    def parameters(self) -> int:
        """Of the model, adapters' too."""
        return sum(one.size for one in self.space.counted.parameters)

    def sure(self, one: Candidate) -> bool:
        """Whether it fits by more than a forecast's own error."""
        return one.margin_bytes >= BYTES_ERROR * one.limit_bytes

    def used(self, one: Candidate) -> dict[str, float]:
        """By part and in `total`, the share of the devices' peak that useful operations take; nothing
        where the peak is not known."""
        counted = self.space.counted
        window = window_length(counted.family) if encoders(one.plan.config) else 0.0
        done = useful_operations(one.plan, one.found.loads, window)
        if self.machine.name not in known_devices():
            return {}
        peaks = known_devices()[self.machine.name].peaks
        each = max(peaks[part.dtype].value for part in parts(one.plan.config).values())
        most = each * self.machine.count * one.found.step_s
        return {name: own / most for name, own in {**done, "total": sum(done.values())}.items()}


def find_plan(asked: PlanQuery, say: Callable[[str], None]) -> Outcome:
    """Search, and answer the further questions. Raises ConfigError, ModelError, DataError, and ConfigError where no
    layout can be, with the equations of the run's checks."""
    config = asked.config
    if config.stages:
        raise ConfigError(
            f"{asked.named} has stages ({', '.join(config.stages)}), which differ in what is trained and in their "
            "data: plan each by itself, as a FILE.yaml without `stages` and with that stage's settings"
        )
    import_plugins(config.plugins)
    machine, notes = find_machine(asked.request, config)
    subject = read_subject(config, say)
    samples, table, _ = find_samples(asked.request, subject.plain, subject.family, say)
    if asked.measure:
        here = measured_device(asked.request)
        machine = measured_here(machine, subject.plain, subject.family, subject.source, samples, here, say)
        machine = with_memory(asked.request, machine)
        notes = [note for note in notes if not note.startswith("device=")]
    space = make_space(subject, asked.held, machine, samples, say)
    notes += unreached(subject.plain, samples.lengths)
    return _answered(asked, space, tuple(notes), samples, table, say)


def _answered(
    asked: PlanQuery,
    space: Space,
    notes: tuple[str, ...],
    samples: Samples,
    table: Table | None,
    say: Callable[[str], None],
) -> Outcome:
    say("searching layouts")
    begun = time.perf_counter()
    found = search(space)
    seconds = time.perf_counter() - begun
    best = next(iter(found.candidates), None)
    if best is None and found.tight is None:
        raise ConfigError(_nothing_can_be(asked, space, found))
    say("asking for fewer devices, longer samples, less memory")
    ways = _ways(asked, space, best, found, samples)
    needs = None if best is None else needs_of(best, space.counted, space.machine, samples_a_step(space, best))
    large = () if best is None else tuple(too_large(space, best))
    changes = () if best is not None else tuple(_changes(asked, space, ways))
    return Outcome(asked, space.config, space, notes, samples, table, found, seconds, ways, needs, large, changes)


def _ways(asked: PlanQuery, space: Space, best: Candidate | None, found: Found, samples: Samples) -> Ways:
    hours, count = asked.request.hours, asked.request.samples or samples.count
    if hours is not None and count is None:
        raise ConfigError(f"hours={hours} is for so many samples: say how many, as samples=1000000")
    in_time = None if hours is None or count is None else devices_in_time(space, best, count, hours)
    fewest, smallest = fewest_devices(space, best), found.tight or smallest_memory(space)
    if best is None:
        return Ways(fewest, smallest, in_time)
    return Ways(fewest, smallest, in_time, longest_row(space, best), largest_rows(space, best))


def _nothing_can_be(asked: PlanQuery, space: Space, found: Found) -> str:
    count = space.machine.count
    reasons = "".join(f"\n  {reason}" for reason in [*_indivisible(space), *equations(found)])
    held = f" with {', '.join(asked.held.keys)} held" if asked.held.keys else ""
    return (
        f"no layout of {asked.named} on {count} devices can be{held}: the run's own checks say"
        f"{reasons or ' nothing more'}\n"
        "Free some keys (free=KEY,… or free=all), or take another number of devices (devices=N)"
    )


def _indivisible(space: Space) -> Iterator[str]:
    """The equation of a batch that cannot be divided as it has to be."""
    training, replicas = space.config.training, space.config.text.data
    held = "data" in space.held.get(DECODER, ())
    if not any(rows.replicas == replicas or not held for rows in space.divisions()):
        size = training.micro_batch_size if space.rows_held else 1
        each = size * ((replicas or 1) if held else 1)
        yield (
            f"training.batch_size({training.batch_size}) % (micro_batch_size({size}) × text.data({each // size})) = "
            f"{training.batch_size % each} != 0"
        )


def _changes(asked: PlanQuery, space: Space, ways: Ways) -> list[str]:
    """Single changes with which something fits: keys that are held, the form of states, moments in host memory."""
    found = []
    for key in asked.held.keys:
        free = FixedKeys(tuple(one for one in asked.held.keys if one != key))
        if _fits(asked, space, asked.config, free):
            found.append(f"free={key}")
    for key, value in (("state_bytes", 12), ("host_moments", True)):
        for name, part in parts(asked.config).items():
            section: dict[str, Any] = {key: value}
            own: dict[str, Any] = {name: replace(part, **section)}
            if getattr(part, key) != value and _fits(asked, space, replace(asked.config, **own), asked.held):
                found.append(f"{name}.{key}={str(value).lower()}")
    if ways.devices is not None:
        found.append(f"devices={ways.devices.plan.graph.device_count()}")
    return [*found, *_more_memory(asked, space, ways)]


def _more_memory(asked: PlanQuery, space: Space, ways: Ways) -> Iterator[str]:
    """Less reserve, or the smallest device of the table that has room."""
    if ways.smallest is None:
        return
    machine, peak = space.machine, ways.smallest.found.peak.total
    if peak < machine.memory_bytes:
        yield f"reserve={int(100 * (1 - peak / machine.memory_bytes)) / 100:g}"
    if asked.request.memory_gib is not None:
        yield f"memory_gib={ceil(100 * peak / (1 - machine.reserve) / GIB) / 100:g}"
        return
    wide = [one for one in known_devices().values() if one.memory.value * (1 - machine.reserve) >= peak]
    if wide:
        yield f"device={min(wide, key=lambda one: one.memory.value).name}"


def _fits(asked: PlanQuery, space: Space, config: Config, held: FixedKeys) -> bool:
    given = freed(config, held)
    whole = WholeRun(given, space.counted)
    try:
        other = replace(
            space, config=given, whole=whole, held=held.layouts(config), known={}, scored={}, **keys_of_run(held)
        )
        return bool(search(other, 1).candidates)
    except ConfigError:
        return False
