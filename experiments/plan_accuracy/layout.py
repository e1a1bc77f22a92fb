"""A layout: its small model with random weights, what a plan expects of it, and its actors that train."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dhp.batch.reader import BatchReader
from dhp.cluster.cluster import Cluster
from dhp.cluster.cluster import Layout as Actors
from dhp.cluster.watch import Watched, wait_all
from dhp.config.command_line import compose_config
from dhp.config.resolve import micro_batches, resolve
from dhp.core.batch import IGNORED, Batch, StepData
from dhp.core.reports import StageReport
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import slots
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.trainer.forecast.forecast import Forecast, forecast
from dhp.trainer.forecast.loads import RunLoads
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.question import Question, count_model
from dhp.trainer.forecast.samples import EqualSamples, Samples
from dhp.trainer.plan import RunPlan, plan_run
from dhp.trainer.settings import batch_layout, feed_settings, stage_settings
from experiments.pair import as_batch

IMAGE, START, END, VIDEO, WORDS = 2040, 2041, 2042, 2043, 2000
MERGED = 4  # patches of a token


@dataclass(frozen=True)
class Shape:
    """Of a model: layers, width and inner width of both parts. experts: in each of the decoder's layers; 0: none."""

    tower: tuple[int, int, int]
    decoder: tuple[int, int, int]
    experts: int = 0


SHAPES = {
    "balanced": Shape((4, 128, 384), (4, 256, 704)),
    "decoder": Shape((2, 64, 128), (6, 320, 1024)),
    "tower": Shape((8, 192, 640), (2, 128, 320)),
    "experts": Shape((3, 128, 384), (3, 128, 192), 4),
}


@dataclass(frozen=True)
class Load:
    """A sample: patches along the sides of its picture, words, and how many of these are learned."""

    rows: int
    columns: int
    words: int = 48
    targets: int = 32

    @property
    def features(self) -> int:
        """Tokens of the picture."""
        return self.rows * self.columns // MERGED

    @property
    def tokens(self) -> int:
        """All of them; one begins the sample."""
        return 1 + self.features + self.words


def save_model(folder: Path, name: str, shapes: Mapping[str, Shape] = SHAPES) -> str:
    """A model of one of these shapes, made where it is not there yet."""
    path = folder / name
    if not path.is_dir():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(_config(shapes[name])).save_pretrained(path)
    return str(path)


