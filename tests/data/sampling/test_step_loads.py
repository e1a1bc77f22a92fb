"""What steps load their ranks with: the rows are the run's own, the sums are added up by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.batch import build
from dhp.batch.encoder_shards import Split
from dhp.config.data import DataConfig, DatasetEntry
from dhp.core.errors import DataError
from dhp.data.balance.packs import Loads
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.data.sampling.sampler import RANDOM, BalanceSettings, BatchLayout, Sampler
from dhp.data.sampling.step_loads import Row, StepLoads, Table, row_bound, step_loads
from tests.data.sampling.test_balanced_sampler import made

TEXT, VISION = [8, 1, 2, 1, 5, 5, 3], [6, 0, 1, 0, 2, 0, 0]


def table(text: list[int] = TEXT, vision: list[int] = VISION) -> Table:
    """A sample of n image tokens has 4 n patches, in one frame."""
    columns = np.zeros(len(text), LENGTH_COLUMNS)
    columns["text"], columns["vision"] = text, vision
    columns["patches"] = 4 * columns["vision"]
    columns["squares"] = columns["patches"].astype(np.int64) ** 2
    columns["pictures"], columns["targets"] = columns["vision"] > 0, 1
    return Table(columns)


def in_file_order(lengths: Table, layout: BatchLayout, **more) -> StepLoads:
    return step_loads(lengths, BalanceSettings(RANDOM), layout, 0, shuffle=False, **more)


def test_rows_are_added_up_by_replica_and_step() -> None:
    """One sample a row:  step 0    micro-batch 0  8 | 1    step 1    5 | 5
    replica 0 | replica 1           micro-batch 1  2 | 1              3 | a token of padding"""
    loads = in_file_order(table(), BatchLayout(replicas=2, micro_batches=2, micro_batch_size=1))
    assert loads.tokens.tolist() == [[[8, 1], [2, 1]], [[5, 5], [3, 1]]]
    assert loads.pairs.tolist() == [[[64, 1], [4, 1]], [[25, 25], [9, 1]]]
    assert loads.vision.tolist() == [[[6, 0], [1, 0]], [[2, 0], [0, 0]]]
    assert loads.slowest_tokens.tolist() == [10, 8] and loads.mean_tokens.tolist() == [6, 7]
    assert loads.slowest_pairs.tolist() == [68, 34] and loads.mean_pairs.tolist() == [35, 30]
    assert loads.longest_rows.tolist() == [8, 5]
    assert loads.mean_slowest_tokens == 9 and loads.mean_slowest_pairs == 51
    assert loads.slowest_work(2, 0.5).tolist() == [20 + 34, 16 + 17]
    assert len(loads) == 2 and loads.first == 0


def test_what_a_step_holds_is_counted_without_padding() -> None:
    totals = in_file_order(table(), BatchLayout(2, 2, 1)).totals
    assert set(totals) == set(LENGTH_COLUMNS.names)
    assert totals["text"].tolist() == [12, 13] and totals["vision"].tolist() == [7, 2]
    assert totals["patches"].tolist() == [28, 8] and totals["squares"].tolist() == [24**2 + 4**2, 8**2]
    assert totals["pictures"].tolist() == [2, 1] and totals["targets"].tolist() == [4, 3]


def test_padding_makes_all_samples_of_a_row_as_long_as_its_longest() -> None:
    """Two samples a row: 8 1 | 2 1, then 5 5 | 3."""
    layout = BatchLayout(2, 1, 2)
    packed, padded = (in_file_order(table(), layout, packing=packing) for packing in (True, False))
    assert packed.tokens.tolist() == [[[9, 3]], [[10, 3]]] and packed.pairs.tolist() == [[[65, 5]], [[50, 9]]]
    assert padded.tokens.tolist() == [[[16, 4]], [[10, 3]]] and padded.pairs.tolist() == [[[128, 8]], [[50, 9]]]
    assert padded.totals["text"].tolist() == packed.totals["text"].tolist() == [12, 13]
    empty = in_file_order(table([4], [0]), layout, packing=False)
    assert empty.tokens.tolist() == [[[4, 1]]] and empty.pairs.tolist() == [[[16, 1]]]


def test_the_worst_row_is_named_with_its_samples() -> None:
    loads = in_file_order(table(), BatchLayout(2, 1, 2))
    assert loads.worst_row() == Row(1, (4, 5), tokens=10, pairs=50, vision=2, patches=8)
    assert loads.worst_row(of_vision=0.5) == Row(0, (0, 1), tokens=9, pairs=65, vision=6, patches=24)  # 12 against 11
    assert loads.row(1, 0, 1) == Row(1, (6,), tokens=3, pairs=9, vision=0, patches=0)
    padded = in_file_order(table(), BatchLayout(2, 1, 2), packing=False)
    assert padded.worst_row() == Row(0, (0, 1), tokens=16, pairs=128, vision=6, patches=24)


def test_no_order_has_a_longer_row_than_the_longest_samples_together() -> None:
    columns = table().rows
    assert row_bound(columns, 2) == Row(None, (0, 4), tokens=13, pairs=89, vision=8, patches=32)
    assert row_bound(columns, 2, packing=False) == Row(None, (0, 4), tokens=16, pairs=128, vision=8, patches=32)
    assert row_bound(columns, 9).tokens == sum(TEXT)  # there are no more
    for packing in (True, False):
        worst = [
            step_loads(table(), BalanceSettings(RANDOM), BatchLayout(2, 1, 2), seed, packing=packing).worst_row().tokens
            for seed in range(60)
        ]
        assert max(worst) == row_bound(columns, 2, packing).tokens and min(worst) < max(worst)


def test_means_alone_are_wrong_of_an_uneven_table() -> None:
    """Replicas 9 | 1 of a mean of 5: a step waits for 9. Of an even table they are right."""
    uneven = in_file_order(table([9, 1, 1, 9], [0] * 4), BatchLayout(2, 1, 1))
    assert uneven.mean_tokens.tolist() == [5, 5] and uneven.slowest_tokens.tolist() == [9, 9]
    assert uneven.unseen_by_means == pytest.approx(4 / 9)
    even = in_file_order(table([5] * 4, [0] * 4), BatchLayout(2, 1, 1))
    assert even.mean_tokens.tolist() == uneven.mean_tokens.tolist()
    assert even.slowest_tokens.tolist() == [5, 5] and even.unseen_by_means == 0


def own_sampler(lengths: Table, balancing: BalanceSettings, layout: BatchLayout, skip: bool) -> Sampler:
    """As the run makes it."""
    data = SimpleNamespace(shuffle=True, on_bad_sample="skip" if skip else "error")
    return build._sampler(SimpleNamespace(balancing=balancing, layout=layout, seed=7, data=data), lengths)


def check_against_the_sampler(balancing: BalanceSettings, packing: bool, epoch: int, bad: tuple[int, ...] = ()) -> None:
    lengths, layout = Table.of(Loads(made(bad=bad).vision, made(bad=bad).text)), BatchLayout(2, 3, 4)
    skip = "skip" if bad else "error"
    loads = step_loads(lengths, balancing, layout, 7, packing=packing, on_bad_sample=skip, epoch=epoch)
    sampler = own_sampler(lengths, balancing, layout, bool(bad))
    first = sampler.steps(epoch) if epoch else 0
    assert (loads.first, len(loads)) == (first, sampler.steps(epoch + 1) - first)
    text = lengths.rows["text"]
    for step in range(len(loads)):
        batch = sampler.batch(first + step)
        assert batch.epoch == epoch
        for micro, row in enumerate(batch.samples):
            for replica, slot in enumerate(row):
                found = loads.row(step, micro, replica)
                kept = [index for index in slot if index not in bad]
                of_row = [int(text[index]) for index in kept] or [1]
                laid = of_row if packing else [max(of_row)] * len(of_row)
                assert found.samples == tuple(kept) and found.step == batch.step
                assert (found.tokens, found.pairs) == (sum(laid), sum(length**2 for length in laid))
                assert loads.tokens[step, micro, replica] == found.tokens
                assert loads.vision[step, micro, replica] == lengths.rows["vision"][kept].sum()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("method", ["random", "length_group", "balanced", "isf"])
def test_rows_are_those_of_the_runs_own_sampler(method: str, packing: bool) -> None:
    check_against_the_sampler(BalanceSettings(method), packing, epoch=0)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "balancing",
    [
        BalanceSettings(RANDOM),
        BalanceSettings("balanced", fullest_first=True, long=300),
        BalanceSettings("isf", window=150, fullest_first=True),
    ],
    ids=lambda balancing: balancing.method,
)
def test_also_with_windows_long_and_defective_samples_in_any_epoch(balancing: BalanceSettings, epoch: int) -> None:
    check_against_the_sampler(balancing, True, epoch, bad=(3, 500, 501, 1002))


def test_the_fullest_step_comes_first_where_the_run_puts_it_there() -> None:
    lengths, layout = Table.of(Loads(made().vision, made().text)), BatchLayout(2, 1, 4)
    worst = [
        step_loads(lengths, BalanceSettings("isf", fullest_first=on), layout, 7).worst_row() for on in (True, False)
    ]
    assert worst[0].step == 0 != worst[1].step and worst[0].samples == worst[1].samples
    assert worst[0].patches is None  # Loads do not tell


def test_a_defective_sample_is_an_error_unless_it_is_to_be_skipped() -> None:
    bad = table([8, 0, 2], [0, 0, 0])
    for method in (RANDOM, "isf"):
        with pytest.raises(DataError, match="sample 1 is defective"):
            step_loads(bad, BalanceSettings(method), BatchLayout(1, 1, 2), 0)
    assert in_file_order(bad, BatchLayout(1, 1, 2), on_bad_sample="skip").tokens.ravel().tolist() == [8, 2]
    assert row_bound(bad.rows, 3, packing=False).tokens == 16
    with pytest.raises(DataError, match="not one sample"):
        in_file_order(table([0, 0], [0, 0]), BatchLayout(1, 1, 2), on_bad_sample="skip")
    with pytest.raises(ValueError, match="1 samples are not measured, the first of them 1"):
        table([8, -1], [0, 0])


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_of_a_run_get_what_was_said(write_json, images: Path, tmp_path: Path, tiny_assets: Path, packing) -> None:
    """Of datasets that show other samples in each epoch, with pictures; told by the run's own table of lengths."""
    say = lambda text, **more: {
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "a " * len(text)}],
        **more,
    }
    words = write_json([say("more " * n) for n in (1, 30, 2, 2, 50, 9, 1)], "words.jsonl")
    shown = write_json([say("<image>" + "x " * n, image=name) for n, name in enumerate(["a.png", "b.jpg", "b.jpg"])])
    registry = {"w": DatasetEntry(str(words), weight=1.5), "p": DatasetEntry(str(shown), str(images))}
    data = DataConfig(["w", "p"], data_registry=registry, packing=packing, cache_dir=str(tmp_path / "cache"))
    layout, model = BatchLayout(2, 2, 1), str(tiny_assets / "model")
    random = build.BatchReaderSettings(model, data, layout, {"vision": Split()}, 3)
    balanced = replace(random, balancing=BalanceSettings("isf" if packing else "length_group"))
    lengths = build.make_reader(balanced).lengths
    for settings in (random, balanced):
        run = build.make_reader(settings)
        for epoch in (0, 1):
            loads = step_loads(lengths, settings.balancing, layout, 3, packing=packing, epoch=epoch)
            steps = [run.step(loads.first + step) for step in range(len(loads))]
            assert {step.info.epoch for step in steps} == {epoch}
            laid = [[[one.tensors["input_ids"].numel() for one in row] for row in step.work["text"]] for step in steps]
            assert loads.tokens.tolist() == laid
            told = zip(*(loads.totals[name].tolist() for name in ("text", "patches", "targets", "pictures")))
            infos = [step.info for step in steps]
            assert list(told) == [(i.tokens, i.vision_tokens, i.target_tokens, i.images) for i in infos]
