"""The figures of a run, and the generated data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.observe.metrics import StepMetrics
from experiments.balance_effect.__main__ import counted, require_same_samples, row
from experiments.balance_effect.made import ANNOTATIONS, SOURCES, make_dataset


def step(number: int, samples: int, step_s: float, pad: float = 0.0) -> StepMetrics:
    dist = {"vision": 0.1, "text": 0.2}
    return StepMetrics(
        step=number, samples=samples, tokens=100 * samples, step_s=step_s, data_s=0.0, pad_ratio=pad, dist_ratio=dist
    )


def test_a_short_step_counts_by_its_samples_and_warm_up_not_at_all() -> None:
    run = counted([step(1, 8, 100.0), step(2, 8, 1.0), step(3, 2, 1.0)], warm_up=1)
    assert run.samples == 18
    assert run.samples_per_s == 5.0
    assert run.tokens_per_s == 500.0


def test_padding_is_of_all_places_of_the_run() -> None:
    run = counted([step(1, 9, 1.0, pad=0.1), step(2, 1, 1.0, pad=0.9)], warm_up=0)
    assert run.pad_ratio == pytest.approx(1 - 1000 / 2000)


def test_a_speedup_is_over_the_same_round() -> None:
    runs = [counted([step(1, 8, seconds)], 0) for seconds in (1.0, 1.0, 4.0)]
    base = [counted([step(1, 8, seconds)], 0) for seconds in (2.0, 3.0, 16.0)]
    found = row("made", runs, base)
    assert found["speedups"] == [2.0, 3.0, 4.0]
    assert found["speedup"] == 3.0
    assert found["dist_ratio"] == {"vision": 0.1, "text": 0.2}


def test_methods_that_show_fewer_samples_are_refused() -> None:
    with pytest.raises(RuntimeError, match="'short': 7"):
        require_same_samples({"random": counted([step(1, 8, 1.0)], 0), "short": counted([step(1, 7, 1.0)], 0)})


def test_the_same_seed_gives_the_same_data(tmp_path: Path) -> None:
    first, second = (make_dataset(tmp_path / name, 40, seed=3) for name in ("first", "second"))
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    annotations = json.loads((first / ANNOTATIONS).read_text())
    assert len(annotations) == 40
    for sample in annotations:
        tags = sample["conversations"][0]["value"].count("<image>")
        assert tags == len(sample.get("image", [])) == sum(f"{sample['id']}_" in str(file) for file in files)


def test_shares_are_of_a_whole() -> None:
    assert sum(source.share for source in SOURCES.values()) == pytest.approx(1)
    assert all(sum(source.images.values()) == pytest.approx(1) for source in SOURCES.values())
