"""`python -m dhp plan FILE.yaml|--config-name=NAME [key=value …]`: the best layouts of a run, before it starts."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from dhp.checkpoint.folder import find_checkpoint
from dhp.cli.common import add_configuration, make_parser
from dhp.cli.plan_data import write_lengths
from dhp.cli.plan_files import as_values, write_configuration
from dhp.cli.plan_lines import memory_lines, need_lines, way_lines
from dhp.cli.plan_outcome import Asked, Outcome, find_plan
from dhp.cli.plan_request import read_request
from dhp.cli.plan_table import head_lines, nothing_lines, refused_lines, sure_line, table_lines
from dhp.config.command_line import compose_config
from dhp.config.recorded import compose_recorded
from dhp.config.run_dir import config_of
from dhp.config.yaml_files import named_file
from dhp.core.command import own_command
from dhp.core.errors import ConfigError
from dhp.core.process import StartUp, heed, say_line
from dhp.core.text import json_safe
from dhp.trainer.forecast.freed import DEVICES, ROWS, SCHEDULE, find_held

FITS, NOTHING_FITS = 0, 3  # exit statuses; 1 is bad input
_OF_A_RUN = (ROWS, SCHEDULE, DEVICES)  # what a recorded configuration keeps, though it may be the default


def main(arguments: Sequence[str]) -> int:
    """plan: name the fastest layouts of both parts that fit, why each other loses, and what the run needs, in seconds:
    without weights, GPUs or Ray, from shapes, data sheets and the lengths of the samples.

    devices=8x8 (nodes x devices; or 64) device=h100 link=ib400: what to plan for. reserve=0.05: share of a device's
    memory that stays free; memory_gib=N: a device's, in the place of its data sheet's. lengths=FILE.csv or
    length=tokens:1300,picture:1024,targets:300: samples, where the configuration's own are not here. samples=N hours=H:
    an epoch, and the time for it. fix=KEY,… keeps settings, free=KEY,…|all searches those that the configuration has.

    The exit status is 0 where a layout fits, 1 for bad input, 3 where nothing fits.
    """
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


def _read(given: argparse.Namespace) -> tuple[Asked, Source]:
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
    return Asked(config, named, request, held, given.measure), (name, folder)


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
        return f"train         {shlex.join(own_command('train', str(written)))}"
    return f"write it      add --write plan.yaml, then {' '.join(own_command('train', 'plan.yaml'))}"


def _write(given: argparse.Namespace, outcome: Outcome, source: Source) -> None:
    """The files that are asked for."""
    if given.lengths_out is not None:
        write_lengths(outcome.table, outcome.space.counted.family, given.lengths_out)
    if given.write is not None and outcome.best is not None:
        write_configuration(outcome, source, given.write)
    if given.plot is not None:
        from dhp.cli.plan_plot import draw_plan

        draw_plan(outcome, given.plot)
    if given.json is not None:
        text = json.dumps(json_safe(as_values(outcome)), indent=2, default=_plain)
        if str(given.json) == "-":
            print(text)
        else:
            given.json.write_text(text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """Numbers of numpy as Python's."""
    item: Callable[[], object] | None = getattr(value, "item", None)
    return item() if item is not None else str(value)
