"""Seconds of a training step with four ranks that share a row, in each way, beside a peer.

The peer outside dhp is transformers with DeepSpeed's Ulysses (`UlyssesSPAttentionHF`), a process a rank: of torch's
context parallelism the CPU has no kernels. Each rank has the next part of the row; labels are shifted before it is cut,
losses summed and divided by the count of all ranks, gradients summed once, and AdamW takes the step."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, DynamicCache

from dhp.batch.reader import BatchReader
from dhp.batch.row_shards import SequenceGroups
from dhp.batch.shard import Division
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.reports import StageReport
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.parallel.attention.shard_plan import ShardPlan, contiguous_plan
from dhp.parallel.recompute.meter import LiveStorages
from dhp.parallel.recompute.saved_tensors import SavedTensors, noting
from experiments.long_context.inference import CUT, PLAIN, CutByLayers, load_plain, prompt_of
from experiments.long_context.work import UPDATE, make_row
from experiments.longest_sequence.__main__ import largest_within
from experiments.pair import ONE, TEXT, on_ranks, pair_of, settings_of


class Decoder:
    """One rank's decoder, and the steps that it takes with the others."""

    def __init__(
        self, model: str, degrees: Degrees, recompute: str = "none", mlp_chunks: int = 1, measure: bool = False
    ):
        """measure: reports say what activations take."""
        self._model, self.degrees = model, degrees
        graph = pair_of(load_family(model), ONE, degrees)
        self._trainer = TextEngine(
            settings_of(graph, TEXT, model, UPDATE, recompute, measure=measure, mlp_chunks=mlp_chunks)
        )

    def data(self, tokens: int) -> StepData:
        """A step of one row."""
        samples = StepSamples(0, 0, (((make_row(tokens),),),), ())
        source: Any = SimpleNamespace(step=lambda _: samples)
        return BatchReader(source, load_family(self._model), 0, Division(packing=True, text=self.degrees)).step(0)

    def step(self, data: StepData) -> StageReport:
        """Forward, backward and update, as `dhp.step.step` has them."""
        shard = dist.get_rank() // self.degrees.tensor
        self._trainer.forward_step(0, 0, data.work[TEXT][0][shard])
        self._trainer.backward_step(0, 0, True)
        self._trainer.grad_norm_sq(data.info)
        return self._trainer.optimizer_step(data.info)


RATE = 1e-4


class Peer:
    """One rank's whole model, and the steps that it takes with the others."""

    def __init__(self, name: str):
        import deepspeed.comm as deepspeed_comm
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed_comm.init_distributed("gloo", verbose=False)
        self._model = AutoModelForImageTextToText.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False
        ).train()
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=self._model, core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(), micro_batch_size=1,
        )  # fmt: skip
        trained = [
            parameter for parameter in self._model.parameters() if "visual" not in _name_of(self._model, parameter)
        ]
        self._trained, self._optimizer = trained, torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    def data(self, tokens: int) -> dict[str, Tensor]:
        """This rank's part of a row."""
        ids = torch.from_numpy(make_row(tokens).input_ids)
        wanted = torch.cat([ids[1:], ids.new_full((1,), -100)])
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)
        # Three axes of rotary positions, and before them the places in the row, which DeepSpeed gathers.
        places = torch.arange(tokens)[own].expand(4, 1, -1).contiguous()
        return {"input_ids": ids[own][None], "position_ids": places, "wanted": wanted[own]}

    def step(self, data: dict[str, Tensor], tokens: int) -> float:
        """Forward, backward and update; the row's mean loss."""
        logits = self._model(input_ids=data["input_ids"], position_ids=data["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[0].float(), data["wanted"], reduction="sum") / (tokens - 1)
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self._trained] + [loss.detach()[None]])
        dist.all_reduce(flat)
        pieces = flat[:-1].split([parameter.numel() for parameter in self._trained])
        for parameter, piece in zip(self._trained, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(flat[-1])


def _name_of(model: Any, wanted: Tensor) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)


