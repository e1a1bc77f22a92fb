"""Checks whether a decoder may share a sequence among so many actors."""

from __future__ import annotations

from math import gcd

from dhp.base.errors import ConfigError
from dhp.config.part import PartConfig
from dhp.config.resolved import resolved

_BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary positions that turn otherwise in longer rows


def shares_sequence(asked: PartConfig) -> bool:
    """Whether several actors share a sequence."""
    return resolved(asked.ring) * resolved(asked.ulysses) > 1


def check_heads(heads: int, kv_heads: int, asked: PartConfig) -> None:
    """Ulysses gives each actor whole heads, of those that tensor parallelism leaves to it: of query heads as many, of
    key/value heads as many after each was copied as often as needed. Raises ConfigError."""
    tensor, ulysses = resolved(asked.tensor), resolved(asked.ulysses)
    own, own_kv = heads // tensor, max(kv_heads // tensor, 1)
    if _divides(own, own_kv, ulysses):
        return
    each = "of each tensor actor" if tensor > 1 else "of the text decoder"
    possible = [n for n in range(1, own + 1) if _divides(own, own_kv, n)]
    raise ConfigError(
        f"text.ulysses={ulysses} cannot deal out the {own} query and {own_kv} key/value heads {each}: heads({own}) % "
        f"ulysses({ulysses}) = {own % ulysses}, and each actor's query heads must share its key/value heads evenly. "
        f"Set text.ulysses to one of {possible} and text.num_actors to match, or divide the sequence further by "
        "text.ring, which needs no heads."
    )


def check_positions(rope_types: set[str], scaled: bool) -> None:
    """Each actor sees its own share of a row's positions. Raises ConfigError for what follows from the longest of them,
    or from a token's place among the actor's own. scaled: queries of some layers are scaled by their place."""
    for kind in sorted(rope_types.intersection(_BY_LENGTH)):
        raise ConfigError(
            f"text.parallelism=sequence of a decoder with rotary positions of the type {kind}, which turn by the "
            "longest position of a row: actors that share one would disagree. Set text.ulysses=1 and text.ring=1, or "
            "another rope_type in text_config of the model's config.json, as yarn."
        )
    if scaled:
        raise ConfigError(
            "text.parallelism=sequence of a decoder that scales queries by their place in the row "
            "(attn_temperature_tuning): an actor knows its own share of it alone. Set text.ulysses=1 and text.ring=1."
        )


def check_layers_of_rows(mixers: bool, blocks: bool, balance: float, asked: PartConfig) -> None:
    """Raises ConfigError for layers that need a whole row. mixers: some carry state along it; blocks: tokens see each
    other both ways; balance: coefficient of a load-balancing loss, 0: none."""
    given = f"text.ulysses={asked.ulysses} and text.ring={asked.ring}"
    if mixers:
        raise ConfigError(
            f"{given} of a decoder with layers that carry state along the row: a row cannot be shared. Set both to 1; "
            "text.tensor and text.pipeline divide the model."
        )
    if blocks and resolved(asked.ring) > 1:
        raise ConfigError(
            f"{given} of a decoder in which tokens of an image see each other both ways: the ring computes causal "
            "attention alone. Set text.ring=1 and text.ulysses higher."
        )
    if balance:
        raise ConfigError(
            f"{given} of a decoder with a load-balancing loss (output_router_logits=true, "
            f"router_aux_loss_coef={balance} in its configuration): it is a product of means over whole samples. Set "
            "both to 1, or output_router_logits to false in text_config of the model's config.json to train without it."
        )


def _divides(heads: int, kv_heads: int, ulysses: int) -> bool:
    copies = ulysses // gcd(kv_heads, ulysses)
    return heads % ulysses == 0 and heads % (kv_heads * copies) == 0
