"""`python -m experiments.longest_sequence [--ranks 1 2 4] [--recompute none] [--budget-mib 64] [--shape balanced]`."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle, StepData
from dhp.core.graph import Route
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from experiments.layouts.ours import UPDATE, device_bytes
from experiments.layouts.work import DECODERS, TARGETS, TEXT_TOKENS, make_model
from experiments.pair import TEXT, VISION, on_ranks, pair_of, settings_of
from experiments.small import deal, make_sample

GUESSES = 6  # by proportion; from then on by halves, whatever the peak does


def largest_within(budget: int, peak: Callable[[int], int], start: int) -> int:
    """The largest size ≥ 1 with `peak(size)` ≤ budget, given a peak that grows with the size; 0 where there is none.

    start: the first size to try. Sizes follow from the peak of the last one, as if peaks were in proportion to sizes.
    """
    fits, too_large, size, tried = 0, None, start, 0
    while too_large is None or too_large - fits > 1:
        found, tried = peak(size), tried + 1
        if found <= budget:
            fits = size
        else:
            too_large = size
        guess = size * budget // max(found, 1)
        if too_large is not None and tried >= GUESSES:
            guess = (fits + too_large) // 2
        size = max(guess, fits + 1)
        if too_large is not None:
            size = max(min(size, too_large - 1), 1)
    return fits


WINDOW = 8  # patches along each side; the image is a strip of windows
UNIT = WINDOW**2
START = 8  # windows
MIB = 1 << 20


@dataclass(frozen=True)
class Layout:
    """How each part is split, and the ZeRO stage of both."""

    vision: Degrees
    text: Degrees
    zero_stage: int = 0
    zero_engine: str = "deepspeed"
    sharded_norms: bool = False


def layouts(ranks: int) -> dict[str, Layout]:
    """On `ranks` ranks. Pure tensor parallelism splits the tower's matrices too; ZeRO-3 gives each rank samples."""
    split, copies = Degrees(tensor=ranks), Degrees(data=ranks)
    return {
        "SP+TP": Layout(Degrees(ulysses=ranks), split),
        "SP+TP, sharded norms": Layout(Degrees(ulysses=ranks), split, sharded_norms=True), "TP": Layout(split, split),
        "TP, sharded norms": Layout(split, split, sharded_norms=True), "ZeRO-3": Layout(copies, copies, 3),
        "FSDP2": Layout(copies, copies, 3, "fsdp"),
    }  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Bytes of activations, the most at any moment: of vision alone, and of both parts together."""

    vision: int
    device: int


class Device:
    """A rank of both parts, sharing what is counted."""

    def __init__(self, model: str, layout: Layout, recompute: str):
        self._model, self._layout = model, layout
        self._graph = pair_of(load_family(model), layout.vision, layout.text)
        own = {"measure": True, "zero_stage": layout.zero_stage, "zero_engine": layout.zero_engine}
        norms = [layout.sharded_norms and part.tensor > 1 for part in (layout.vision, layout.text)]
        of_vision, of_text = ({"sequence_sharded_norms": sharded, **own} for sharded in norms)
        self._vision = EncoderEngine(settings_of(self._graph, VISION, model, UPDATE, recompute, **of_vision))
        self._text = TextEngine(settings_of(self._graph, TEXT, model, UPDATE, recompute, **of_text))
        self._known: dict[int, Peaks] = {}

    def peaks(self, size: int) -> Peaks:
        """Of the fullest rank, in a step with one image of `size` windows for each text replica; all ranks alike."""
        if size not in self._known:
            sample = partial(make_sample, grid=(1, WINDOW, WINDOW * size), words=TEXT_TOKENS, targets=TARGETS)
            samples = [sample(seed) for seed in range(self._layout.text.data)]
            data = deal(self._model, self._layout.vision, self._layout.text, samples)
            of_ranks = _gather(self._step(data))
            self._known[size] = Peaks(max(p.vision for p in of_ranks), max(p.device for p in of_ranks))
        return self._known[size]

    def _step(self, data: StepData) -> Peaks:
        """What `dhp.step.step` submits, one micro-batch, with values in place of refs."""
        of_image, of_replica = self._layout.vision.tensor, self._layout.text.tensor
        of_image_rank, replica = dist.get_rank() // of_image, dist.get_rank() // of_replica
        (route,) = data.routes[VISION]
        back_route = Route(tuple(sorted((target, source) for source, target in route.pairs)))
        given = _gather(self._vision.forward_step(0, 0, data.work[VISION][0][of_image_rank]))[::of_image]
        self._text.forward_step(0, 0, data.work[TEXT][0][replica], *_received(route, given, replica))
        back = _gather(self._text.backward_step(0, 0, True))[::of_replica]
        self._vision.backward_step(0, 0, True, *_received(back_route, back, of_image_rank))
        of_vision, of_text = (trainer.grad_norm_sq(data.info) for trainer in (self._vision, self._text))
        vision = self._vision.optimizer_step(data.info, of_text).usage
        text = self._text.optimizer_step(data.info, of_vision).usage
        return Peaks(vision.peak_bytes, device_bytes(self._graph, {VISION: vision, TEXT: text}))


def _received(route: Route, given: Sequence[Sequence[Bundle]], target: int) -> list[Bundle]:
    return [given[source][route.targets[source].index(target)] for source in route.sources.get(target, ())]


def find_longest(model: str, name: str, recompute: str, budget_mib: int) -> dict[str, int]:
    """On each rank: patches of the longest image by vision's activations and by both parts'."""
    device, budget = Device(model, layouts(dist.get_world_size())[name], recompute), budget_mib * MIB
    return {
        "device": UNIT * largest_within(budget, lambda size: device.peaks(size).device, START),
        "vision": UNIT * largest_within(budget, lambda size: device.peaks(size).vision, START),
    }


def _gather(value: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def longest(model: str, name: str, ranks: int, recompute: str, budget_mib: int) -> dict[str, int]:
    """Patches of the longest image, by what is counted. Ends the program where not even one window fits."""
    found: dict[str, int] = on_ranks(ranks, find_longest, model, name, recompute, budget_mib)
    if not all(found.values()):
        raise SystemExit(f"longest_sequence: {name} on {ranks} ranks: one window takes more than {budget_mib} MiB")
    return found


def rows(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each layout and number of ranks one row by vision's activations and one by both parts'."""
    for name in given.only or layouts(1):
        one: dict[str, int] = {}
        for ranks in given.ranks:
            found = longest(model, name, ranks, given.recompute, given.budget_mib)
            one = one or found
            for counted, patches in found.items():
                yield {
                    "layout": name, "ranks": ranks, "counted": counted, "recompute": given.recompute,
                    "shape": given.shape, "budget_mib": given.budget_mib, "patches": patches,
                    "ratio_to_one_rank": round(patches / one[counted], 3),
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the first is what ratios refer to")
    parser.add_argument("--only", nargs="+", choices=layouts(1), help="these layouts")
    parser.add_argument("--recompute", default="none", help="of both parts, as vision.recompute")
    parser.add_argument("--budget-mib", type=int, default=64, help="for the activations of a rank")
    parser.add_argument("--shape", choices=DECODERS, default="balanced")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(str(make_model(Path(folder), given.shape)), given):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
