"""How often an epoch shows a sample: `name%50`, weights, and both."""

from __future__ import annotations

from collections import Counter

import pytest

from dhp.config.data import DatasetEntry
from dhp.config.parts import split_share
from dhp.core.errors import ConfigError
from dhp.data.sampling.dataset import open_dataset


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