RANKS = 4
PEER = "transformers + DeepSpeed Ulysses 4"
WAYS = {
    "ulysses 4": Degrees(ulysses=4), "ring 4": Degrees(ring=4), "ring 4, each the next part": Degrees(ring=4),
    "ring 2 × ulysses 2": Degrees(ring=2, ulysses=2), "ring 2 × tensor 2": Degrees(ring=2, tensor=2),
}  # fmt: skip
LONG = 1 << 16  # tokens from which on the first round counts: what it does once is nothing beside minutes
SAME = 2e-5  # relative, of losses in float32


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way and length: median seconds, and the median over rounds of the peer's seconds to its."""
    for tokens in given.tokens:
        rounds = given.rounds if tokens < 1 << 17 else 1
        seconds = on_ranks(RANKS, _measure, model, tokens, rounds)
        for way, of_way in seconds.items():
            ratios = [peer / own for peer, own in zip(seconds[PEER], of_way, strict=True)]
            yield {
                "way": way, "layers": given.layers, "tokens": tokens, "rounds": rounds,
                "seconds": round(median(of_way), 3), "speed_to_peer": round(median(ratios), 3),
            }  # fmt: skip


def _measure(model: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """On each rank: seconds of each way in each round, all ranks' together; the first round does not count, unless
    it is long."""
    takes = dict(_takes(model, tokens))
    seconds: dict[str, list[float]] = {way: [] for way in takes}
    for number in range(rounds + (tokens < LONG)):
        losses = {}
        for way in list(takes)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            losses[way] = takes[way]()
            dist.barrier()
            if number or tokens >= LONG:
                seconds[way].append(time.perf_counter() - begun)
        if number == 0:
            _require_same(losses)
    return seconds


def _takes(model: str, tokens: int) -> Iterator[tuple[str, Callable[[], float]]]:
    for way, degrees in WAYS.items():
        decoder = Decoder(model, degrees)
        data = _contiguous(decoder, tokens) if way.endswith("the next part") else decoder.data(tokens)
        yield way, lambda decoder=decoder, data=data: _loss(decoder, data)
    peer = Peer(model)
    row = peer.data(tokens)
    yield PEER, lambda: peer.step(row, tokens)


def _contiguous(decoder: Decoder, tokens: int) -> StepData:

    def plan(lengths: Sequence[int], ring: int, ulysses: int, groups: SequenceGroups) -> ShardPlan:
        return contiguous_plan(lengths, ring, ulysses)

    with mock.patch("dhp.batch.shard.grouped_plan", plan):
        return decoder.data(tokens)


def _loss(decoder: Decoder, data: StepData) -> float:
    own = decoder.step(data).loss
    of_ranks: list[float] = [0.0] * RANKS
    dist.all_gather_object(of_ranks, own)
    return sum(of_ranks[:: decoder.degrees.tensor])


def _require_same(losses: dict[str, float]) -> None:
    """Raises RuntimeError unless all ways computed the same in their first step."""
    off = {way: loss for way, loss in losses.items() if abs(loss / losses[PEER] - 1) > SAME}
    if off:
        raise RuntimeError(f"the first losses differ from the peer's {losses[PEER]}: {off}")


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


LENGTH_WAYS = [
    Way("plain transformers, full checkpointing", plain=True), Way("full"), Way("full, mlp_chunks 16", mlp_chunks=16),
    Way("offload, mlp_chunks 16", recompute="offload", mlp_chunks=16),
    *(
        Way(f"{name}, {axis} {ranks}", Degrees(**{axis: ranks}), recompute, chunks)
        for name, recompute, chunks in (("full", "full", 1), ("offload, mlp_chunks 16", "offload", 16))
        for axis in ("ring", "ulysses")
        for ranks in (2, 4)
    ),
    Way("full, ring 2 × ulysses 2", Degrees(ring=2, ulysses=2)),
]  # fmt: skip
KEPT_WAYS = [  # as MM-SP's figure 9, where nothing is recomputed
    Way("none", recompute="none"),
    *(Way(f"none, ulysses {ranks}", Degrees(ulysses=ranks), "none") for ranks in (2, 4)),
    *(Way(f"none, ring {ranks}", Degrees(ring=ranks), "none") for ranks in (2, 4, 8)),
    Way("none, ring 2 × ulysses 4", Degrees(ring=2, ulysses=4), "none"),
]  # fmt: skip
KEPT_MIB = 8  # times the budget, since so much more is kept of a token


def measure_longest(model: str, budget_mib: int, ways: Sequence[Way] = tuple(LENGTH_WAYS)) -> Iterator[dict[str, Any]]:
    """A line for each way: tokens, and how many times those of the first way and of one rank."""
    plain, alone = 0, dict[str, int]()
    for way in ways:
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
    "dhp, ring 2 × ulysses 2": Degrees(ring=2, ulysses=2), "dhp, ring 8": Degrees(ring=8),
    "dhp, ring 2 × ulysses 4": Degrees(ring=2, ulysses=4),
}  # fmt: skip
PROMPT_WAYS = {
    PLAIN: 1,
    **{f"{CUT}, {ranks}": ranks for ranks in (2, 4)},
    **{name: of.world for name, of in SHARED.items()},
}
Peak = Callable[[int], int]


