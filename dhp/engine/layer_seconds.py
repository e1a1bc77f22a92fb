"""Seconds of one layer of each kind of a part, alone on this device, with random weights and no other rank.

A layer's matrices and its attention are run by themselves too, so that the rates of one are not taken for the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from torch import nn

from dhp.core.errors import DhpError, ModelError
from dhp.engine.layer_bench import Bench
from dhp.engine.stopwatch import Stopwatch
from dhp.engine.traced_rows import TracedRows
from dhp.models.family import Family

_RUNS = 7  # of each layer that its runs, and those of its pieces, take as long as
_LEAST_LAUNCH_S = 1e-6
SHORTEST = 64  # tokens or patches of the first run, by whose seconds the others are chosen


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class LayerSeconds:
    """One layer, by its number in the part, with so many `rows` and all its weights trained.

    whole: of the layer. matrices: of its linear modules by themselves, and operations of their forward; None but of
    the first layer with the most rows. attention: of its attention by itself; None where the layer calls none of ours.
    launch_s: for which the host launches a forward.
    """

    layer: int
    kind: str
    rows: TracedRows
    whole: Passes
    matrices: tuple[float, Passes] | None
    attention: Passes | None
    launch_s: float


def measure_layers(
    source: str, family: Family, name: str, rows: Sequence[TracedRows], dtype: str, watch: Stopwatch, limit_s: float
) -> list[LayerSeconds]:
    """Of the part `name` of the model of `source`: the first layer of each kind, with each of `rows`. On a CPU with a
    share of each, where all of it would take longer than `limit_s`.

    dtype: in which the part computes. Raises ModelError where the part's code asks for more than shapes.
    """
    kinds = family.parts[name].layers.kinds
    try:
        with _alone():
            bench = Bench(source, family, name, dtype, watch)
            layers = {at: bench.fill(at) for at in map(kinds.index, dict.fromkeys(kinds))}
            chosen = rows if watch.device.type == "cuda" else _affordable(bench, layers, rows, limit_s)
            each_s, most = limit_s / (4 * len(chosen) * len(layers)), max(chosen, key=_count)
            measure = partial(_measure, bench, watch, each_s, kinds)
            return [
                measure(at, layer, own, own == most and at == min(layers))
                for own in chosen
                for at, layer in layers.items()
            ]
    except DhpError:
        raise
    except Exception as error:  # a family's own code may raise anything
        raise ModelError(
            f"the layers of the {name} part of {source} cannot be measured by themselves: their code asks for more "
            f"than shapes ({type(error).__name__}: {str(error)[:150]}). Plan with a known device's rates: device=NAME"
        ) from error


def _affordable(
    bench: Bench, layers: Mapping[int, nn.Module], rows: Sequence[TracedRows], limit_s: float
) -> list[TracedRows]:
    """`rows`, or the largest share of each whose layers and their pieces take no more than the limit."""
    small = _scaled(rows[0], SHORTEST / max(1, _count(rows[0])))
    for at, layer in layers.items():
        bench.passes(at, layer, small)()  # takes memory and wakes threads
    spans = [bench.passes(at, layer, small)() for at, layer in layers.items()]
    seconds = sum(one.forward + one.backward for one in spans) / _count(small)
    share = limit_s / (_RUNS * seconds * sum(map(_count, rows)))
    return list(dict.fromkeys(_scaled(own, share) for own in rows))


def _count(rows: TracedRows) -> int:
    return rows.patches or rows.tokens


def _scaled(rows: TracedRows, share: float) -> TracedRows:
    """A share of the rows; of a tower, in whole windows."""
    if not rows.patches:
        return replace(rows, tokens=max(1, round(rows.tokens * min(1.0, share))))
    windows = max(1, round(rows.windows * min(1.0, share)))
    return replace(rows, windows=windows, patches=rows.patches // rows.windows * windows)


def _measure(
    bench: Bench,
    watch: Stopwatch,
    limit_s: float,
    kinds: Sequence[str],
    at: int,
    layer: nn.Module,
    rows: TracedRows,
    with_matrices: bool,
) -> LayerSeconds:
    """All of a layer."""
    whole = watch.median(bench.passes(at, layer, rows), limit_s)
    matrices = attention = None
    if with_matrices and bench.operations(at, layer, rows):
        alone = watch.median(bench.matrices(at, layer, rows), limit_s)
        matrices = (bench.operations(at, layer, rows), Passes(alone.forward, alone.backward))
    if bench.attends(at, rows):
        alone = watch.median(bench.attention(at, rows), limit_s)
        attention = Passes(alone.forward, alone.backward)
    launch_s = whole.launch if watch.device.type == "cuda" else _launch(bench, watch, at, layer)
    return LayerSeconds(at, kinds[at], rows, Passes(whole.forward, whole.backward), matrices, attention, launch_s)


def _launch(bench: Bench, watch: Stopwatch, at: int, layer: nn.Module) -> float:
    """Of a forward on a CPU, which has no queue and launches a layer while it computes: what the fewest rows take
    beyond their products, which read all weights."""
    rows = bench.fewest_rows()
    whole, products = (watch.median(run(at, layer, rows), 0.0) for run in (bench.passes, bench.matrices))
    return max(whole.forward - products.forward, _LEAST_LAUNCH_S)


@contextmanager
def _alone() -> Iterator[None]:
    """In the block this process is all ranks of a group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
