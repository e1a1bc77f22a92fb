"""`python -m dhp plan FILE.yaml|--config-name=NAME [key=value …]`: the best layouts, before anything runs."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dhp.checkpoint.folder import find_checkpoint
from dhp.cli.common import add_configuration, make_parser
from dhp.cli.plan_outcome import BYTES_ERROR, SECONDS_ERROR, Outcome, PlanQuery, find_plan
from dhp.cli.plan_request import read_request, write_lengths
from dhp.cli.plan_table import (
    head_lines,
    memory_lines,
    need_lines,
    nothing_lines,
    refused_lines,
    sure_line,
    table_lines,
    way_lines,
)
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.devices import GIB, shipped_directory
from dhp.config.layout import GIVEN
from dhp.config.run_dir import compose_recorded, config_of
from dhp.config.schema import Config
from dhp.config.yaml_files import named_file
from dhp.core.errors import ConfigError
from dhp.core.files import write_whole
from dhp.core.process import StartUp, heed, say_line
from dhp.core.text import json_safe, shell_command
from dhp.plan.search.candidates import Candidate
from dhp.plan.search.free_keys import DEVICES, PASSES, ROWS, SCHEDULE, find_held, with_settings
from dhp.plan.search.verdict import loses_by
from dhp.report.plots import Point, points_on_axes

_OF_EACH_RUN = ("run_dir",)  # its default has the time in it


def write_configuration(outcome: Outcome, source: tuple[str | None, str | None], path: Path) -> None:
    """A configuration with the best layout, which `python -m dhp.train_ray` runs: over the given one, where Hydra finds
    that from the file's folder, else whole. source: name and folder of the given one; (None, None): that of a run.
    Raises ConfigError."""
    best = outcome.best
    if best is None:
        raise ConfigError(f"--write={path}: no layout fits, so that there is none to write")
    name, folder = source
    given, settings = outcome.asked.config, layout_settings(outcome, best)
    base = Path(folder or shipped_directory()).resolve()
    if path.suffix != ".yaml":
        raise ConfigError(f"--write={path}: a configuration's name ends with .yaml; write {path.stem}.yaml")
    if name is not None and base == path.parent.resolve() and path.stem == name:
        raise ConfigError(f"--write={path} is the configuration that is planned; give another name")
    if name is not None and base in (path.parent.resolve(), shipped_directory().resolve()):
        values = {**_differences(given, compose_config(name, folder)), **settings}
        text = f"defaults:\n  - {name}\n  - _self_\n\n{nested_yaml(values)}"
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


def layout_settings(outcome: Outcome, best: Candidate) -> dict[str, Any]:
    """What the planned configuration sets to be laid out so, by key."""
    given = outcome.asked.config
    settings = with_settings(given, outcome.asked.held, best.settings)
    return settings | ({"layout": GIVEN} if given.layout != GIVEN else {})


def _comment(outcome: Outcome, best: Candidate) -> str:
    found = best.found
    return (
        f"# Chosen by `python -m dhp plan` on {date.today()} for {outcome.machine}: {found.step_s:.3g} s a step, "
        f"{found.peak.total / GIB:.1f} GiB\n# of a device's {outcome.machine.memory_bytes / GIB:.1f}, predicted for "
        f"{outcome.samples}.\n"
    )


def _differences(config: Config, plain: Config) -> dict[str, Any]:
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


def nested_yaml(values: Mapping[str, Any]) -> str:
    """YAML of values by their dotted keys."""
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


FITS, NOTHING_FITS = 0, 3  # exit statuses; 1 is bad input
_OF_A_RUN = (ROWS, SCHEDULE, DEVICES, PASSES)  # what a recorded configuration keeps, though it may be the default


def main(arguments: Sequence[str]) -> int:
    """plan: name the fastest layouts of both parts that fit, why each other loses, and what the run needs, in seconds:
    without weights, GPUs or Ray, from shapes, data sheets and the lengths of the samples.

    devices=8x8 (nodes x devices; or 64) device=h100 link=ib400: what to plan for. reserve=0.05: share of a device's
    memory that stays free; memory_gib=N: a device's, in the place of its data sheet's. lengths=FILE.csv or
    length=tokens:1300,picture:1024,targets:300: samples, where the configuration's own are not here. samples=N hours=H:
    an epoch, and the time for it. fix=KEY,… keeps settings, free=KEY,…|all searches those that the configuration has.

    The exit status is 0 where a layout fits, 1 for bad input, 3 where nothing fits."""
    parser = make_parser("plan", main.__doc__)
    _add_flags(parser)
    add_configuration(parser, "FILE.yaml, devices= and so on, overrides")
    given = parser.parse_intermixed_args(arguments)
    heed()
    begun = time.perf_counter()
    say = StartUp(begun, partial(say_line, file=sys.stderr))  # stdout may go into a file
    asked, source = _read(given)
    outcome = find_plan(asked, say)
    _write(given, outcome, source)
    if str(given.json) != "-":
        for line in _lines(outcome, given):
            print(line)
    return FITS if outcome.best is not None else NOTHING_FITS


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", metavar="FILE.yaml", type=Path, help="the best layout, as train_ray runs it")
    parser.add_argument("--json", metavar="FILE", type=Path, help="all of it as JSON; -: on stdout, alone")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="time against memory of the layouts")
    parser.add_argument("--lengths-out", metavar="FILE.csv", type=Path, help="the lengths of the samples")
    parser.add_argument("--from", metavar="RUN", dest="run", type=Path, help="a run: plan it, beside what it took")
    parser.add_argument("--measure", action="store_true", help="rates of this machine's device, not a data sheet's")
    parser.add_argument("--all", action="store_true", help="all layouts and all that is refused")


Source = tuple[str | None, str | None]


def _read(given: argparse.Namespace) -> tuple[PlanQuery, Source]:
    """What is asked, and the configuration's name and folder. Raises ConfigError."""
    (name, folder), settings = named_file(given.settings, given.config_name, given.config_path)
    request, overrides = read_request(settings)
    if given.run is None:
        if name is None:
            raise ConfigError("name a FILE.yaml, or --config-name=NAME, as qwen2_5_vl_7b, or a run: --from RUN")
        config, named = compose_config(name, folder, overrides), name
    else:
        if name is not None:
            raise ConfigError(f"--from {given.run} and {name} both name a configuration; give one")
        own = given.run / "config.yaml"
        file = own if own.is_file() else config_of(find_checkpoint(given.run))
        config, named = compose_recorded(file, overrides), str(given.run)
    fixed = _OF_A_RUN if given.run is not None else ()
    held = find_held(config, [*overrides, *(f"{key}=" for key in fixed)], request.fix, request.free)
    return PlanQuery(config, named, request, held, given.measure), (name, folder)


