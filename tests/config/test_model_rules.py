"""Which decoders may share a sequence."""

from __future__ import annotations

import pytest

from dhp.config.layout import check_mlp_chunks, resolve_part
from dhp.config.model_rules import check_heads, check_layers_of_rows, check_positions, shares_sequence
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.models.decoder import _rope_types


def asked(ulysses: int = 1, ring: int = 1, tensor: int = 1) -> PartConfig:
    return PartConfig(data=1, ulysses=ulysses, ring=ring, tensor=tensor)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "section"),
    [(28, 4, asked(4)), (28, 4, asked(7)), (28, 4, asked(14)), (28, 4, asked(2, tensor=2)), (8, 1, asked(8))],
)
def test_heads_that_are_dealt_out(heads: int, kv_heads: int, section: PartConfig) -> None:
    check_heads(heads, kv_heads, section)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "section", "told"),
    [
        (28, 4, asked(8), r"text.ulysses=8 cannot deal out the 28 query .* heads\(28\) % ulysses\(8\) = 4, .*"),
        (28, 4, asked(8), r"Set text.ulysses to one of \[1, 2, 4, 7, 14, 28\] and .* or divide .* by text.ring"),
        (
            12,
            4,
            asked(6, tensor=4),
            r"the 3 query and 1 key/value heads of each tensor actor: heads\(3\) % ulysses\(6\)",
        ),
        (12, 8, asked(3), "each actor's query heads must share its key/value heads evenly"),
    ],
)
def test_heads_that_are_not(heads: int, kv_heads: int, section: PartConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_heads(heads, kv_heads, section)


def test_a_ring_needs_no_heads() -> None:
    check_heads(3, 1, asked(ring=7))
    assert shares_sequence(asked(ring=2)) and shares_sequence(asked(2)) and not shares_sequence(asked(tensor=4))


def test_positions_that_follow_from_a_rows_length_are_refused() -> None:
    check_positions({"default", "yarn", "llama3"}, scaled=False)
    for kind in ("dynamic", "longrope"):
        with pytest.raises(ConfigError, match=f"rotary positions of the type {kind}, which turn by the longest"):
            check_positions({"default", kind}, scaled=False)
    with pytest.raises(ConfigError, match="attn_temperature_tuning"):
        check_positions({"default"}, scaled=True)
    by_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert _rope_types(by_layer) == {"dynamic", "default"} and _rope_types({"rope_type": "yarn"}) == {"yarn"}


@pytest.mark.parametrize(
    ("mixers", "blocks", "balance", "section", "told"),
    [
        (True, False, 0.0, asked(2), "layers that carry state along the row: a row cannot be shared"),
        (False, True, 0.0, asked(2, 2), "see each other both ways.* Set text.ring=1 and text.ulysses higher"),
        (False, False, 0.01, asked(ring=2), "load-balancing loss .*router_aux_loss_coef=0.01"),
    ],
)
def test_layers_that_need_a_whole_row(
    mixers: bool, blocks: bool, balance: float, section: PartConfig, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_layers_of_rows(mixers, blocks, balance, section)


def test_blocks_go_through_ulysses() -> None:
    check_layers_of_rows(False, True, 0.0, asked(4))


def test_chunks_of_mlps() -> None:
    check_mlp_chunks("text", PartConfig(mlp_chunks=8), ("mlp.gate_proj", "mlp.up_proj"))
    check_mlp_chunks("text", PartConfig(compile=True), ("fc1",))
    with pytest.raises(ConfigError, match="text.mlp_chunks=0"):
        check_mlp_chunks("text", PartConfig(mlp_chunks=0), ("mlp.up_proj",))
    with pytest.raises(ConfigError, match="text.mlp_chunks=2 with text.compile=true.* or change text.compile"):
        check_mlp_chunks("text", PartConfig(mlp_chunks=2, compile=True), ("mlp.up_proj",))
    with pytest.raises(ConfigError, match="text.mlp_chunks=2 with text.expert=4"):
        check_mlp_chunks("text", PartConfig(mlp_chunks=2, expert=4), ("mlp.up_proj",))
    with pytest.raises(ConfigError, match="the MLPs of this model's audio part are no modules of their own"):
        check_mlp_chunks("audio", PartConfig(mlp_chunks=2), ("fc1",))


def test_groups_are_for_the_decoder() -> None:
    with pytest.raises(ConfigError, match="text.sequence_groups=all does not exist; choose from auto, one"):
        resolve_part("text", PartConfig(sequence_groups="all"))
    with pytest.raises(ConfigError, match="vision.sequence_groups=one: images and clips are always sharded whole"):
        resolve_part("vision", PartConfig(sequence_groups="one"))
