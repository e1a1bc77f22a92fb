"""Datasets behind one another, probed, and their steps."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.batch import reader
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import Division
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.parts import split_share
from dhp.core.errors import ConfigError, DataError
from dhp.data.balance.packs import Loads
from dhp.data.read.annotations import read_annotations
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.data.sampling import probe
from dhp.data.sampling.dataset import BatchSource, Dataset, names, open_dataset, rows_of
from dhp.data.sampling.dataset import digest as digest_rows
from dhp.data.sampling.sampler import RANDOM, BalanceSettings, BatchLayout, RandomSampler, Sampler, StepBatch
from dhp.data.sampling.step_loads import Row, StepLoads, Table, step_loads
from tests.data.sampling.test_sampler import made


def sample(text: str, **more) -> dict:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}], **more}


def entry(path, data_path=""):
    return DatasetEntry(annotation_path=str(path), data_path=str(data_path))


@pytest.fixture
def dataset(write_json, images):
    """Nine samples in two files; indices 1 (no image file), 3 (tag missing) and 7 (empty) are bad."""
    names = ["a.png", "gone.png", "b.jpg", "a.png", "sub/c.png"]
    asked = ["<image>0", "<image>1", "<image>2", "3", "<image>4"]
    first = write_json([sample(text, image=name) for name, text in zip(names, asked)])
    second = write_json([sample("5"), sample("6"), {"conversations": []}, sample("8")], "text.jsonl")
    return open_dataset(["pictures", "words"], {"words": entry(second), "pictures": entry(first, images)})


LAYOUT = BatchLayout(replicas=2, micro_batches=2, micro_batch_size=1)


def test_datasets_follow_one_another(dataset):
    assert len(dataset) == 9
    good = [0, 1, 2, 4, 5, 6, 8]  # a missing image is found later, when it is opened
    places = [(dataset.record(i).dataset, dataset.record(i).position) for i in good]
    assert places == [("pictures", n) for n in (1, 2, 3, 5)] + [("words", n) for n in (1, 2, 4)]
    for index in (-1, 9):
        with pytest.raises(IndexError):
            dataset.record(index)


def in_file_order(dataset) -> RandomSampler:
    return RandomSampler(len(dataset), LAYOUT, seed=0, shuffle=False)


def places(step) -> list:
    return [[[(s.dataset[0], s.position) for s in slot] for slot in row] for row in step.samples]


def flat(step) -> list:
    return [s for row in step.samples for slot in row for s in slot]


def test_a_skipped_sample_leaves_its_place_empty_and_moves_no_other(dataset, preprocessor):
    source = BatchSource(dataset, preprocessor(), in_file_order(dataset), on_bad_sample="skip")
    assert source.sampler.steps(1) == 3
    steps = [source.step(k) for k in range(4)]
    assert [(step.step, step.epoch) for step in steps] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert [places(step) for step in steps[:3]] == [
        [[[("p", 1)], []], [[("p", 3)], []]],
        [[[("p", 5)], [("w", 1)]], [[("w", 2)], []]],
        [[[("w", 4)], []], [[], []]],
    ]
    assert places(steps[3]) == places(steps[0])
    assert [len(step.skipped) for step in steps] == [2, 1, 0, 2]
    assert "dataset 'pictures', element 2 of " in steps[0].skipped[0]
    assert steps[0].skipped[0].endswith("gone.png does not exist")
    assert "dataset 'pictures', element 4 of " in steps[0].skipped[1]
    assert "dataset 'words', line 3 of " in steps[1].skipped[0]


def test_what_planning_left_out_is_skipped_too(dataset, preprocessor):
    source = BatchSource(dataset, preprocessor(), in_file_order(dataset), on_bad_sample="skip")
    batch = replace(source.sampler.batch(0), defects=("planning left it out",))
    found = source.read(batch).skipped
    assert found[0] == "planning left it out" and len(found) == 3 and "gone.png" in found[1]


def test_a_bad_sample_ends_the_run_by_default(dataset, preprocessor):
    source = BatchSource(dataset, preprocessor(), in_file_order(dataset))
    with pytest.raises(DataError, match=r"dataset 'pictures', element 2 of .*gone\.png does not exist"):
        source.step(0)
    with pytest.raises(DataError, match=r"dataset 'words', line 3 of .*text\.jsonl: 'conversations' is empty"):
        source.step(1)


def test_a_step_depends_on_nothing_but_its_number(dataset, preprocessor):
    def make():
        return BatchSource(dataset, preprocessor(), RandomSampler(len(dataset), LAYOUT, 5, True), "skip")

    source, another = make(), make()
    for k in (4, 0, 2, 4):
        one, other = source.step(k), another.step(k)
        assert (one.step, one.epoch, one.skipped) == (other.step, other.epoch, other.skipped)
        assert places(one) == places(other)
        for left, right in zip(flat(one), flat(other), strict=True):
            assert np.array_equal(left.input_ids, right.input_ids) and np.array_equal(left.labels, right.labels)
            assert left.grids == right.grids
            assert all(np.array_equal(a, b) for a, b in zip(left.pixels, right.pixels, strict=True))


def test_an_epoch_shows_each_sample_once_in_an_order_of_its_own(dataset):
    seen = []

    def note(record):
        seen.append((record.dataset, record.position))
        return SimpleNamespace(sides=None)

    source = BatchSource(dataset, note, RandomSampler(len(dataset), LAYOUT, 3, True), "skip")
    epochs = []
    for epoch in range(2):
        for k in range(3):
            source.step(3 * epoch + k)
        epochs.append(list(seen))
        seen.clear()
    assert sorted(epochs[0]) == sorted(epochs[1]) and len(epochs[0]) == 7  # two of nine do not parse
    assert epochs[0] != epochs[1]


def test_an_unknown_name_is_answered_with_the_nearest():
    reason = r"'shape' is not in data.data_registry \(it holds \['shapes', 'x'\]\); did you mean shapes\?"
    with pytest.raises(DataError, match=reason):
        open_dataset(["shape"], {"x": entry("x"), "shapes": entry("y")})


def test_no_dataset_is_an_error():
    with pytest.raises(DataError, match="Name at least one in data.datasets"):
        open_dataset([], {})


def test_impossible_settings(dataset):
    with pytest.raises(ConfigError, match="data.on_bad_sample = 'ignore'"):
        BatchSource(dataset, None, in_file_order(dataset), "ignore")


@pytest.fixture
def registry(write_json):
    """`a` and `b` with ten samples each; in `shown` they are told apart by their position."""
    talk = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}
    path = str(write_json([talk] * 10))
    return {"a": DatasetEntry(path), "b": DatasetEntry(path)}


def shown(dataset, epoch: int) -> Counter:
    records = [dataset.record(index, epoch) for index in range(len(dataset))]
    return Counter((record.dataset, record.position) for record in records)


def test_half_of_a_dataset_is_the_same_half_in_every_epoch(registry):
    dataset = open_dataset(["a%50", "b"], registry, seed=3)
    assert len(dataset) == 15
    first = shown(dataset, 0)
    assert sum(name == "a" for name, _ in first) == 5 and set(first.values()) == {1}
    assert shown(dataset, 1) == first
    assert shown(open_dataset(["a%50", "b"], registry, seed=4), 0) != first


def test_a_weight_of_two_shows_each_sample_twice(registry):
    registry["a"].weight = 2.0
    dataset = open_dataset(["a", "b"], registry)
    assert shown(dataset, 0) == Counter({("a", n + 1): 2 for n in range(10)} | {("b", n + 1): 1 for n in range(10)})


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_weight_of_a_half_shows_each_sample_in_every_second_epoch(registry, shuffle):
    registry["a"].weight = 0.5
    dataset = open_dataset(["a"], registry, shuffle=shuffle)
    assert len(dataset) == 5
    epochs = [shown(dataset, epoch) for epoch in range(4)]
    assert epochs[0] + epochs[1] == epochs[2] + epochs[3] == Counter({("a", n + 1): 1 for n in range(10)})
    assert (epochs[0] == epochs[2]) == (not shuffle)


@pytest.mark.parametrize("weight, times", [(1.5, {1, 2}), (0.3, {0, 1}), (3.0, {3})])
def test_over_many_epochs_all_samples_come_equally_often(registry, weight, times):
    registry["a"].weight = weight
    dataset = open_dataset(["a"], registry)
    assert {shown(dataset, 0)[("a", n + 1)] for n in range(10)} == times
    total = sum((shown(dataset, epoch) for epoch in range(20)), Counter())
    assert {total[("a", n + 1)] for n in range(10)} == {round(20 * weight)}


def test_shares_and_weights_go_together(registry):
    registry["a"].weight = 2.0
    assert set(shown(open_dataset(["a%30"], registry), 0).values()) == {2}


def test_a_share_is_read_from_the_end_of_the_name():
    assert split_share("a%50") == ("a", 0.5)
    assert split_share("a%12.5") == ("a", 0.125)
    assert split_share("a%100") == ("a", 1.0)
    assert split_share("plain") == ("plain", 1.0)


@pytest.mark.parametrize("text", ["a%0", "a%", "a%-5", "a%101", "a%x", "a%1e1"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"0 < percent <= 100; write a%50 for half"):
        split_share(text)


GOOD = {"query": "What?", "response": "A.", "id": 7}
BAD = {"query": "", "response": "A."}


@pytest.fixture
def look(write_json, monkeypatch):
    monkeypatch.setattr(probe, "PROBED_SAMPLES", 4)

    def look(samples, **more):
        return probe.check_some_samples(["set%50"], {"set": DatasetEntry(str(write_json(samples)))}, 0, False, **more)

    return look


def test_keys_that_are_not_read_are_named_and_counted(look):
    told = look([GOOD | {"topic": "a", "score": 0}, GOOD | {"topic": "b"}] * 4)
    assert told[0].startswith("set: keys that are not read, of 4 samples: topic (4), score (")
    assert look([GOOD, GOOD | {"topic": None}] * 4) == []


def test_a_defect_ends_the_run_or_is_passed_over(look):
    with pytest.raises(DataError, match="the question is empty"):
        look([BAD] * 8)
    assert look([BAD | {"topic": "a"}] * 8, skips=True) == []


def test_a_video_for_a_model_that_sees_none_is_found_before_anything_starts(write_json, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"0")
    video = {"query": "<video>What?", "response": "A.", "videos": ["clip.mp4"]}
    entry = {"set": DatasetEntry(str(write_json([video] * 4)), str(tmp_path))}
    look = lambda **more: probe.check_some_samples(["set"], entry, 0, False, **more)
    assert look() == []
    with pytest.raises(DataError, match="a video, but this model sees images only.*on_bad_sample=skip"):
        look(no_videos="this model sees images only")
    assert look(no_videos="this model sees images only", skips=True) == []


@pytest.mark.parametrize(("largest", "dim"), [(4095, True), (40_000, False)])
def test_grey_pictures_of_few_bits_are_named(write_json, tmp_path, largest, dim):
    Image.fromarray(np.array([[0, largest]], dtype=np.uint16)).save(tmp_path / "a.png")
    shown = {"query": "<image>What?", "response": "A.", "images": ["a.png"]}
    entry = {"set": DatasetEntry(str(write_json([shown] * 4)), str(tmp_path))}
    found = probe.check_some_samples(["set"], entry, 0, False)
    assert [("4 of 4" in line and "nearly black" in line) for line in found] == [True] * dim


def test_inspect_data_counts_over_all_samples(write_json):
    samples = [GOOD | {"topic": "a"}] * 3 + [BAD] + [GOOD | {"source": "b"}]
    annotations = read_annotations("set", write_json(samples), None)
    assert probe.count_unread(annotations) == ["set: keys that are not read, of 5 samples: topic (3), source (1)"]
    assert probe.count_unread(read_annotations("set", write_json([GOOD]), None)) == []


def test_a_turns_and_a_parts_keys_are_named_as_such(write_json):
    part = {"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [part], "name": "Ann"}, {"role": "assistant", "content": "A."}]
    told = probe.count_unread(read_annotations("set", write_json([{"messages": turns}]), None))
    assert told == ["set: keys that are not read, of 1 samples: turn.name (1), part.cache_control (1)"]


def test_answers_that_end_in_the_templates_end_are_counted(look):
    told = look([GOOD | {"response": "A.<|im_end|> "}] * 8, end="<|im_end|>")
    assert [line.partition(" answers")[0] for line in told] == ["warning: set: 4 of 4"]
    assert look([GOOD | {"response": "A.\n"}] * 8, end="\n") == []


ASKED = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Yes."}]}


def digest(numbered_set: Dataset, batch: StepBatch) -> str:
    return digest_rows(rows_of(numbered_set, batch))


@pytest.fixture
def numbered_registry(write_json) -> dict[str, DatasetEntry]:
    made = {"a": write_json([ASKED] * 5), "b": write_json([ASKED] * 7, "b.jsonl")}
    return {name: DatasetEntry(annotation_path=str(path)) for name, path in made.items()}


@pytest.fixture
def numbered_set(numbered_registry: dict[str, DatasetEntry]) -> Dataset:
    return open_dataset(["a", "b"], numbered_registry)


def batch(*indices: int, epoch: int = 0) -> StepBatch:
    return StepBatch(0, epoch, 0.0, ((indices,),))


def test_it_is_the_checksum_of_names_and_rows(numbered_set: Dataset) -> None:
    rows = lambda *own: np.array(own, "<i8").tobytes()
    expected = crc32(b"a\0" + rows(1, 4) + b"b\0" + rows(0, 6))
    assert digest(numbered_set, batch(11, 4, 5, 1)) == f"{expected:08x}"


def test_every_layout_has_the_same(numbered_set: Dataset) -> None:
    layouts = [BatchLayout(1, 4, 1), BatchLayout(4, 1, 1), BatchLayout(2, 1, 2), BatchLayout(1, 1, 4)]
    samplers = [RandomSampler(len(numbered_set), layout, 3, True) for layout in layouts]
    found = [[digest(numbered_set, sampler.batch(step)) for step in range(6)] for sampler in samplers]
    assert found[1:] == found[:1] * 3
    assert len(set(found[0])) == 6  # three of each epoch, which has an order of its own


@pytest.mark.parametrize("other", [(1, 4, 5), (1, 4, 5, 10), (1, 4, 5, 11, 11), (0, 4, 5, 11)])
def test_other_samples_have_another(other: tuple[int, ...], numbered_set: Dataset) -> None:
    assert digest(numbered_set, batch(*other)) != digest(numbered_set, batch(1, 4, 5, 11))


def test_the_datasets_name_is_part_of_it(numbered_registry: dict[str, DatasetEntry]) -> None:
    alone = [open_dataset([name], numbered_registry) for name in ("a", "b")]
    assert digest(alone[0], batch(0, 1)) != digest(alone[1], batch(0, 1))
    assert digest(open_dataset(["b", "a"], numbered_registry), batch(0, 8)) == digest(
        open_dataset(["a", "b"], numbered_registry), batch(5, 1)
    )


def test_names_open_the_sample(numbered_set: Dataset) -> None:
    first, second = names(numbered_set, batch(6, 0))
    assert first.startswith("index=6, dataset 'b', line 2 of ") and first.endswith("b.jsonl")
    assert second.startswith("index=0, dataset 'a', element 1 of ")
    assert numbered_set.record(6).where == first.removeprefix("index=6, ")


def test_a_sample_of_a_later_epoch_has_the_index_of_the_first(numbered_registry: dict[str, DatasetEntry]) -> None:
    """An epoch shows half of them: the second one those that the first one did not."""
    half = {**numbered_registry, "a": replace(numbered_registry["a"], weight=0.4)}
    numbered_set = open_dataset(["b", "a"], half, shuffle=False)
    assert len(numbered_set) == 7 + 2
    (known,) = names(numbered_set, batch(7))
    assert known.startswith("index=7, dataset 'a', element 1 of ")
    (unseen,) = names(numbered_set, batch(7, epoch=1))
    assert unseen.startswith("dataset 'a', element 3 of ")


def test_a_step_without_samples_has_a_digest_too(numbered_set: Dataset) -> None:
    assert (digest(numbered_set, batch()), names(numbered_set, batch())) == ("00000000", ())


def test_a_path_is_no_part_of_it(numbered_registry: dict[str, DatasetEntry], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(Path(numbered_registry["b"].annotation_path).read_bytes())
    there = open_dataset(["b"], {"b": DatasetEntry(annotation_path=str(moved))})
    assert digest(there, batch(2, 3)) == digest(open_dataset(["b"], numbered_registry), batch(3, 2))


TEXT, VISION = [8, 1, 2, 1, 5, 5, 3], [6, 0, 1, 0, 2, 0, 0]


def table(text: list[int] = TEXT, vision: list[int] = VISION) -> Table:
    """A sample of n image tokens has 4 n patches, in one frame."""
    columns = np.zeros(len(text), LENGTH_COLUMNS)
    columns["text"], columns["vision"] = text, vision
    columns["patches"] = 4 * columns["vision"]
    columns["squares"] = columns["patches"].astype(np.int64) ** 2
    columns["pictures"], columns["targets"] = columns["vision"] > 0, 1
    columns["pairs"] = columns["text"].astype(np.int64) ** 2
    return Table(columns)


def ordered_loads(lengths: Table, layout: BatchLayout, **more) -> StepLoads:
    return step_loads(lengths, BalanceSettings(RANDOM), layout, 0, shuffle=False, **more)


def test_rows_are_added_up_by_replica_and_step() -> None:
    """One sample a row:  step 0    micro-batch 0  8 | 1    step 1    5 | 5
    replica 0 | replica 1           micro-batch 1  2 | 1              3 | a token of padding"""
    loads = ordered_loads(table(), BatchLayout(replicas=2, micro_batches=2, micro_batch_size=1))
    assert loads.tokens.tolist() == [[[8, 1], [2, 1]], [[5, 5], [3, 1]]]
    assert loads.pairs.tolist() == [[[64, 1], [4, 1]], [[25, 25], [9, 1]]]
    assert loads.vision.tolist() == [[[6, 0], [1, 0]], [[2, 0], [0, 0]]]
    assert len(loads) == 2 and loads.first == 0


def test_what_a_step_holds_is_counted_without_padding() -> None:
    totals = ordered_loads(table(), BatchLayout(2, 2, 1)).totals
    assert set(totals) == set(LENGTH_COLUMNS.names)
    assert totals["text"].tolist() == [12, 13] and totals["vision"].tolist() == [7, 2]
    assert totals["patches"].tolist() == [28, 8] and totals["squares"].tolist() == [24**2 + 4**2, 8**2]
    assert totals["pictures"].tolist() == [2, 1] and totals["targets"].tolist() == [4, 3]


def test_padding_makes_all_samples_of_a_row_as_long_as_its_longest() -> None:
    """Two samples a row: 8 1 | 2 1, then 5 5 | 3."""
    layout = BatchLayout(2, 1, 2)
    packed, padded = (ordered_loads(table(), layout, packing=packing) for packing in (True, False))
    assert packed.tokens.tolist() == [[[9, 3]], [[10, 3]]] and packed.pairs.tolist() == [[[65, 5]], [[50, 9]]]
    assert padded.tokens.tolist() == [[[16, 4]], [[10, 3]]] and padded.pairs.tolist() == [[[128, 8]], [[50, 9]]]
    assert padded.totals["text"].tolist() == packed.totals["text"].tolist() == [12, 13]
    empty = ordered_loads(table([4], [0]), layout, packing=False)
    assert empty.tokens.tolist() == [[[4, 1]]] and empty.pairs.tolist() == [[[16, 1]]]


def test_the_worst_row_is_named_with_its_samples() -> None:
    loads = ordered_loads(table(), BatchLayout(2, 1, 2))
    assert loads.worst_row() == Row(1, (4, 5), tokens=10, pairs=50, vision=2, patches=8)
    assert loads.worst_row(of_vision=0.5) == Row(0, (0, 1), tokens=9, pairs=65, vision=6, patches=24)  # 12 against 11
    assert loads.row(1, 0, 1) == Row(1, (6,), tokens=3, pairs=9, vision=0, patches=0)
    padded = ordered_loads(table(), BatchLayout(2, 1, 2), packing=False)
    assert padded.worst_row() == Row(0, (0, 1), tokens=16, pairs=128, vision=6, patches=24)


def own_sampler(lengths: Table, balancing: BalanceSettings, layout: BatchLayout, skip: bool) -> Sampler:
    """As the run makes it."""
    data = SimpleNamespace(shuffle=True, on_bad_sample="skip" if skip else "error")
    return reader._sampler(SimpleNamespace(balancing=balancing, layout=layout, seed=7, data=data), lengths)


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
    assert ordered_loads(bad, BatchLayout(1, 1, 2), on_bad_sample="skip").tokens.ravel().tolist() == [8, 2]
    with pytest.raises(DataError, match="not one sample"):
        ordered_loads(table([0, 0], [0, 0]), BatchLayout(1, 1, 2), on_bad_sample="skip")
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
    random = reader.BatchReaderSettings(model, data, layout, Division({"vision": Split()}, packing), 3)
    balanced = replace(random, balancing=BalanceSettings("isf" if packing else "length_group"))
    lengths = reader.make_reader(balanced).lengths
    for settings in (random, balanced):
        run = reader.make_reader(settings)
        for epoch in (0, 1):
            loads = step_loads(lengths, settings.balancing, layout, 3, packing=packing, epoch=epoch)
            steps = [run.step(loads.first + step) for step in range(len(loads))]
            assert {step.info.epoch for step in steps} == {epoch}
            laid = [[[one.tensors["input_ids"].numel() for one in row] for row in step.work["text"]] for step in steps]
            assert loads.tokens.tolist() == laid
            told = zip(*(loads.totals[name].tolist() for name in ("text", "patches", "targets", "pictures")))
            infos = [step.info for step in steps]
            assert list(told) == [(i.tokens, i.vision_tokens, i.target_tokens, i.images) for i in infos]