def _lines(outcome: Outcome, given: argparse.Namespace) -> Iterator[str]:
    yield from head_lines(outcome)
    if given.run is not None:
        yield from _beside(given.run, outcome)
    best = outcome.best
    yield ""
    if best is None:
        yield from nothing_lines(outcome)
    yield from table_lines(outcome, None) if given.all else table_lines(outcome)
    yield ""
    yield from refused_lines(outcome, given.all)
    if best is not None:
        yield from memory_lines(outcome, best)
    yield sure_line(outcome)
    yield from way_lines(outcome)
    if best is not None:
        yield from need_lines(outcome, best)
        yield _how_to_run(outcome, given.write)


def _beside(run: Path, outcome: Outcome) -> Iterator[str]:
    """What the run took, beside what its layout is planned to take."""
    file = run / "summary.json"
    if not file.is_file():
        yield f"took          {run} has no summary.json: it has not ended"
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    took = values.get("median_step_s") if isinstance(values, dict) else None
    if not isinstance(took, (int, float)) or outcome.best is None:
        return
    planned = outcome.best.found.step_s
    yield f"took          {took:.3g} s a step (median); planned {planned:.3g} s: {took / planned - 1:+.0%}"


def _how_to_run(outcome: Outcome, written: Path | None) -> str:
    if written is not None:
        return f"train         {shlex.join(shell_command('train', str(written)))}"
    return f"write it      add --write plan.yaml, then {' '.join(shell_command('train', 'plan.yaml'))}"


def _write(given: argparse.Namespace, outcome: Outcome, source: Source) -> None:
    """The files that are asked for."""
    if given.lengths_out is not None:
        write_lengths(outcome.table, outcome.space.counted.family, given.lengths_out)
    if given.write is not None and outcome.best is not None:
        write_configuration(outcome, source, given.write)
    if given.plot is not None:
        draw_plan(outcome, given.plot)
    if given.json is not None:
        text = json.dumps(json_safe(as_values(outcome)), indent=2, default=_plain)
        if str(given.json) == "-":
            print(text)
        else:
            given.json.write_text(text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    item: Callable[[], object] | None = getattr(value, "item", None)
    return item() if item is not None else str(value)


def draw_plan(outcome: Outcome, path: Path) -> None:
    """Write a PNG. Layouts within a forecast's error of the limit are grey."""
    points = [
        Point(one.found.peak.total / GIB, one.found.step_s, "1" if rank == 1 else "", outcome.sure(one))
        for rank, one in enumerate(outcome.found.candidates, 1)
    ]
    limit = outcome.machine.limit_bytes / GIB
    title = f"{outcome.asked.named} on {outcome.machine}".replace("×", "x")  # the font has no such sign
    axes = ("GiB of the fullest device", "seconds of a step")
    drawn = points_on_axes(path.stem, title, points, *axes, (limit, "limit"))
    drawn.write_png(path.parent).replace(path)  # whatever its ending is
