"""Lengths of some samples, from which a run says what it is expected to take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dhp.batch.reader import BatchReader, make_reader
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.plan.batches import feed_settings


def reader(assets: Path, cache: Path, *overrides: str) -> BatchReader:
    own = [f"data.data_registry.shapes.annotation_path={assets / 'data/annotations.json'}", f"data.cache_dir={cache}"]
    models = [f"{part}.model_name={assets / 'model'}" for part in ("vision", "text")]
    paths = [f"data.data_registry.shapes.data_path={assets / 'data'}"]
    return make_reader(feed_settings(resolve(compose_config("tiny", None, [*own, *models, *paths, *overrides]))))


def test_some_samples_are_measured_and_no_more(tiny_assets: Path, tmp_path: Path) -> None:
    found = reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(16, 60.0)
    assert found.dtype == LENGTH_COLUMNS and len(found) == 16
    assert (found["text"] > found["vision"]).all() and found["pictures"].any()
    (one,) = reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(16, 0.0)  # one at least
    assert one["text"] > 0


def test_where_all_are_known_all_are_given(tiny_assets: Path, tmp_path: Path) -> None:
    balanced = reader(tiny_assets, tmp_path, "data.balance=balanced")
    for chunk in balanced.missing():
        balanced.learn(chunk, balanced.measure(chunk))
    found = balanced.some_lengths(16, 0.0)
    assert len(found) == balanced.dataset_size
    np.testing.assert_array_equal(found, balanced.lengths.columns(np.arange(len(found)), 0))


def test_a_cache_that_cannot_be_written_ends_no_run(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = reader(tiny_assets, tmp_path / "file", "data.balance=random").some_lengths(16, 60.0)
    assert not len(found)


@pytest.mark.parametrize("most", [1, 7])
def test_samples_are_spread_over_the_epoch(tiny_assets: Path, tmp_path: Path, most: int) -> None:
    assert len(reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(most, 60.0)) == most
