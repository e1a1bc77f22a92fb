"""Layers: compiled, by dhp's kernels, cut over tensor ranks, with experts shared out over replicas."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from dhp.cluster.host import keep_freed_memory
from dhp.config.rules import KERNELS, PLAIN
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.core.reports import StageReport
from dhp.core.tracing import ALL_REDUCE, ALL_TO_ALL
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.load import load_part
from dhp.models.registry import load_family
from dhp.parallel.recompute.recomputed_layers import RecomputedLayers
from dhp.parallel.tensor.slices import use_local_slices
from dhp.parallel.tensor.tensor_plan import local_plan
from dhp.tiny.tiny_model import make_tiny_assets
from experiments.loops import Data, Ours, save_model
from experiments.pair import TEXT, join_alone, on_ranks, pair_of, settings_of
from experiments.small import deal

COMPILED = ("qwen2_5_vl", "llava_clip")
KERNELED = ("qwen2_5_vl", "qwen3_vl", "llava_clip", "gemma3", "glm4v")
WAYS = {"tensor 1": (1, False), "tensor 2, library's styles": (2, False), "tensor 2": (2, True)}
TOKENS, LAYERS = 16, 12


def compiled(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each family; in the first three steps layers are compiled, for one length and then for any."""
    for name in given.families or COMPILED:
        torch.compiler.reset()
        row, _ = in_turn(name, given.rounds or 9, 3, "compiled", {}, {"compile": True})
        yield row


def kernels(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each family."""
    for name in given.families or KERNELED:
        plain = {"kernels": ",".join(f"{kind}:{PLAIN}" for kind in KERNELS)}
        row, ours = in_turn(name, given.rounds or 9, 2, "kernels", plain, {})
        served = {use.kind: use.kernel for trainer in ours.trainers.values() for use in trainer.describe_kernels()}
        yield row | {"dtype": "float32", "kernels": {kind: served[kind] for kind in KERNELS if kind in served}}


def in_turn(
    name: str, steps: int, warm_up: int, label: str, plain: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[dict[str, Any], Ours]:
    """Steps of `experiments.loops`' samples by both settings of the trainers in turn, on one thread; the row, and
    the other trainers. ratio: the median of plain seconds to the others'; deviation: of a step's loss, the largest."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(name, Path(folder))
        data = Data(model)
        # The compiled one last: what computes attention is registered by name, and cuts compiled layers.
        ways = Ours(model, data, **plain), Ours(model, data, **other)
        taken, worst, begin, warm_up_s = [], 0.0, time.perf_counter(), 0.0
        for number in range(warm_up + steps):
            warm_up_s = time.perf_counter() - begin if number == warm_up else warm_up_s
            batch, found = data.step(number), {}
            for way in ways if number % 2 else ways[::-1]:
                found[way] = way.step(way.shard(batch))
            taken.append((found[ways[0]][0], found[ways[1]][0]))
            worst = max(worst, abs(found[ways[1]][1] / found[ways[0]][1] - 1))
    before, after = (median(side) for side in zip(*taken[warm_up:], strict=True))
    row = {
        "family": name,
        "ratio": round(median(p / o for p, o in taken[warm_up:]), 3),
        "plain_step_s": round(before, 3),
    }
    row |= {f"{label}_step_s": round(after, 3), "warm_up_s": round(warm_up_s, 1), "deviation": float(f"{worst:.1e}")}
    return row | {"threads": torch.get_num_threads(), "steps": steps}, ways[1]


def tensor_host(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way to cut a layer, and kind of recomputing: tiny matrices and a fake process group, so that all
    the time is Python's and the dispatcher's; medians of interleaved rounds."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_deep_model(Path(folder), LAYERS))
        for recompute in ("none", "all"):
            steps = {way: make_step(model, *how, recompute) for way, how in WAYS.items()}
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for number in range((given.rounds or 15) + 3):
                for way, step in steps.items():
                    seconds = step()
                    found[way] += [seconds] if number >= 3 else []  # the first rounds fill caches
            medians = {way: [median(run[k] for run in runs) for k in (0, 1)] for way, runs in found.items()}
            for way, passes in medians.items():
                forward, backward = (round(seconds / LAYERS * 1e3, 3) for seconds in passes)
                row = {"recompute": recompute, "way": way, "forward_ms_a_layer": forward}
                ratio = round(sum(passes) / sum(medians["tensor 1"]), 2)
                yield row | {"backward_ms_a_layer": backward, "ratio": ratio}
    dist.destroy_process_group()


def make_deep_model(folder: Path, layers: int) -> Path:
    """The tiny model with more decoder layers, so that what comes before and after them counts for little."""
    make_tiny_assets(folder / "tiny")
    config = AutoConfig.from_pretrained(folder / "tiny" / "model", trust_remote_code=False)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = ["full_attention"] * layers
    config.vision_config.depth = 2
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "deep")
    return folder / "deep"


def make_step(model: str, ranks: int, local: bool, recompute: str) -> Callable[[], tuple[float, float]]:
    """What runs the decoder once; seconds of the process in forward and in backward."""
    from torch.distributed.device_mesh import init_device_mesh

    family = load_family(model)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)) if ranks > 1 else None
    more = {"read_plan": local_plan} if local else {}
    decoder: nn.Module = load_part(model, family.tower.modules, torch.float32, mesh, **more)
    if local:
        use_local_slices(decoder)
    layers = list(decoder.get_submodule(family.decoder.layers.path))
    RecomputedLayers(layers, family.decoder.layers, (recompute,) * len(layers))
    tokens, positions = torch.full((1, TOKENS), 5), torch.zeros(3, 1, TOKENS, dtype=torch.long)

    def step() -> tuple[float, float]:
        begin = time.process_time()
        states = decoder.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        middle = time.process_time()
        states.sum().backward()
        return middle - begin, time.process_time() - middle

    return step


SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SIZES |= {"intermediate_size": 512, "vocab_size": 512}


def make_model(folder: Path, **sizes: int) -> Path:
    """A LLaVA with random weights and a decoder with experts; its tower is as small as may be."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=Qwen3MoeConfig(**SIZES | sizes), vision_config=vision, image_token_index=505)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def compare(rounds: int, tokens: int, **sizes: int) -> list[dict[str, Any]]:
    """A row for each layout; tokens: of each sample."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder) / "model", **sizes))
        found: list[dict[str, Any]] = on_ranks(RANKS, _measure, model, tokens, rounds)
    return found


RANKS, MICRO_BATCHES, SAMPLES = 2, 2, 8
TENSOR = "tensor 2"
SPLITS = {TENSOR: Degrees(tensor=RANKS), "expert 2": Degrees(data=RANKS, expert=RANKS), "data 2": Degrees(data=RANKS)}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 1000, None)


@dataclass(frozen=True)
class Way:
    """A layout of the decoder on this rank, and its share of the step's data."""

    trainer: TextEngine
    data: StepData
    replica: int

    def step(self) -> tuple[float, StageReport]:
        """Seconds of a whole step, from the moment when all ranks begin it, and what the rank tells."""
        dist.barrier()
        begin = time.perf_counter()
        for number, row in enumerate(self.data.work[TEXT]):
            self.trainer.forward_step(number, 0, row[self.replica])
            self.trainer.backward_step(number, 0, number == MICRO_BATCHES - 1)
        self.trainer.grad_norm_sq(self.data.info)
        report = self.trainer.optimizer_step(self.data.info)
        dist.barrier()
        return time.perf_counter() - begin, report

    def expert_bytes(self) -> int:
        """Of this rank's experts."""
        named = self.trainer.model.named_parameters()
        return sum(parameter.nbytes for name, parameter in named if ".experts." in name)


def make_samples(tokens: int) -> list[Sample]:
    """Text alone, of one length: the tower would be the same in all layouts."""
    found, rng = [], np.random.default_rng(0)
    for number in range(SAMPLES):
        ids = rng.integers(3, 300, tokens)
        labels = np.where(np.arange(tokens) < tokens // 2, IGNORED, ids)
        found.append(Sample("made", number, ids, labels, np.zeros(tokens, dtype=np.int64), (), (), ()))
    return found


def make_way(model: str, split: Degrees, samples: list[Sample]) -> Way:
    """Load the decoder, cut so."""
    graph = pair_of(load_family(model), text=split)
    trainer = TextEngine(settings_of(graph, TEXT, model, UPDATE))
    data = deal(model, Degrees(), split, samples, MICRO_BATCHES)
    return Way(trainer, data, dist.get_rank() // split.tensor)


def _measure(model: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One rank: rounds that visit all ways in turn, every other round the other way around, the first left out."""
    samples = make_samples(tokens)
    ways = {name: make_way(model, split, samples) for name, split in SPLITS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    reports: dict[str, StageReport] = {}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            seconds, reports[name] = ways[name].step()
            times[name].append(seconds)
    return [_row(name, way, times, reports[name].sent_bytes, tokens) for name, way in ways.items()]


def _row(name: str, way: Way, times: Mapping[str, list[float]], sent: Mapping[str, int], tokens: int) -> dict[str, Any]:
    pairs = list(zip(times[name][1:], times[TENSOR][1:], strict=True))
    return {
        "text": name, "step_ratio": round(median(own / tensor for own, tensor in pairs), 3),
        "step_s": round(median(own for own, _ in pairs), 4), "all_reduce_mb": round(sent.get(ALL_REDUCE, 0) / 1e6, 2),
        "all_to_all_mb": round(sent.get(ALL_TO_ALL, 0) / 1e6, 2), "expert_mb": round(way.expert_bytes() / 1e6, 2),
        "tokens": tokens * SAMPLES, "rounds": len(pairs),
    }  # fmt: skip
