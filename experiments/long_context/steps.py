"""Seconds of a training step with four ranks that share a row, in each way, beside a peer.

The peer outside dhp is transformers with DeepSpeed's Ulysses (`UlyssesSPAttentionHF`), a process a rank: of torch's
context parallelism the CPU has no kernels. Each rank has the next part of the row; labels are shifted before it is cut,
losses summed and divided by the count of all ranks, gradients summed once, and AdamW takes the step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.batch.reader import BatchReader
from dhp.batch.row_shards import SequenceGroups
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.reports import StageReport
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.settings import OptimizerSettings
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from dhp.parallel.attention.shard_plan import ShardPlan, contiguous_plan
from experiments.long_context.work import make_row
from experiments.pair import ONE, TEXT, pair_of, settings_of
from experiments.ranks import on_ranks

UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 10**6, None)


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
        return BatchReader(source, load_family(self._model), 0, packing=True, text=self.degrees).step(0)

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
            model_name_or_path=self._model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=1,
        )
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
    """A row cut as rings that are not balanced cut it."""

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
