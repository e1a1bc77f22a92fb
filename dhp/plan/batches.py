"""Decides a step's division: batch layout, row limits, reader settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from dhp.batch.assign_images import Locality
from dhp.config.parts import decoder, degrees, encoders, model_name, resolved
from dhp.config.rules import FILLING
from dhp.config.schema import Config, PartConfig
from dhp.config.steps import micro_batches, vision_batch
from dhp.core.batch import FeatureSettings
from dhp.data.balance.packs import Loads
from dhp.data.sample.chat import read_template
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout
from dhp.models.flops import TrainedShare
from dhp.models.shape import find_passes
from dhp.plan.count.counted_model import Counted
from dhp.plan.trainable import adapters_of

if TYPE_CHECKING:
    from dhp.batch.encoder_shards import Split
    from dhp.batch.reader import BatchReaderSettings

LOOKED_AT, LOOKING_S = 256, 2.0  # samples, and seconds, by which rows are judged where not all lengths are known
_MORE = 1.05  # times as many rows by one limit as by the other: less is no matter


def balance_settings(config: Config) -> BalanceSettings:
    """How samples are put into rows."""
    data = config.data
    return BalanceSettings(
        data.balance,
        window=data.balance_window,
        long=data.long_tokens,
        isf_passes=data.isf_passes,
        fullest_first=bool(data.fullest_first),
        **asdict(data.limits),
    )


def samples_a_row(config: Config, tokens: int, pictures: int) -> int:
    """Of samples that are all alike. tokens, pictures: of each, all tokens and those of pictures. config: resolved."""
    usual = config.training.micro_batch_size
    if config.data.balance not in FILLING:
        return usual
    limits = balance_settings(config).limits(Loads(np.array([pictures]), np.array([tokens])), usual)
    return max(1, min(limits.text // tokens, limits.vision // pictures if pictures else limits.text))


def may_be_unreached(config: Config) -> bool:
    """Whether one limit of rows is set and the other is not."""
    limits = config.data.limits
    return config.data.balance in FILLING and (limits.text is None) != (limits.vision is None)


def unreached(config: Config, loads: Loads) -> list[str]:
    """A line for the limit that the configuration sets and rows of such samples never reach, because the other one is
    null and ends them first; nothing where there is none. config: resolved."""
    data, asked = config.data, balance_settings(config)
    if not may_be_unreached(config):
        return []
    set_, null = ("text", "vision") if data.limits.vision is None else ("vision", "text")
    limits = asked.limits(loads, config.training.micro_batch_size)
    totals = {name: float(getattr(loads, name).sum()) for name in (set_, null)}
    rows = {name: totals[name] / getattr(limits, name) for name in totals}
    if rows[null] <= _MORE * rows[set_]:
        return []
    most, kind = getattr(data.limits, set_), {"text": "tokens", "vision": "image tokens"}
    remedy = f"data.limits.{null}" + (f"={most}" if null == "vision" else "")
    return [
        f"rows hold {totals[set_] / rows[null]:,.0f} {kind[set_]} in the mean, not data.limits.{set_}={most}: "
        f"data.limits.{null} is null, which means {getattr(limits, null):,} {kind[null]} here, and ends them first. "
        f"Set {remedy}"
    ]


def rows_by_tokens(config: Config) -> bool:
    """Whether rows have so many tokens, whatever samples they are of."""
    return config.data.limits.text is not None and config.data.balance in FILLING


def a_step(config: Config) -> int:
    """Samples of a step; where rows have so many tokens, rows: a micro-batch of a replica is one."""
    training = config.training
    return training.batch_size // training.micro_batch_size if rows_by_tokens(config) else training.batch_size


# Assumed of a sample where nothing was measured: a picture and a conversation about it.
SAMPLE_TOKENS, PICTURE_TOKENS, TARGET_TOKENS = 2048, 1024, 512


@dataclass(frozen=True)
class AssumedRows:
    """A micro-batch of a replica. samples: in it; tokens: of each, pictures': among them, and targets: of each."""

    samples: int
    tokens: int
    pictures: int
    targets: int

    def __str__(self) -> str:
        count = f"{self.samples} sample{'s' * (self.samples > 1)}"
        return f"{count} of {self.tokens:,} tokens, {self.pictures:,} of a picture and {self.targets:,} learned"


def assumed_rows(config: Config) -> AssumedRows:
    """What a micro-batch of a resolved configuration is taken to be, before any sample is read."""
    tokens = min(SAMPLE_TOKENS, config.data.max_tokens or SAMPLE_TOKENS)
    share = tokens / SAMPLE_TOKENS
    pictures = round(PICTURE_TOKENS * share) if encoders(config) else 0
    samples = samples_a_row(config, tokens, pictures)
    return AssumedRows(samples, tokens, pictures, max(1, round(TARGET_TOKENS * share)))


def feed_settings(
    config: Config,
    localities: Mapping[str, Locality] | None = None,
    passes: Mapping[str, TrainedShare] = MappingProxyType({}),
    features: FeatureSettings | None = None,
) -> BatchReaderSettings:
    """The dataset actor's settings. localities: of the ranks of each encoder, once they are known. passes: what a
    step computes of each part of which not all is trained. features: of pictures, where a run keeps them; without them
    pixels are read."""
    from dhp.batch.reader import BatchReaderSettings  # imports what reads samples, and objectives
    from dhp.batch.row_shards import Draws
    from dhp.batch.shard import Division

    near = localities or {}
    data = config.data
    return BatchReaderSettings(
        model_name=model_name(config),
        data=replace(data, chat_template=read_template(data.chat_template)),
        layout=batch_layout(config),
        division=Division(
            encoders={name: _split(part, near.get(name)) for name, part in encoders(config).items()},
            packing=data.packing,
            text=degrees(decoder(config)),
            sequence_groups=decoder(config).sequence_groups,
            even_calls=decoder(config).zero_stage == 3,
            passes=dict(passes),
            draws=Draws(config.seed, tuple(name for name, own in adapters_of(config).items() if own.dropout)),
            batch=vision_batch(config),
        ),
        seed=config.seed,
        objective=config.training.objective,
        balancing=balance_settings(config),
        features=features,
        plugins=tuple(config.plugins),
    )


def batch_layout(config: Config) -> BatchLayout:
    """How a step's samples are divided."""
    replicas, count, samples = resolved(decoder(config).data), micro_batches(config), config.training.micro_batch_size
    return BatchLayout(replicas, count, samples, replicas * count - config.training.batch_size // samples)


def passes_of(counted: Counted) -> dict[str, TrainedShare]:
    """The share that a step computes of each part; none where all of them are trained."""
    if not counted.rules.selects:
        return {}
    return find_passes(counted.family, counted.parameters, counted.rules)


def _split(part: PartConfig, locality: Locality | None) -> Split:
    from dhp.batch.encoder_shards import Split

    own = degrees(part)
    # An encoder in 16 bits rounds its inputs first thing: rounded before, they take half the room in transfer.
    dtype = "bfloat16" if part.dtype == "bfloat16" else "float32"
    return Split(own.data, own.sequence, dtype, locality, part.zero_stage == 3, resolved(part.pipeline))