def measure_prompts(model: str, budget_mib: int) -> Iterator[dict[str, Any]]:
    """A line for each way: tokens, how many times those of one rank of its kind, and MiB of each rank."""
    found: dict[str, int] = {}
    taken: dict[str, list[int]] = {}
    for ranks in sorted(set(PROMPT_WAYS.values())):
        ways = [way for way, of in PROMPT_WAYS.items() if of == ranks]
        of_ways = on_ranks(ranks, longest_prompts, model, ways, budget_mib * MIB)
        found |= {way: tokens for way, (tokens, _) in of_ways.items()}
        taken |= {way: of_ranks for way, (_, of_ranks) in of_ways.items()}
        for way in ways:
            yield {
                "way": way, "ranks": ranks, "budget_mib": budget_mib, "tokens": found[way],
                "to_one_rank": round(found[way] / found[ALONE if way in SHARED else PLAIN], 3),
                "to_plain": round(found[way] / found[PLAIN], 3),
                "rank_mib": [round(peak / MIB, 2) for peak in taken[way]],
            }  # fmt: skip


def longest_prompts(model: str, ways: Sequence[str], budget: int) -> dict[str, tuple[int, list[int]]]:
    """On each rank: the most tokens of each way and the bytes that each rank then takes, all ranks alike. Raises
    ValueError where not even a unit fits."""
    found = {}
    for way in ways:
        peaks = _of_each(_prompt_peak(model, way))
        tokens = UNIT * largest_within(budget, lambda size, peaks=peaks: max(peaks(size)), 8 * PROMPT_WAYS[way])
        if not tokens:
            raise ValueError(
                f"{way}: a prompt of {UNIT} tokens takes more than {budget / MIB:.1f} MiB; raise --budget-mib"
            )
        found[way] = tokens, peaks(tokens // UNIT)
    return found


def _of_each(peak: Peak) -> Callable[[int], list[int]]:
    """Of each rank, for so many units of tokens; none is measured twice."""

    @cache
    def of_each(size: int) -> list[int]:
        of_ranks = [0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, peak(size * UNIT))
        return of_ranks

    return of_each


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
        asked = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "cache": DynamicCache()}
        return count(model, lambda: model.generate(input_ids=given, attention_mask=torch.ones_like(given), **asked))

    return peak


def _of_cut(name: str) -> Peak:
    way = CutByLayers(name, UNIT)

    def peak(tokens: int) -> int:
        given, cache = torch.from_numpy(make_row(tokens).input_ids)[None], DynamicCache()
        return count(way.model, lambda: way.step(given, 0, cache))

    return peak
