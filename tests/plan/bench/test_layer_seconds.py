"""Layers that run by themselves: what a rank runs, and seconds of all of it. Never how many."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dhp.core.errors import ModelError
from dhp.models.registry import load_family
from dhp.plan.bench import layer_bench
from dhp.plan.bench.layer_bench import Bench, measure_layers
from dhp.plan.bench.stopwatch import Stopwatch, measure_update, stopwatch
from dhp.plan.count.row_bytes import TracedRows
from tests.helpers.tiny import save_llava_with_experts
from tests.helpers.tiny_families import save_family

TEXT = (TracedRows(16), TracedRows(48))
TOWER = (TracedRows(0, patches=64, windows=4), TracedRows(0, patches=128, windows=8))


@pytest.fixture
def watch() -> Iterator[Stopwatch]:
    with stopwatch("cpu", 1) as own:
        yield own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("part", "rows"), [("text", TEXT), ("vision", TOWER)])
def test_each_kind_of_layer_with_each_number_of_rows(
    made_model: str, part: str, rows: tuple[TracedRows, ...], dtype: str, watch: Stopwatch
) -> None:
    family = load_family(made_model)
    found = measure_layers(made_model, family, part, rows, dtype, watch, 0.5)
    kinds = dict.fromkeys(family.parts[part].layers.kinds)
    assert [(one.kind, one.rows) for one in found] == [(kind, own) for own in rows for kind in kinds]
    for one in found:
        assert one.attention is not None
        for seconds in (one.whole.forward, one.whole.backward, one.attention.forward, one.attention.backward):
            assert 0 < seconds < math.inf
        assert 0 < one.launch_s < math.inf
    assert sum(one.matrices is not None for one in found) == 1
    assert not dist.is_initialized()


def test_experts_and_deepstack_run_too(tmp_path: Path, watch: Stopwatch) -> None:
    model = str(save_family("qwen3_vl_moe", tmp_path))
    family = load_family(model)
    for part, rows in (("text", TEXT[:1]), ("vision", (TracedRows(0, patches=64),))):
        assert all(one.whole.backward > 0 for one in measure_layers(model, family, part, rows, "bfloat16", watch, 0.2))


def test_a_layer_runs_with_a_ranks_kernels_and_learns_all_of_it(made_model: str, watch: Stopwatch) -> None:
    with layer_bench._alone():
        bench = Bench(made_model, load_family(made_model), "text", "float32", watch)
        layer = bench.fill(0)
    replaced = [name for name, module in layer.named_modules() if "forward" in vars(module)]
    assert any("norm" in name for name in replaced)
    bench.passes(0, layer, TEXT[0])()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert bench.operations(0, layer, TEXT[0]) == 2 * 16 * sum(p.numel() for p in layer.parameters() if p.ndim > 1)


def test_less_time_than_it_takes_means_fewer_rows(made_model: str, watch: Stopwatch) -> None:
    rows = (TracedRows(256), TracedRows(1024))
    found = measure_layers(made_model, load_family(made_model), "text", rows, "float32", watch, 1e-3)
    assert all(one.rows.tokens < 1024 for one in found)


def test_a_part_that_looks_at_values_is_named(tmp_path_factory: pytest.TempPathFactory, watch: Stopwatch) -> None:
    model = str(save_llava_with_experts(tmp_path_factory.mktemp("experts")))
    with pytest.raises(ModelError, match="layers of the text part of .* cannot be measured by themselves"):
        measure_layers(model, load_family(model), "text", TEXT, "float32", watch, 0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_takes_time(dtype: str, watch: Stopwatch) -> None:
    assert 0 < measure_update(dtype, watch, 0.0) < 1e-3


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with stopwatch("cpu", before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
