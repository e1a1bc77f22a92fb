"""When each rank is inside which layer while a prompt is answered: layers over the ranks, and ranks that share the
prompt (LongVILA, Chen et al. 2024, section 3.3 and figure 6)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from experiments.long_context.inference import CUT, WAYS, CutByLayers, Ours, Told
from experiments.published.canvas import SIDE, TOP, Canvas
from experiments.ranks import on_ranks

RANKS, TOKENS = 2, 8_192
COLOURS = ("#00798c", "#7fc4d1", "#d1495b", "#eda5ae")  # of layers, in turn
Span = tuple[int, float, float]  # a layer, seconds of its begin and of its end


class Watch:
    """Spans of all layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.spans: list[Span] = []
        self._begun: dict[int, float] = {}
        lists = [one for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and "visual" not in name]
        for number, layer in enumerate(max(lists, key=len)):
            layer.register_forward_pre_hook(lambda *_, n=number: self._begun.__setitem__(n, time.perf_counter()))
            layer.register_forward_hook(lambda *_, n=number: self._end(n))

    def _end(self, number: int) -> None:
        self.spans.append((number, self._begun[number], time.perf_counter()))


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way and rank: seconds to the first token, and the share of them in which the rank is inside a
    layer, which includes the exchanges of one that ranks share, and their waits. With --plot a picture."""
    found = on_ranks(RANKS, _measure, model)
    for way, (seconds, ranks) in found.items():
        for rank, spans in enumerate(ranks):
            busy = sum(min(end, seconds) - begin for _, begin, end in spans if begin < seconds)
            yield {
                "way": way,
                "rank": rank,
                "tokens": TOKENS,
                "first_token_s": round(seconds, 4),
                "busy_share": round(busy / seconds, 4),
                "layers": len({layer for layer, _, _ in spans}),
            }
    if given.plot is not None:
        draw(found, given.plot)


def _measure(model: str) -> dict[str, tuple[float, list[list[Span]]]]:
    """By way seconds to the first token and each rank's spans from its begin on, of a second answer."""
    cut = CutByLayers(model, TOKENS)
    ways: dict[str, tuple[Callable[[], Told], nn.Module]] = {CUT: (cut, cut.model)}
    for name, degrees in WAYS[RANKS].items():
        if "tensor" not in name:
            ours = Ours(model, TOKENS, degrees)
            ways[f"dhp, {name}"] = (ours, ours.engine.model)
    found = {}
    for name, (way, watched) in ways.items():
        watch = Watch(watched)
        for _ in range(2):
            dist.barrier()
            watch.spans.clear()
            begins = [time.perf_counter()]  # the clock is one of all processes of a host
            dist.broadcast_object_list(begins, 0)
            (begin,) = begins
            _, seconds, _, _ = way()
        ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(ranks, [(layer, a - begin, b - begin) for layer, a, b in watch.spans])
        found[name] = (seconds, ranks)
    return found


def draw(found: Mapping[str, tuple[float, list[list[Span]]]], path: Path) -> None:
    """Write a PNG: a panel a way, a line a rank, from left to right the time to a little behind the first token."""
    canvas = Canvas(len(found))
    most = 1.05 * max(seconds for seconds, _ in found.values())
    canvas.text(canvas.left(0), 8, f"a prompt of {TOKENS:,} tokens on {RANKS} ranks, {most:.2f} s from left to right")
    canvas.text(canvas.left(0), 26, "a colour a layer; |: the first token")
    for panel, (way, (seconds, ranks)) in enumerate(found.items()):
        left, high = canvas.left(panel), SIDE / len(ranks)
        canvas.text(left, TOP - 18, way.removeprefix("transformers, "))
        canvas.frame(left)
        for rank, spans in enumerate(ranks):
            canvas.text(left - 46, TOP + (rank + 0.45) * high, f"rank {rank}")
            for layer, begin, end in spans:
                wide = (min(end, most) - begin) / most * SIDE
                if wide > 0:
                    top = TOP + (rank + 0.15) * high
                    canvas.box(left + begin / most * SIDE, top, wide, 0.7 * high, COLOURS[layer % len(COLOURS)])
        at = left + seconds / most * SIDE
        canvas.line([(at, TOP), (at, TOP + SIDE)], "#202020")
    canvas.save(path)
