"""The samples that `python -m dhp plan` plans for: measured, of a file, or assumed; and a file of those measured."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dhp.cli.plan_request import PlanRequest
from dhp.config.parts import encoders, model_name
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, DataError
from dhp.models.family import Family
from dhp.trainer.forecast.freed import rows_by_tokens
from dhp.trainer.forecast.samples import EqualSamples, Samples, read_table
from dhp.trainer.preflight import missing_data
from dhp.trainer.units import assumed_rows

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_STEPS = 8  # that equal samples are made for, where rows have so many tokens
Found = tuple[Samples, "Table | None", str]


def find_samples(request: PlanRequest, config: Config, family: Family, say: Callable[[str], None]) -> Found:
    """Samples, their table where it is known, and where they are from. config: resolved, on one device. Raises
    ConfigError, DataError."""
    equal = _equal(request, config, family)
    if request.lengths is not None:
        table = read_table(request.lengths)
        return Samples(family, table, equal), table, f"of {request.lengths}"
    if request.length is not None:
        return _of_equal(config, family, equal), None, equal.why
    absent = _why_not_measured(config)
    if absent:
        equal = replace(equal, why=f"assumed: {absent}; say length= or lengths=FILE.csv")
        return _of_equal(config, family, equal), None, "assumed"
    table = _measured(config, say)
    return Samples(family, table, equal), table, "measured"


def _equal(request: PlanRequest, config: Config, family: Family) -> EqualSamples:
    if request.length is not None:
        return request.length if encoders(config) else replace(request.length, features=0)
    assumed = assumed_rows(config)
    return EqualSamples(assumed.tokens, assumed.pictures, assumed.targets)


def _of_equal(config: Config, family: Family, equal: EqualSamples) -> Samples:
    """Rows of so many tokens hold several samples: the sampler puts them there."""
    if not rows_by_tokens(config):
        return Samples(family, None, equal)
    from dhp.data.sampling.step_loads import Table

    each = max(1, (config.data.limits.text or 0) // equal.tokens)
    count = _STEPS * config.training.batch_size * each
    unit = family.tower.merge_unit if encoders(config) else 1
    patches = equal.features * unit
    values = {"vision": equal.features, "text": equal.tokens, "patches": patches, "squares": patches**2}
    values |= {"pictures": int(equal.features > 0), "targets": equal.targets}
    rows = np.zeros(count, [(name, np.int64) for name in values])
    for name, value in values.items():
        rows[name] = value
    return _EqualRows(family, Table(rows), equal)


class _EqualRows(Samples):
    """Samples that are all alike, in rows that the sampler makes; there are no more of them than such steps need."""

    def __str__(self) -> str:
        return str(self._equal)

    @property
    def count(self) -> int | None:
        return None


def _why_not_measured(config: Config) -> str:
    """Why samples cannot be measured; "": they can."""
    folder = Path(model_name(config))
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"the tokenizer of {model_name(config)} is not here"
    if not config.data.datasets:
        return "data.datasets is empty"
    missing = missing_data(config)
    return missing[0].partition(".\n")[0].partition(". Correct")[0] if missing else ""


def _measured(config: Config, say: Callable[[str], None]) -> Table:
    say("reading the lengths of samples")
    from dhp.batch.build import make_reader
    from dhp.cli.lengths import measure_all, measuring_settings
    from dhp.data.sampling.step_loads import Table

    settings = measuring_settings(config)
    feed = make_reader(settings)
    chunks = feed.missing()
    if chunks:
        say(f"measuring {sum(len(chunk.rows) for chunk in chunks):,} samples, once: lengths are kept in data.cache_dir")
        measure_all(feed, settings, config.data.num_workers)
    if feed.lengths is None:
        raise DataError("the lengths of samples cannot be measured; say length= or lengths=FILE.csv")
    return Table(feed.lengths.columns(np.arange(feed.dataset_size), 0))


def write_lengths(table: Table | None, path: Path) -> None:
    """A CSV file that `lengths=` reads. Raises ConfigError where nothing was measured."""
    if table is None:
        raise ConfigError(f"--lengths-out={path}: the lengths of the samples are assumed, not measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in ("text", "vision", "patches", "squares", "pictures", "targets") if name in _names(table)]
    with path.open("w", encoding="utf-8", newline="") as file:
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
