"""The longest row that a step takes, and the longest prompt that is answered, within so many bytes a rank.

Of a step activations count. Of an answer keys and values do, and all else that prefill holds: every storage of a rank
is counted as operations make it, without weights, up to the first token. Beside dhp's ranks, which share the prompt:
transformers in one process, and its layers dealt out over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForImageTextToText, DynamicCache

from dhp.core.axes import Degrees
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from dhp.parallel.recompute.live_storages import LiveStorages
from dhp.parallel.recompute.saved_tensors import SavedTensors, noting
from experiments.long_context.inference import CUT, PLAIN, CutByLayers, load_plain, prompt_of
from experiments.long_context.steps import UPDATE, Decoder
from experiments.long_context.work import make_row
from experiments.longest_sequence.rank import largest_within
from experiments.pair import ONE, TEXT, pair_of, settings_of
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
            "way": way.name, "ranks": way.degrees.world, "budget_mib": budget_mib, "tokens": tokens,
            "to_plain": round(tokens / plain, 3), "to_one_rank": round(tokens / of_one, 3),
        }  # fmt: skip


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


ALONE = "dhp, one rank"
SHARED = {
    ALONE: Degrees(),
    **{f"dhp, {axis} {ranks}": Degrees(**{axis: ranks}) for ranks in (2, 4) for axis in ("ulysses", "ring")},
    "dhp, ring 2 × ulysses 2": Degrees(ring=2, ulysses=2),
}
PROMPT_WAYS = {
    PLAIN: 1,
    **{f"{CUT}, {ranks}": ranks for ranks in (2, 4)},
    **{name: of.world for name, of in SHARED.items()},
}
Peak = Callable[[int], int]


def measure_prompts(model: str, budget_mib: int) -> Iterator[dict[str, Any]]:
    """A line for each way: tokens, and how many times those of one rank of its kind."""
    found: dict[str, int] = {}
    for ranks in sorted(set(PROMPT_WAYS.values())):
        ways = [way for way, of in PROMPT_WAYS.items() if of == ranks]
        found |= on_ranks(ranks, longest_prompts, model, ways, budget_mib * MIB)
        for way in ways:
            yield {
                "way": way, "ranks": ranks, "budget_mib": budget_mib, "tokens": found[way],
                "to_one_rank": round(found[way] / found[ALONE if way in SHARED else PLAIN], 3),
                "to_plain": round(found[way] / found[PLAIN], 3),
            }  # fmt: skip


def longest_prompts(model: str, ways: Sequence[str], budget: int) -> dict[str, int]:
    """On each rank: the most tokens of each way, all ranks alike. Raises ValueError where not even a unit fits."""
    found = {}
    for way in ways:
        found[way] = UNIT * largest_within(budget, _of_all(_prompt_peak(model, way)), 8 * PROMPT_WAYS[way])
        if not found[way]:
            raise ValueError(
                f"{way}: a prompt of {UNIT} tokens takes more than {budget / MIB:.1f} MiB; raise --budget-mib"
            )
    return found


def _of_all(peak: Peak) -> Peak:
    """Of the fullest rank, for so many units of tokens."""

    def of_all(size: int) -> int:
        most = torch.tensor(peak(size * UNIT))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    return of_all


def count(model: nn.Module, answer: Callable[[], Any]) -> int:
    """The most bytes of storages at any moment of `answer`, without weights and what was there before."""
    live = LiveStorages(shares=False)
    for tensor in (*model.parameters(), *model.buffers()):
        live.leave_out(tensor)
    live.begin()
    with torch.no_grad(), live:
        answer()
    return live.peak


def _prompt_peak(model: str, way: str) -> Peak:
    """From a number of tokens to the bytes that this rank takes at most."""
    if way in SHARED:
        return _of_shared(model, SHARED[way])
    return _of_plain(model) if way == PLAIN else _of_cut(model)


def _of_shared(model: str, degrees: Degrees) -> Peak:
    family = load_family(model)
    engine = TextEngine(settings_of(pair_of(family, ONE, degrees), TEXT, model, UPDATE))

    def peak(tokens: int) -> int:
        prompt = prompt_of(family, tokens, degrees, new=1)
        return count(engine.model, lambda: engine.generate(0, 0, prompt))

    return peak


def _of_plain(name: str) -> Peak:
    model = load_plain(name)

    def peak(tokens: int) -> int:
        given = torch.from_numpy(make_row(tokens).input_ids)[None]
        asked = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "past_key_values": DynamicCache()}
        return count(model, lambda: model.generate(input_ids=given, attention_mask=torch.ones_like(given), **asked))

    return peak


def _of_cut(name: str) -> Peak:
    way = CutByLayers(name, UNIT)

    def peak(tokens: int) -> int:
        given, cache = torch.from_numpy(make_row(tokens).input_ids)[None], DynamicCache()
        return count(way.model, lambda: way.step(given, 0, cache))

    return peak
