"""Units, rates, samples and limits, and their costs."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dhp.cli.plan_request import write_lengths
from dhp.config.command_line import compose_config
from dhp.config.devices import find_device, find_link
from dhp.config.resolve import resolve
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from dhp.core.parameters import TrainingRules
from dhp.models.empty import decoder_sizes, list_parameters
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.plan.count.costs import FILE, Arrangement, StageCosts, predicted_bytes, read_costs, write_costs
from dhp.plan.count.rates import Channel, Operations, Rates, Transfer, rates_of, soft_maximum, spend
from dhp.plan.count.row_bytes import PartBytes, TracedRows, trace_bytes
from dhp.plan.count.samples import EqualSamples, Samples, made_for, read_table
from dhp.plan.count.traced import TraceSettings, trace_moments
from dhp.plan.count.unit_work import (
    ATTENTION_BACKWARD,
    Passes,
    TextLoad,
    TowerLoad,
    decoder_passes,
    recomputed,
    tower_passes,
    tower_pieces,
)
from dhp.plan.cut.units import FREE, Positions, StageLink, first_trained, layer_cuts
from tests.helpers.rows import slow
from tests.plan.cut.made import unit
from tests.plan.made import MIB, arrangement, costs

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


def test_a_plan_counts_the_busiest_actor_of_experts(experts_model: str) -> None:
    """A rank with half as many rows again as the mean one; ranks that have all experts have no such."""
    family, sizes, kept = load_family(experts_model), decoder_sizes(experts_model), kept_by(experts_model, "text", 1)
    experts, width = family.decoder.experts, family.config.get_text_config().hidden_size
    assert experts is not None and all(experts.sparse)

    def forward(load: float, degrees: Degrees) -> Operations:
        section = PartConfig(dtype="bfloat16", expert_load=load)
        return decoder_passes(section, degrees, family, sizes, LOAD, kept)[0].forward

    shared = Degrees(data=2, expert=2)
    even, hot = (forward(load, shared) for load in (1.0, 1.5))
    inside = 2 * 3 * width * experts.width * experts.visits * LOAD.tokens
    assert hot.products - even.products == pytest.approx(inside / 2, rel=0.01)  # a layer has norms beside
    sent = [[one.nbytes for one in own.sent if one.again] for own in (even, hot)]
    assert sent[1] == [pytest.approx(1.5 * nbytes, rel=1e-3) for nbytes in sent[0]] and sent[0]
    assert forward(1.5, Degrees(data=2)) == forward(1.0, Degrees(data=2))


def test_attention_exchanges_again_where_it_runs_again(made_model: str) -> None:
    _, found, _ = passes(made_model, Degrees(ulysses=2))
    forward = found[0].forward
    assert recomputed(forward, "all", 1.0).sent == forward.sent and not recomputed(forward, "linear", 0.9).sent


@pytest.mark.parametrize("degrees", [slow(Degrees()), slow(Degrees(tensor=2)), Degrees(ulysses=2)], ids=str)
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


SHAPE = {"model": {"depth": 4}, "dtype": "bfloat16", "degrees": [1, 2]}


def test_the_same_shape_finds_its_costs_and_another_does_not(tmp_path: Path) -> None:
    found = {"vision": costs(4), "text": costs(2)}
    write_costs(tmp_path / "cache", SHAPE, found)
    assert read_costs(tmp_path / "cache", SHAPE) == found
    assert read_costs(tmp_path / "cache", SHAPE | {"dtype": "float32"}) is None


def test_other_shapes_stay(tmp_path: Path) -> None:
    other = SHAPE | {"dtype": "float32"}
    write_costs(tmp_path, SHAPE, {"text": costs(4)})
    write_costs(tmp_path, other, {"text": costs(2)})
    assert read_costs(tmp_path, SHAPE) == {"text": costs(4)}
    assert read_costs(tmp_path, other) == {"text": costs(2)}
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_no_file_or_a_broken_one_is_no_cache(tmp_path: Path) -> None:
    assert read_costs(tmp_path, SHAPE) is None
    (tmp_path / FILE).write_text('{"half')
    assert read_costs(tmp_path, SHAPE) is None
    write_costs(tmp_path, SHAPE, {"text": costs(4)})
    assert read_costs(tmp_path, SHAPE) == {"text": costs(4)}


def test_with_everything_kept_the_peak_is_at_the_end_of_forward() -> None:
    known, choices = costs(3), ("none",) * 3
    assert known.held_bytes(choices) == (3 + 3 * 23 + 2) * MIB
    assert known.peak_bytes(choices) == known.held_bytes(choices)


def test_with_everything_recomputed_it_is_when_the_last_layer_runs_again() -> None:
    known, choices = costs(3), ("all",) * 3
    # What comes after the layers has gone by then: 3 before, 3 inputs, 22 of the last layer.
    assert known.peak_bytes(choices) == (3 + 3 + 22) * MIB


def test_what_the_last_layer_keeps_has_gone_when_others_recompute() -> None:
    known = costs(3)
    assert known.peak_bytes(("all", "all", "none")) == (3 + 2 + 23 + 2) * MIB  # the end of forward
    assert known.peak_bytes(("none", "all", "all")) == (3 + 23 + 2 + 22) * MIB  # the last layer's second run


@pytest.mark.parametrize(
    ("arrangement", "expected"),
    [
        # Vision holds 28 and peaks at 28 or, with two micro-batches, 56; text peaks at 51.
        (arrangement(shared=False, outstanding=1, together=False), 51),
        (arrangement(shared=False, outstanding=2, together=True), 56),
        (arrangement(shared=True, outstanding=1, together=False), 28 + 51),
        (arrangement(shared=True, outstanding=2, together=True), 56 + 51),
    ],
)
def test_the_fullest_device(arrangement: Arrangement, expected: int) -> None:
    parts = {"vision": costs(1), "text": costs(2)}
    plan = {"vision": ("none",), "text": ("none", "none")}
    assert predicted_bytes(parts, plan, arrangement) == expected * MIB


def test_as_json_and_back() -> None:
    known = costs(3, kinds=("slow", "only", "slow"))
    assert StageCosts.from_json(json.loads(json.dumps(known.to_json()))) == known


RATES = Rates(100.0, 50.0, 10.0, 0.5, Channel(8.0), Channel(1.0), node=4)


def test_what_a_rank_waits_for_adds_up() -> None:
    work = Operations(200.0, 50.0, 30.0, 0.0, (Transfer("all-gather", 16.0, 2),))
    spent = spend(work, RATES)
    assert (spent.products, spent.attention, spent.elementwise, spent.sent) == (2.0, 1.0, 3.0, 1.0)
    assert spent.total == 7.0


def test_what_goes_on_at_once_is_a_soft_maximum() -> None:
    spent = spend(Operations(300.0, launched=6.0, hidden=(Transfer("send", 16.0, 2),)), RATES)
    assert (spent.host, spent.hidden) == (3.0, 2.0)
    assert spent.total == pytest.approx((27 + 27 + 8) ** (1 / 3))
    assert soft_maximum([5.0]) == 5.0 and soft_maximum([]) == 0.0
    assert soft_maximum([3.0, 3.0], 60) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize(
    ("operation", "nbytes"),
    [("all-reduce", 2 * 12.0), ("all-gather", 12.0), ("reduce-scatter", 12.0), ("all-to-all", 12.0), ("send", 16.0)],
)
def test_bytes_that_one_of_four_ranks_sends(operation: str, nbytes: float) -> None:
    sent = Transfer(operation, 16.0, 4, times=3.0)  # type: ignore[arg-type]
    assert sent.sent_bytes() == 3 * nbytes
    assert sent.seconds(RATES) == 3 * nbytes / 8


def test_a_cpus_library_scatters_sums_by_summing_all() -> None:
    scatter, total = (Transfer(operation, 16.0, 4) for operation in ("reduce-scatter", "all-reduce"))
    assert scatter.seconds(RATES) == total.seconds(RATES) / 2
    cpu = replace(RATES, ahead=False)
    assert scatter.seconds(cpu) == total.seconds(cpu) == total.seconds(RATES)


def test_one_rank_alone_sends_nothing() -> None:
    assert Transfer("all-reduce", 16.0, 1).seconds(RATES) == 0.0


def test_groups_over_several_nodes_go_by_the_links_between_them() -> None:
    assert RATES.channel(Transfer("all-reduce", 1.0, 4)).bytes_s == 8.0  # one node
    assert RATES.channel(Transfer("all-reduce", 1.0, 8)).bytes_s == 4.0  # four adapters a node
    assert RATES.channel(Transfer("all-reduce", 1.0, 2, stride=4)).bytes_s == 1.0  # one device of each node
    assert RATES.channel(Transfer("all-reduce", 1.0, 4, stride=2)).bytes_s == 2.0


def test_calls_wait_for_their_first_byte() -> None:
    slow = Rates(1.0, 1.0, 1.0, 0.0, Channel(1e9, 4.0), Channel(1e9, 4.0))
    assert Transfer("all-reduce", 0.0, 5, times=2).seconds(slow) == 2 * 2 * 4 / 4 * 4.0
    assert Transfer("all-to-all", 0.0, 5, times=2).seconds(slow) == 8.0


def test_works_add_and_repeat() -> None:
    one = Operations(1.0, 2.0, 3.0, 4.0, (Transfer("send", 5.0, 2),), (Transfer("send", 7.0, 2),))
    twice = one * 2
    assert spend(twice, RATES).sent == spend(one + one, RATES).sent == 2 * spend(one, RATES).sent
    assert (twice.products, twice.launched) == (2.0, 8.0)
    assert len((one + one).hidden) == 2


def test_an_all_to_all_over_nodes_leaves_each_by_the_devices_own_adapters() -> None:
    # Of 8 ranks on two nodes of 4, each sends 3 eighths inside its node and 4 eighths out of it.
    assert Transfer("all-to-all", 16.0, 8).seconds(RATES) == 16 / 8 * 3 / 8.0 + 16 / 8 * 4 / 1.0
    assert Transfer("all-to-all", 16.0, 4).seconds(RATES) == 12 / 8.0  # one node


def test_rates_of_a_device_are_the_shares_that_real_work_reaches() -> None:
    rates = rates_of(find_device("h100"), "bfloat16", 0.005, 8, find_link("ib400"))
    assert rates.products == pytest.approx(702.474e12) and rates.attention == pytest.approx(207.774e12)
    assert rates.elementwise == pytest.approx(1.742e12)
    assert rates.inner.bytes_s == pytest.approx(378e9) and rates.outer.bytes_s == pytest.approx(45e9)


def test_a_format_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="device=t4 has no peak in bfloat16: known are float16, float32"):
        rates_of(find_device("t4"), "bfloat16", 0.0, 8, find_link("eth10"))


def test_a_host_that_does_not_launch_ahead_adds_to_the_rest() -> None:
    spent = spend(Operations(300.0, launched=6.0, hidden=(Transfer("send", 16.0, 2),)), replace(RATES, ahead=False))
    assert spent.total == pytest.approx(6 + 2)  # and so do its sends


LAYOUT = ("training.batch_size=16", "training.micro_batch_size=2", "text.parallelism=data", "text.num_actors=2")


def names_of(model: str) -> list[str]:
    return [f"{part}.model_name={model}" for part in ("vision", "text")]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text('name,text,vision\n"a picture",700,512\nnone,"30",0\n')
    rows = read_table(file).rows
    assert rows["text"].tolist() == [700, 30] and rows["vision"].tolist() == [512, 0]
    file.write_text("text\n5\n")
    assert read_table(file).rows.tolist() == [(0, 5)]  # vision is 0 where it is not known


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "has no lines: a column `text`"),
        ("vision\n1\n", "has vision: a column `text`"),
        ("text,vision\n", "has no samples"),
        ("text,vision\n1,x\n", "a column of text, vision has what is no number .*'x'"),
        ("text\nnan\n", "has what is no number"),
        ("text,vision\n5\n", "has what is no number"),
    ],
)
def test_what_is_no_table_is_refused(written: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(written)
    with pytest.raises(ConfigError, match=f"lengths={file}.*{said}"):
        read_table(file)


def test_lengths_of_another_model_are_refused(made_model: str, llava_model: str, tmp_path: Path) -> None:
    file, own, other = tmp_path / "lengths.csv", load_family(made_model), load_family(llava_model)
    file.write_text("text,vision\n7,4\n")
    table = read_table(file, own)  # which says nothing of a model
    write_lengths(table, own, file)
    assert file.read_text().splitlines() == [f"# {made_for(own)}", "text,vision", "7,4"]
    assert read_table(file, own).rows.tolist() == table.rows.tolist() == read_table(file).rows.tolist()
    with pytest.raises(ConfigError, match="measured for another model .*qwen2_5_vl.* --lengths-out"):
        read_table(file, other)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_step_has_the_tokens_of_all_its_micro_batches(made_model: str) -> None:
    """16 samples of 100 tokens, in rows of 2 for 2 replicas: 4 micro-batches."""
    config = resolve(compose_config("tiny", overrides=[*names_of(made_model), *LAYOUT]))
    samples = Samples(load_family(made_model), None, EqualSamples(100, 20, 10))
    assert samples.loads(config).step_tokens == 16 * 100