def _config(shape: Shape) -> Any:
    (depth, width, inner), (layers, hidden, between) = shape.tower, shape.decoder
    half = hidden // 8 // 2
    text = {
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
    }
    vision = {"depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": 4}
    vision |= {"out_hidden_size": hidden}
    places = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    places |= {"vision_end_token_id": END}
    if not shape.experts:
        vision["fullatt_block_indexes"] = [depth - 1]
        return CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision, tie_word_embeddings=False, **places)
    text |= {"num_experts": shape.experts, "num_experts_per_tok": 2, "moe_intermediate_size": between}
    text |= {"head_dim": hidden // 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision |= {"patch_size": 14, "deepstack_visual_indexes": [1], "num_position_embeddings": 1024}
    return CONFIG_MAPPING["qwen3_vl_moe"](text_config=text, vision_config=vision, tie_word_embeddings=False, **places)


def make_samples(load: Load, count: int) -> list[Sample]:
    """So many samples of that load."""
    return [_sample(load, seed) for seed in range(count)]


def _sample(load: Load, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    text = random.integers(3, WORDS, load.words)
    ids = np.concatenate([[5], np.full(load.features, IMAGE), text])
    labels = np.concatenate([np.full(len(ids) - load.targets, IGNORED), text[load.words - load.targets :]])
    kinds = (ids == IMAGE).astype(np.int64)
    pixels = random.standard_normal((load.rows * load.columns, 3 * 2 * 14 * 14), dtype=np.float32)
    grid = (1, load.rows, load.columns)
    return Sample("made", seed, ids.astype(np.int64), labels.astype(np.int64), kinds, (pixels,), (grid,))


TIMEOUT_S = 900.0
STEPS = 1000  # of a run, for its learning rate
ALWAYS = (
    "training.max_steps=1000", "cluster.device=cpu", "cluster.threads_per_actor=1", "training.warmup_ratio=0",
    "vision.num_actors=1", "vision.parallelism=none", "vision.zero_stage=0", "text.num_actors=1",
    "text.parallelism=none",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One configuration: settings as on a command line, and the samples that it trains on."""

    model: str
    load: Load
    settings: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> RunPlan:
        """Of its run. Raises ConfigError."""
        of_model = [f"{part}.model_name={self.model}" for part in ("vision", "text")]
        return plan_run(resolve(compose_config("tiny", overrides=[*ALWAYS, *of_model, *self.settings])))

    @property
    def loads(self) -> RunLoads:
        """What its ranks get."""
        load = self.load
        equal = EqualSamples(load.tokens, load.features, load.targets)
        return Samples(self.plan.family, None, equal).loads(self.plan.config)

    def expected(self, machine: Machine) -> Forecast:
        """What its run takes on that machine."""
        return forecast(Question(self.plan, count_model(self.plan), machine, self.loads))

    def data(self) -> StepData:
        """A step's, dealt to the ranks as a run's data are."""
        config = self.plan.config
        layout, feed = batch_layout(config), feed_settings(config)
        samples = make_samples(self.load, config.training.batch_size)

        def step(k: int) -> StepSamples:
            rows = slots(list(samples), layout)
            return StepSamples(k, 0, tuple(tuple(tuple(slot) for slot in row) for row in rows), ())

        source: Any = SimpleNamespace(step=step)
        more = {"packing": config.data.packing, "text": feed.text, "sequence_groups": feed.sequence_groups}
        reader = BatchReader(source, self.plan.family, 0, feed.encoders, even_calls=feed.even_calls, **more)
        return reader.step(0)


class Running:
    """The actors of a layout, and steps of one batch."""

    def __init__(self, layout: Layout, cluster: Cluster):
        plan = layout.plan
        self.graph, self.groups = plan.graph, cluster.groups
        self._stages = make_stages(plan.graph, cluster.groups)
        schedule = plan.config.training.schedule
        self._schedule = make_schedule(schedule, plan.graph, micro_batches(plan.config))
        self._batch: Batch = as_batch(layout.data(), ray.put)

    def train(self, steps: int) -> tuple[list[float], dict[str, list[StageReport]]]:
        """Seconds from the end of each step to the end of the next one, after one that does not count, and the last
        step's reports. As in a run, the next step is submitted while one runs."""
        ends, following = [], self._submit()
        for step in range(steps + 1):
            watched, reports = following
            if step < steps:
                following = self._submit()
            wait_all(watched, TIMEOUT_S)
            ends.append(time.perf_counter())
        seconds = [end - begin for begin, end in zip(ends, ends[1:])]
        return seconds, {name: ray.get(refs) for name, refs in reports.items()}

    def ask(self, method: str) -> dict[str, list[Any]]:
        """What each rank of each stage answers to a method."""
        refs = {name: group.execute_all_async(method) for name, group in self.groups.items()}
        wait_all([w for group in self.groups.values() for w in group.take_watched()], TIMEOUT_S)
        return {name: [ray.get(one)[0] for one in of_ranks] for name, of_ranks in refs.items()}

    def tell(self, method: str) -> None:
        """Call a method of each rank that answers nothing."""
        for group in self.groups.values():
            group.execute_all_async(method, returns=0)
        wait_all([w for group in self.groups.values() for w in group.take_watched()], TIMEOUT_S)

    def _submit(self) -> tuple[list[Watched], Mapping[str, Sequence[Any]]]:
        submitted = train_step(self._stages, self._schedule, self.graph.ties, self._batch)
        return [w for stage in self._stages.values() for w in stage.group.take_watched()], submitted.reports


@contextmanager
def running(layout: Layout, make: Callable[..., Any]) -> Iterator[Running]:
    """The layout's actors, on a Ray of their own. make: of a rank's settings, its engine."""
    plan = layout.plan
    with tempfile.TemporaryDirectory() as folder:
        actors = Actors(
            graph=plan.graph,
            device="cpu",
            address="local",
            threads=1,
            start_timeout_s=TIMEOUT_S,
            step_timeout_s=TIMEOUT_S,
            log_dir=folder,
            checkpoint_dir=folder,
            transport=plan.config.cluster.transport,
        )
        with Cluster(actors) as cluster:
            for stage in plan.graph.stages:
                settings = stage_settings(plan.config, plan.graph, stage, "cpu", STEPS, rules=plan.rules)
                cluster.groups[stage.name].start(make, settings)
            wait_all([w for group in cluster.groups.values() for w in group.take_watched()], TIMEOUT_S)
            yield Running(layout, cluster)
