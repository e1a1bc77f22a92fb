"""Measurements that later runs find again."""

from __future__ import annotations

from pathlib import Path

from dhp.plan.count.costs import FILE, read_costs, write_costs
from tests.plan.made import costs

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
