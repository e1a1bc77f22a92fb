"""Units of towers and decoders, and their work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.parameters import TrainingRules
from dhp.models.empty import decoder_sizes, list_parameters
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.plan.count.row_bytes import PartBytes, TracedRows, trace_bytes
from dhp.plan.count.traced import TraceSettings, trace_moments
from dhp.plan.count.unit_operations import TowerLoad, tower_pieces
from dhp.plan.count.unit_work import ATTENTION_BACKWARD, Passes, TextLoad, decoder_passes, recomputed, tower_passes
from dhp.plan.cut.units import FREE, Positions, StageLink, first_trained, layer_cuts
from tests.helpers.rows import slow
from tests.plan.cut.made import unit

TOWER = (
    unit("patches", part="vision", layers=0, cut="never"),
    unit("v0", part="vision"),
    unit("v1", part="vision", cut="never"),
    unit("merger", part="vision", layers=0),
)
DECODER = (unit("embedding", layers=0, cut="never"), unit("t0"), unit("t1", cut="never"), unit("head", layers=0))


def test_a_cut_is_nowhere_inside_of_a_unit_and_its_companion() -> None:
    assert Positions((*TOWER, *DECODER)).at.tolist() == [0, 2, 4, 6, 8]


def test_stages_are_of_any_length_but_none() -> None:
    allowed = Positions(DECODER).allowed
    assert allowed.tolist() == [[False, True, True], [False, False, True], [False] * 3]


def test_no_stage_goes_over_a_cut_that_is_always_there() -> None:
    positions = Positions((*TOWER[:-1], replace(TOWER[-1], cut="always"), *DECODER))
    spans = {(int(positions.at[a]), int(positions.at[b])) for a, b in np.argwhere(positions.allowed)}
    assert spans == {(0, 2), (0, 4), (2, 4), (4, 6), (4, 8), (6, 8)}


def test_sums_between_positions() -> None:
    positions = Positions(DECODER)
    assert positions.sums([1.0, 2.0, 4.0, 8.0])[0].tolist() == [0.0, 3.0, 15.0]
    assert positions.before([1.0, 2.0, 4.0, 8.0]).tolist() == [0.0, 3.0, 15.0]


def test_cuts_as_a_configuration_has_them() -> None:
    units = (*TOWER, *DECODER)
    assert layer_cuts(units, (2, 4, 6)) == {"vision": [1], "text": [1]}
    assert layer_cuts(DECODER, (2,)) == {"text": [1]}
    assert layer_cuts(units, (4,)) == {}


def test_a_backward_goes_to_the_first_that_trains() -> None:
    frozen = tuple(replace(one, trains=False) for one in TOWER)
    assert first_trained((*frozen, *DECODER)) == 4
    assert first_trained((*frozen, *DECODER), trained_before=True) == 0
    assert first_trained(frozen) == 4


def test_a_hand_over_takes_its_bytes_and_a_latency() -> None:
    assert StageLink(10.0, 0.5).seconds(20.0) == 2.5 and FREE.seconds(1e9) == 0.0


LENGTHS, TARGETS = (300, 212), 128
LOAD = TextLoad(sum(LENGTHS), sum(length**2 for length in LENGTHS), TARGETS)


@cache
def kept_by(model: str, part: str, tensor: int) -> PartBytes:
    family = load_family(model)
    settings = lambda choices: TraceSettings("bfloat16", tensor, choices)
    trace = lambda rows, choices: trace_moments(model, family, part, rows, settings(choices))
    base = TracedRows(256, 64, 32) if part == "text" else TracedRows(0, patches=1024, windows=64)
    return trace_bytes(family.parts[part].layers.kinds, base, trace)


def passes(model: str, degrees: Degrees, **more: object) -> tuple[Family, tuple[Passes, ...], PartBytes]:
    family = load_family(model)
    kept = kept_by(model, "text", degrees.tensor)
    section = PartConfig(dtype="bfloat16")
    return family, decoder_passes(section, degrees, family, decoder_sizes(model), LOAD, kept, **more), kept


@pytest.mark.parametrize(
    "degrees", [Degrees(), Degrees(tensor=2), Degrees(ulysses=2), Degrees(ring=2, tensor=2)], ids=str
)
def test_all_ranks_together_do_the_operations_of_a_step(made_model: str, degrees: Degrees) -> None:
    family, found, _ = passes(made_model, degrees)
    ranks = degrees.tensor * degrees.sequence
    products = sum(one.forward.products + one.backward.products for one in found) * ranks
    attention = sum(one.forward.attention for one in found) * ranks
    assert products + 3 * attention == pytest.approx(family.decoder.work.flops(LENGTHS, TARGETS), rel=1e-6)
    assert all(one.backward.attention == ATTENTION_BACKWARD * one.forward.attention for one in found)


def test_traffic_of_memory_goes_by_what_a_layer_keeps(made_model: str) -> None:
    _, found, kept = passes(made_model, Degrees(ulysses=2))
    rows = TracedRows(LOAD.tokens // 2, 0, TARGETS // 2)
    saved = kept.held[kept.kinds[0], "none"].of(rows)
    assert (found[0].forward.elementwise, found[0].backward.elementwise) == (2 * saved, 4 * saved)


def test_ranks_send_what_their_layout_asks_for(made_model: str) -> None:
    _, found, _ = passes(made_model, Degrees(ring=2, tensor=2))
    sent = [(one.operation, one.ranks, one.stride, one.times) for one in found[0].forward.sent]
    assert sent == [("all-reduce", 2, 1, 2), ("send", 2, 2, 1)]
    assert found[0].forward.sent[0].nbytes == LOAD.tokens / 2 * 64 * 2
    assert not passes(made_model, Degrees())[1][0].forward.sent


def test_frozen_layers_have_gradients_of_states_alone(made_model: str) -> None:
    _, found, _ = passes(made_model, Degrees(), trained={0: 0.0, 1: 1.0, None: 0.5})
    shares = [one.backward.products / one.forward.products for one in found]
    assert shares == [1.0, 2.0, 1.5]


@pytest.mark.parametrize(("choice", "sums"), [("light", 0), ("mlp", 0), ("linear", 1), ("all", 1)])
def test_recomputing_repeats_a_share_and_the_sum_behind_attention(made_model: str, choice: str, sums: int) -> None:
    """As ranks count it: tests/engine/test_comm_bytes.py."""
    _, found, _ = passes(made_model, Degrees(tensor=2))
    again = recomputed(found[0].forward, choice, 0.5)
    assert again.products == found[0].forward.products / 2
    assert sum(one.times for one in again.sent) == sums


def test_attention_exchanges_again_where_it_runs_again(made_model: str) -> None:
    _, found, _ = passes(made_model, Degrees(ulysses=2))
    forward = found[0].forward
    assert recomputed(forward, "all", 1.0).sent == forward.sent and not recomputed(forward, "linear", 0.9).sent


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2), Degrees(ulysses=2)], ids=str)
@pytest.mark.parametrize("model", ["made_model", slow("qwen3_vl_model")])
def test_all_ranks_of_a_tower_do_the_operations_of_a_step(
    model: str, degrees: Degrees, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    family = load_family(path)
    layouts = [family.tower.image_layout((1, side, side)) for side in (16, 32)]
    load = TowerLoad(
        patches=sum(one.patches for one in layouts),
        windows=sum(length**2 for one in layouts for length in one.window_lengths),
        frames=sum(length**2 for one in layouts for length in one.frame_lengths),
        features=sum(len(one.order) for one in layouts),
        segments=sum(len(one.frame_lengths) for one in layouts),
    )
    pieces = tower_pieces(family, list_parameters(path, family), TrainingRules())
    kept = kept_by(path, "vision", degrees.tensor)
    found = tower_passes(PartConfig(dtype="bfloat16"), degrees, family, pieces, load, kept)
    ranks = degrees.tensor * degrees.sequence
    products = sum(one.forward.products + one.backward.products for one in found) * ranks
    attention = sum(one.forward.attention for one in found) * ranks
    assert products + 3 * attention == pytest.approx(family.tower.work.flops(layouts), rel=1e-6)
