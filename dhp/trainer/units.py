"""A decoder as units that can be cut into stages: what each costs on one rank, by the model's shape and the layout.

Seconds are operations, counted as `dhp.models.flops` counts them, by a speed that is assumed: cuts depend on ratios.
Bytes are traced on the meta device (`dhp.trainer.traces`), where a budget asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dhp.config.part import PartConfig
from dhp.config.parts import DECODER, decoder, encoders, resolved
from dhp.config.recompute import read_choices
from dhp.config.schema import Config
from dhp.core.reports import StageUsage
from dhp.models.family import Family
from dhp.models.flops import OPERATIONS
from dhp.models.shape import DecoderSizes
from dhp.planner.units import NONE, Link, Saved, Unit
from dhp.trainer.memory import VALUE_BYTES
from dhp.trainer.row_limits import samples_a_row

# Assumed of a sample where nothing was measured: a picture and a conversation about it.
SAMPLE_TOKENS, PICTURE_TOKENS, TARGET_TOKENS = 2048, 1024, 512
# Operations a second of a rank, and bytes a second of a hand-over through a host's memory, as of 16-bit matrices on an
# H100 and of `python -m experiments.micro --only handoff`.
SPEED, HANDOVER = 4e14, 8e9
LIGHT = 0.03  # of a forward: what norms, rotary positions and activation functions take


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


def link() -> Link:
    """Between two stages."""
    return Link(HANDOVER)


def decoder_units(
    config: Config,
    family: Family,
    sizes: DecoderSizes,
    trained: Mapping[int | None, float] | None = None,
    saved: Sequence[Mapping[str, Saved]] = (),
) -> tuple[Unit, ...]:
    """The embedding, each layer, and the last norm with the head; the outer two stay with their neighbours.

    trained: share of the parameters that are trained, of each layer by its number and of what is outside under None;
    None: all. saved: of each unit, by choice of recompute; none: what they keep is not asked for.
    """
    section, rows = decoder(config), assumed_rows(config)
    sequence = resolved(section.ulysses) * resolved(section.ring)
    output = VALUE_BYTES[section.dtype] * hidden_width(family) * rows.samples * rows.tokens / sequence
    fixed = fixed_choices(section, len(sizes.layers))
    layers = []
    for at, forward_s in enumerate(layer_seconds(config, family, sizes)):
        part = _share(trained, at)
        again = replay_shares(family, sizes.layers[at])[fixed[at]] if fixed else 0.0
        unit = Unit(f"layer {at}", DECODER, 1, forward_s, forward_s * (1 + part + again), sizes.layers[at])
        layers.append(replace(unit, output_bytes=output, trains=part > 0))
    layers[-1] = replace(layers[-1], cut="never")
    outside = _share(trained, None)
    head_s = OPERATIONS * family.decoder.work.target * rows.samples * rows.targets / _ranks(section) / SPEED
    head = Unit("head", DECODER, 0, head_s, head_s * (1 + outside), sizes.norm + sizes.head, trains=outside > 0)
    embedding = Unit("embedding", DECODER, 0, 0.0, 0.0, sizes.embedding, trains=outside > 0, cut="never")
    units = (embedding, *layers, head)
    return tuple(replace(unit, saved=own) for unit, own in zip(units, saved, strict=True)) if saved else units


def layer_seconds(config: Config, family: Family, sizes: DecoderSizes) -> list[float]:
    """Of a forward of one micro-batch through each layer on one rank."""
    rows = assumed_rows(config)
    done = decoder_operations(family, sizes, rows.samples * rows.tokens, rows.samples * rows.tokens**2 / 2)
    return [sum(operations) / _ranks(decoder(config)) / SPEED for operations in done]


def decoder_operations(family: Family, sizes: DecoderSizes, tokens: float, pairs: float) -> list[tuple[float, float]]:
    """Of a forward through each layer of all ranks together, of products of matrices and of attention. Products go by
    the layers' parameters, of which experts count as far as tokens visit them. pairs: of tokens that see each other."""
    work, weights = family.decoder.work, visited_parameters(family, sizes)
    attention = OPERATIONS * work.pair / len(weights) * pairs
    return [(OPERATIONS * work.token * own / sum(weights) * tokens, attention) for own in weights]


def visited_parameters(family: Family, sizes: DecoderSizes) -> list[float]:
    """Of each layer, those that a token goes through: of experts, the ones that it visits."""
    experts = family.decoder.experts
    if experts is None:
        return list(map(float, sizes.layers))
    idle = 3 * hidden_width(family) * experts.width * (experts.count - experts.visits)
    return [own - idle * sparse for own, sparse in zip(sizes.layers, experts.sparse, strict=True)]


def replay_shares(family: Family, parameters: int) -> dict[str, float]:
    """By choice of recompute, the share of a layer's forward that backward runs again. mlp: two of an MLP's three
    matrices."""
    text = family.config.get_text_config()
    inner = 3 * text.hidden_size * text.intermediate_size
    return replays(2 / 3 * min(1.0, inner / parameters))


def replays(mlp: float) -> dict[str, float]:
    """The same, where this share of a layer's parameters is in an MLP's matrices before its activation function."""
    return {NONE: 0.0, "light": LIGHT, "mlp": LIGHT + 0.9 * mlp, "linear": 0.9, "all": 1.0, "offload": 1.0}


def saved_of(
    forward_s: Sequence[float], shares: Sequence[Mapping[str, float]], usages: Sequence[StageUsage], chosen: bool
) -> list[dict[str, Saved]]:
    """Of each unit, what was traced. forward_s: of each layer; shares: see `replay_shares`. chosen: the configuration
    says what is recomputed, whose seconds units have in their backward; else each usage is of one choice."""
    found: list[dict[str, Saved]] = [{} for _ in forward_s]
    before, after = (max(getattr(usage, f"{end}_bytes") for usage in usages) for end in ("before", "after"))
    for usage in usages:
        for own, layer, seconds, share in zip(found, usage.layers, forward_s, shares, strict=True):
            replay = Saved(layer.held_bytes, layer.replay_bytes, share[layer.choice] * seconds)
            own[NONE if chosen else layer.choice] = Saved(layer.held_bytes) if chosen else replay
    return [{NONE: Saved(before)}, *found, {NONE: Saved(after)}]


def _ranks(section: PartConfig) -> int:
    """Ranks of a stage that share a micro-batch's work."""
    return resolved(section.tensor) * resolved(section.ulysses) * resolved(section.ring)


def _share(trained: Mapping[int | None, float] | None, at: int | None) -> float:
    return 1.0 if trained is None else trained.get(at, 0.0)


def fixed_choices(section: PartConfig, layers: int) -> tuple[str, ...]:
    """What layers recompute, where the configuration says it; else none."""
    recompute = resolved(section.recompute)
    return () if recompute == "auto" else read_choices(recompute, layers)


def hidden_width(family: Family) -> int:
    """Of a decoder's states."""
    return int(family.config.get_text_config().hidden_size)
