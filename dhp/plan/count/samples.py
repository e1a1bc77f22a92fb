"""The samples that a forecast is for."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import catch_warnings

import numpy as np

from dhp.config.model_rules import shares_sequence
from dhp.config.parts import decoder, encoders, resolved
from dhp.config.schema import Config
from dhp.config.steps import micro_batches, vision_batch
from dhp.core.errors import ConfigError
from dhp.data.balance.packs import Loads
from dhp.models.family import Family
from dhp.plan.batches import assumed_rows, balance_settings, batch_layout, rows_by_tokens
from dhp.plan.count.loads import RunLoads, even_loads, loads_of_steps

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

QUICK_STEPS = 64  # of a search's candidates; what is shown is made from all
TABLE_COLUMNS = ("text", "vision", "patches", "squares", "pictures", "targets", "pairs")
_NEEDED = ("text",)
COMMENT = "# "  # before the model, in the first line of a file of lengths


@dataclass(frozen=True)
class EqualSamples:
    """Samples that are all alike. tokens, features, targets: of one, all tokens, those of its picture, learned ones."""

    tokens: int
    features: int
    targets: int
    why: str = "assumed"

    def __str__(self) -> str:
        of = f"{self.tokens:,} tokens, {self.features:,} of a picture, {self.targets:,} learned"
        return f"every sample {of} ({self.why})"


class Samples:
    """Loads of any layout of a run. Those of the same rows are made once."""

    def __init__(self, family: Family, table: Table | None, equal: EqualSamples):
        """table: lengths of all samples; None: each is as `equal`."""
        self._family, self._table, self._equal = family, table, equal
        self._known: dict[tuple[object, ...], RunLoads] = {}

    def __str__(self) -> str:
        if self._table is None:
            return str(self._equal)
        rows = self._table.rows
        patches = f", {rows['patches'].mean():,.0f} patches" if "patches" in (rows.dtype.names or ()) else ""
        return f"{len(rows):,} samples: {rows['text'].mean():,.0f} tokens{patches} each"

    @property
    def count(self) -> int | None:
        """Samples of an epoch; None: not known."""
        return None if self._table is None else len(self._table)

    @property
    def lengths(self) -> Loads:
        """Of all samples, or of one where they are alike."""
        if self._table is None:
            return Loads(np.array([self._equal.features]), np.array([self._equal.tokens]))
        return Loads(self._table.rows["vision"], self._table.rows["text"])

    @property
    def encoded_bytes(self) -> float:
        """Of a sample's files, mean; 0 where they are not known."""
        if self._table is None or "encoded" not in (self._table.rows.dtype.names or ()):
            return 0.0
        return float(self._table.rows["encoded"].mean())

    def loads(self, config: Config, quick: bool = False) -> RunLoads:
        """Of a resolved configuration. quick: of some steps, for a search. Raises DataError."""
        batch = vision_batch(config)
        own = (resolved(decoder(config).data), micro_batches(config), config.training.micro_batch_size, batch)
        packing = config.data.packing or shares_sequence(decoder(config))
        if self._table is None:
            return self._of_equal(config)
        steps = -(-len(self._table) // config.training.batch_size)
        key = (own, packing, quick and steps > QUICK_STEPS)
        if key not in self._known:
            self._known[key] = self._of_table(config, packing, bool(key[-1]))
        return self._known[key]

    def _of_equal(self, config: Config) -> RunLoads:
        equal, unit = self._equal, self._family.tower.patches_of_token if encoders(config) else 1
        replicas = resolved(decoder(config).data)
        samples = config.training.micro_batch_size
        count = micro_batches(config)
        batch = vision_batch(config)
        return even_loads(samples, equal.tokens, equal.features, equal.targets, replicas, unit, count, batch)

    def _of_table(self, config: Config, packing: bool, quick: bool) -> RunLoads:
        from dhp.data.sampling.step_loads import Table, step_loads

        table = self._table
        assert table is not None
        if quick:  # the longest samples are among them: a rank must have room for these
            count = QUICK_STEPS * config.training.batch_size
            chosen = np.random.default_rng(config.seed).choice(len(table), count, replace=False)
            chosen[: config.training.micro_batch_size] = table.rows["text"].argsort()[
                -config.training.micro_batch_size :
            ]
            table = Table(table.rows[chosen])
        steps = step_loads(
            table,
            balance_settings(config),
            batch_layout(config),
            config.seed,
            packing=packing,
            shuffle=config.data.shuffle,
            on_bad_sample="skip",
        )
        work = self._family.decoder.work
        unit = self._family.tower.patches_of_token if encoders(config) else 1
        return loads_of_steps(steps, work.token, work.pair / 2, unit, len(table), vision_batch(config))


def made_for(family: Family) -> str:
    """The models whose samples have the same lengths, in words: a tokenizer and a way to cut pictures. Files of lengths
    begin with it."""
    tower, text = family.tower, family.config.get_text_config()
    words = text.vocab_size >> 10  # sizes of one family pad their vocabularies differently
    pictures = f"patches of {tower.patch_dim} numbers, {tower.merge_unit} a token"
    return f"{family.config.model_type} with {text.model_type} of {words} Ki tokens, {pictures}"


def read_table(path: Path, family: Family | None = None) -> Table:
    """Lengths from a CSV file with a header: text (all tokens of a sample), and as far as they are known vision (tokens
    of pictures), patches, squares, pictures, targets. Where a line before it says for what model they were measured, it
    must be this `family`. Raises ConfigError."""
    from dhp.data.sampling.step_loads import Table

    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
            if header and header[0].startswith(COMMENT):
                _check_model(path, ",".join(header).removeprefix(COMMENT), family)
                header = next(csv.reader(file), [])
            known = [name for name in TABLE_COLUMNS if name in header]
            if any(name not in known for name in _NEEDED):
                raise ConfigError(
                    f"lengths={path} has {', '.join(header) or 'no lines'}: a column `text` with the tokens of each "
                    "sample is needed"
                )
            own = [header.index(name) for name in known]
            with catch_warnings(action="ignore"):  # of a file without samples
                values = np.loadtxt(file, delimiter=",", usecols=own, quotechar='"', comments=None, ndmin=2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"lengths={path} cannot be read ({error}); give a CSV file with the columns {TABLE_COLUMNS}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"lengths={path}: a column of {', '.join(known)} has what is no number ({error})") from error
    if not len(values) or not np.isfinite(values).all():
        raise ConfigError(f"lengths={path} has {'what is no number' if len(values) else 'no samples'}")
    rows = np.zeros(len(values), [(name, np.int64) for name in dict.fromkeys(("vision", "text", *known))])
    for name, column in zip(known, values.T, strict=True):
        rows[name] = column
    return Table(rows)


def _check_model(path: Path, written: str, family: Family | None) -> None:
    if family is not None and written.strip() != made_for(family):
        raise ConfigError(
            f"lengths={path} was measured for another model ({written.strip()}), and this one has other lengths of the "
            f"same samples ({made_for(family)}). Measure them for this one: where its data and its tokenizer are, "
            "`python -m dhp plan … --lengths-out FILE.csv`"
        )


_STEPS = 8  # that equal samples are made for, where rows have so many tokens


def assumed_equal(config: Config) -> EqualSamples:
    """Equal samples, as they are assumed where nothing is known. config: resolved."""
    assumed = assumed_rows(config)
    return EqualSamples(assumed.tokens, assumed.pictures, assumed.targets)


def assumed_samples(config: Config, family: Family) -> Samples:
    """Those of `assumed_equal`, in rows."""
    return equal_samples(config, family, assumed_equal(config))


def equal_samples(config: Config, family: Family, equal: EqualSamples) -> Samples:
    """Rows of so many tokens hold several samples: the sampler puts them there."""
    if not rows_by_tokens(config):
        return Samples(family, None, equal)
    from dhp.data.sampling.step_loads import Table

    each = max(1, (config.data.limits.text or 0) // equal.tokens)
    count = _STEPS * config.training.batch_size * each
    unit = family.tower.patches_of_token if encoders(config) else 1
    patches = round(equal.features * unit)
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
