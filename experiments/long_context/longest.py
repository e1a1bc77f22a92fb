"""The longest row that a training step takes within so many bytes of activations a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from dhp.core.axes import Degrees
from dhp.parallel.recompute.saved_tensors import SavedTensors, noting
from experiments.long_context.ranks import Decoder
from experiments.long_context.work import make_row
from experiments.longest_sequence.search import largest_within
from experiments.ranks import on_ranks

MIB = 1 << 20
UNIT = 64  # tokens


@dataclass(frozen=True)
class Way:
    """How a step is taken. plain: by transformers in one process, each layer under its checkpointing."""

    name: str
    degrees: Degrees = Degrees()
    recompute: str = "full"
    mlp_chunks: int = 1
    plain: bool = False


WAYS = [
    Way("plain transformers, full checkpointing", plain=True),
    Way("full"),
    Way("full, mlp_chunks 16", mlp_chunks=16),
    Way("offload, mlp_chunks 16", recompute="offload", mlp_chunks=16),
    *(
        Way(f"{name}, {axis} {ranks}", Degrees(**{axis: ranks}), recompute, chunks)
        for name, recompute, chunks in (("full", "full", 1), ("offload, mlp_chunks 16", "offload", 16))
        for axis in ("ring", "ulysses")
        for ranks in (2, 4)
    ),
    Way("full, ring 2 × ulysses 2", Degrees(ring=2, ulysses=2)),
]


def measure(model: str, budget_mib: int) -> Iterator[dict[str, Any]]:
    """A line for each way: tokens, and how many times those of the plain model and of one rank."""
    plain, alone = 0, dict[str, int]()
    for way in WAYS:
        tokens = on_ranks(way.degrees.world, _longest, model, way, budget_mib * MIB)
        plain = plain or tokens
        of_one = alone.setdefault(way.name.rpartition(", ")[0] if way.degrees.world > 1 else way.name, tokens)
        yield {
            "way": way.name,
            "ranks": way.degrees.world,
            "budget_mib": budget_mib,
            "tokens": tokens,
            "to_plain": round(tokens / plain, 3),
            "to_one_rank": round(tokens / of_one, 3),
        }


def _longest(model: str, way: Way, budget: int) -> int:
    """On each rank: the most tokens, all ranks alike."""
    peak = _plain_peak(model) if way.plain else _peak(model, way)
    known: dict[int, int] = {}

    def of_all(size: int) -> int:
        if size not in known:
            most = torch.tensor(peak(size * UNIT))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            known[size] = int(most)
        return known[size]

    return UNIT * largest_within(budget, of_all, 8 * way.degrees.world)


def _peak(model: str, way: Way) -> Any:
    decoder = Decoder(model, way.degrees, way.recompute, way.mlp_chunks, measure=True)
    return lambda tokens: decoder.step(decoder.data(tokens)).usage.peak_bytes


def _plain_peak(name: str) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32, trust_remote_code=False).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _counted(module._gradient_checkpointing_func)
    saved = SavedTensors(model)

    def peak(tokens: int) -> int:
        ids = torch.from_numpy(make_row(tokens).input_ids)[None]
        with saved.counting():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        return saved.take_peak()

    return peak


def _counted(checkpoint: Any) -> Any:
    """transformers' checkpointing, with what a layer's second run saves counted as dhp counts its own."""

    def run(function: Any, *given: Any, **named: Any) -> Any:
        begun: list[bool] = []

        def layer(*inner: Any, **keywords: Any) -> Any:
            if not begun:
                begun.append(True)
                return function(*inner, **keywords)
            with noting():
                return function(*inner, **keywords)

        return checkpoint(layer, *given, **named)

    return run
