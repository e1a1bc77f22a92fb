"""A plan as files: a configuration that trains with the chosen layout, JSON, a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from dhp.cli.plan_outcome import BYTES_ERROR, SECONDS_ERROR, Outcome
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.devices import GIB
from dhp.config.layout import GIVEN
from dhp.config.schema import Config
from dhp.config.shipped import shipped_directory
from dhp.core.errors import ConfigError
from dhp.core.files import write_whole
from dhp.trainer.forecast.candidates import Candidate
from dhp.trainer.forecast.explain import loses_by
from dhp.trainer.forecast.freed import with_settings

_OF_EACH_RUN = ("run_dir",)  # its default has the time in it


def write_configuration(outcome: Outcome, source: tuple[str | None, str | None], path: Path) -> None:
    """A configuration with the best layout, which `python -m dhp.train_ray` runs: over the given one, where Hydra finds
    that from the file's folder, else whole. source: name and folder of the given one; (None, None): that of a run.
    Raises ConfigError."""
    best = outcome.best
    if best is None:
        raise ConfigError(f"--write={path}: no layout fits, so that there is none to write")
    name, folder = source
    given = outcome.asked.config
    settings = with_settings(given, outcome.asked.held, best.settings)
    settings |= {"layout": GIVEN} if given.layout != GIVEN else {}
    base = Path(folder or shipped_directory()).resolve()
    if path.suffix != ".yaml":
        raise ConfigError(f"--write={path}: a configuration's name ends with .yaml; write {path.stem}.yaml")
    if name is not None and base == path.parent.resolve() and path.stem == name:
        raise ConfigError(f"--write={path} is the configuration that is planned; give another name")
    if name is not None and base in (path.parent.resolve(), shipped_directory().resolve()):
        values = {**_differences(given, compose_config(name, folder)), **settings}
        text = f"defaults:\n  - {name}\n  - _self_\n\n{_yaml(values)}"
    else:
        values = yaml.safe_load(to_yaml(given))
        for key in _OF_EACH_RUN:
            values.pop(key, None)
        for key, value in settings.items():
            *sections, leaf = key.split(".")
            (values[sections[0]] if sections else values)[leaf] = value
        text = yaml.safe_dump(values, sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _comment(outcome, best) + text)


def _comment(outcome: Outcome, best: Candidate) -> str:
    found = best.found
    return (
        f"# Chosen by `python -m dhp plan` on {date.today()} for {outcome.machine}: {found.step_s:.3g} s a step, "
        f"{found.peak.total / GIB:.1f} GiB\n# of a device's {outcome.machine.memory_bytes / GIB:.1f}, predicted for "
        f"{outcome.samples}.\n"
    )


def _differences(config: Config, plain: Config) -> dict[str, Any]:
    """Keys that overrides changed, by their whole names."""
    changed: dict[str, Any] = {}
    ours, theirs = (yaml.safe_load(to_yaml(one)) for one in (config, plain))
    _compare(ours, theirs, "", changed)
    return {key: value for key, value in changed.items() if key not in _OF_EACH_RUN}


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str, changed: dict[str, Any]) -> None:
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict) and value and other:
            _compare(value, other, f"{path}{key}.", changed)
        elif value != other:
            changed[f"{path}{key}"] = value


def _yaml(values: Mapping[str, Any]) -> str:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return yaml.safe_dump(nested, sort_keys=False)


def as_values(outcome: Outcome) -> dict[str, Any]:
    """The plan as values of JSON."""
    machine, found, best = outcome.machine, outcome.found, outcome.best
    shown = best or found.tight
    worst = None if shown is None else asdict(shown.found.loads.worst)
    return {
        "model": outcome.asked.named,
        "devices": {"count": machine.count, "nodes": machine.nodes, "name": machine.name, "notes": list(outcome.notes)},
        "data": {"samples": outcome.samples_of_epoch, "about": str(outcome.samples), "worst": worst},
        "limit_gib": machine.limit_bytes / GIB,
        "held": list(outcome.asked.held.keys),
        "searched": found.scored,
        "fit": found.fit,
        "seconds": outcome.seconds,
        "layouts": [_layout(outcome, one, rank) for rank, one in enumerate(found.candidates, 1)],
        "does_not_fit": [
            {
                "config": dict(one.candidate.settings),
                "over_gib": -one.candidate.margin_bytes / GIB,
                "change": one.change,
            }
            for one in outcome.large
        ],
        "refused": [{"config": dict(one.settings), "equation": one.reason} for one in found.refused],
        "inverse": _inverse(outcome),
        "needs": None if outcome.needs is None else asdict(outcome.needs),
        "constants": {name: asdict(figure) for name, figure in machine.figures.items()},
        "uncertainty": {"bytes": BYTES_ERROR, "seconds": SECONDS_ERROR},
    }


def _layout(outcome: Outcome, one: Candidate, rank: int) -> dict[str, Any]:
    found, best = one.found, outcome.found.candidates[0].found
    return {
        "rank": rank,
        "fits": one.fits,
        "sure": outcome.sure(one),
        "margin_gib": one.margin_bytes / GIB,
        "step_s": {"total": found.step_s, **found.kinds()},
        "memory_gib": {
            **{name: size / GIB for name, size in found.peak.taken.items()},
            "total": found.peak.total / GIB,
        },
        "moment": found.peak.name,
        "tokens_per_s": found.tokens_s,
        "tokens_per_s_device": found.tokens_s / outcome.machine.count,
        "mfu": outcome.used(one),
        "micro_batches": found.micro_batches,
        "config": dict(one.settings),
        "loses": {"s": found.step_s - best.step_s, "why": loses_by(found, best) if rank > 1 else ""},
    }


def _inverse(outcome: Outcome) -> dict[str, Any]:
    ways = outcome.ways

    def short(one: Candidate | None) -> dict[str, Any] | None:
        if one is None:
            return None
        size = one.found.peak.total / GIB
        count = one.plan.graph.device_count()
        return {"devices": count, "step_s": one.found.step_s, "gib": size, "config": dict(one.settings)}

    return {
        "fewest_devices": short(ways.devices),
        "devices_in_time": short(ways.in_time),
        "least_memory": short(ways.smallest),
        "longest_row": ways.longest,
        "largest_rows": ways.rows,
        "changes": list(outcome.changes),
    }
