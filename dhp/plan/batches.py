"""Decides how steps are divided and read: batch layout, reader settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dhp.batch.assign_images import Locality
from dhp.config.parts import decoder, degrees, encoders, model_name, resolved
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config, PartConfig
from dhp.core.batch import FeatureSettings
from dhp.data.sample.chat import read_template
from dhp.data.sampling.sampler import BatchLayout
from dhp.models.flops import TrainedShare
from dhp.models.shape import find_passes
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.row_limits import balance_settings
from dhp.plan.trainable import adapters_of

if TYPE_CHECKING:
    from dhp.batch.encoder_shards import Split
    from dhp.batch.reader import BatchReaderSettings


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

    near = localities or {}
    data = config.data
    return BatchReaderSettings(
        model_name=model_name(config),
        data=replace(data, chat_template=read_template(data.chat_template)),
        layout=batch_layout(config),
        encoders={name: _split(part, near.get(name)) for name, part in encoders(config).items()},
        seed=config.seed,
        objective=config.training.objective,
        balancing=balance_settings(config),
        passes=dict(passes),
        features=features,
        text=degrees(decoder(config)),
        sequence_groups=decoder(config).sequence_groups,
        even_calls=decoder(config).zero_stage == 3,
        drawing=tuple(name for name, adapters in adapters_of(config).items() if adapters.dropout),
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
