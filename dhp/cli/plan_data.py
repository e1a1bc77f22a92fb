"""The samples that `python -m dhp plan` plans for: measured, of a file, or assumed; and a file of those measured."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from dhp.cli.plan_request import PlanRequest
from dhp.config.parts import encoders
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.family import Family
from dhp.trainer.forecast.sample_source import assumed_equal, equal_samples, measured_table, why_not_measured
from dhp.trainer.forecast.samples import COMMENT, EqualSamples, Samples, made_for, read_table

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

Found = tuple[Samples, "Table | None", str]


def find_samples(request: PlanRequest, config: Config, family: Family, say: Callable[[str], None]) -> Found:
    """Samples, their table where it is known, and where they are from. config: resolved, on one device. Raises
    ConfigError, DataError."""
    equal = _equal(request, config, family)
    if request.lengths is not None:
        table = read_table(request.lengths, family)
        return Samples(family, table, equal), table, f"of {request.lengths}"
    if request.length is not None:
        return equal_samples(config, family, equal), None, equal.why
    absent = why_not_measured(config)
    if absent:
        equal = replace(equal, why=f"assumed: {absent}; say length= or lengths=FILE.csv")
        return equal_samples(config, family, equal), None, "assumed"
    table = measured_table(config, say)
    return Samples(family, table, equal), table, "measured"


def _equal(request: PlanRequest, config: Config, family: Family) -> EqualSamples:
    if request.length is not None:
        return request.length if encoders(config) else replace(request.length, features=0)
    return assumed_equal(config)


def write_lengths(table: Table | None, family: Family, path: Path) -> None:
    """A CSV file that `lengths=` reads, of a model of this family. Raises ConfigError where nothing was measured."""
    if table is None:
        raise ConfigError(f"--lengths-out={path}: the lengths of the samples are assumed, not measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in ("text", "vision", "patches", "squares", "pictures", "targets") if name in _names(table)]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{COMMENT}{made_for(family)}\n")
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*(table.rows[name].tolist() for name in names), strict=True))


def _names(table: Table) -> tuple[str, ...]:
    return table.rows.dtype.names or ()


def seconds_text(seconds: float) -> str:
    """Hours, minutes or seconds, as fits."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{ceil(seconds)} s"
