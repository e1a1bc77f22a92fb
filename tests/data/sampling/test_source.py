from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dhp.config.data import DatasetEntry
from dhp.core.errors import ConfigError, DataError
from dhp.data.sampling.dataset import BatchSource, open_dataset
from dhp.data.sampling.sampler import BatchLayout, RandomSampler


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
