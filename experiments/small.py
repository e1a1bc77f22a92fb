"""What experiments train: small models, samples, a made dataset; steps of them by actors or by the real entry."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from PIL import Image, ImageDraw
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.utils import logging

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader
from dhp.batch.shard import Division
from dhp.cluster.cluster import Cluster, ClusterSpec
from dhp.cluster.hangs.watch import wait_all
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Batch, StepData
from dhp.core.graph import StageGraph
from dhp.core.reports import StageReport
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.models.pretrained import load_tokenizer
from dhp.models.registry import load_family
from dhp.observe.metrics import StepMetrics, read_metrics
from dhp.step.schedule import Schedule
from dhp.step.stages import Stages, make_stages
from dhp.step.step import train_step
from dhp.tiny.tiny_model import make_tiny_model, tiny_config
from experiments.commands import run_module
from experiments.pair import VISION

IMAGE, START, END, VIDEO, WORD_IDS = 2040, 2041, 2042, 2043, 2000
PATCH_VALUES = 3 * 2 * 14 * 14
TIMEOUT_S = 900.0


def save_model(
    path: Path, text: Mapping[str, Any], vision: Mapping[str, Any], kind: str = "qwen2_5_vl", **changes: Any
) -> str:
    """A model of that type and these sizes, with random weights; the same each time. Eight heads where text has no
    other number, half as many of keys. changes: of the configuration of both."""
    heads = text.get("num_attention_heads", 8)
    third = text["hidden_size"] // heads // 2 // 3
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope["mrope_section"] = [text["hidden_size"] // heads // 2 - 2 * third, third, third]
    decoder = {"vocab_size": 2048, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    decoder |= {"rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    tower = {"num_heads": 4, "out_hidden_size": text["hidden_size"]}
    places = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    parts = {"text_config": decoder | dict(text), "vision_config": tower | dict(vision)}
    places |= {"vision_end_token_id": END, "tie_word_embeddings": False}
    config = CONFIG_MAPPING[kind](**parts, **places | changes)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    return str(path)


def save_even_model(folder: Path, tower: int, decoder: int, layers: int, tower_layers: int | None = None) -> str:
    """A Qwen2.5-VL whose parts are `tower` and `decoder` wide with four heads each, with `layers` layers each or
    `tower_layers` in the tower, of which every fourth one has full attention."""
    depth = tower_layers or layers
    text = {"hidden_size": decoder, "intermediate_size": 11 * decoder // 4, "num_hidden_layers": layers}
    vision = {"hidden_size": tower, "intermediate_size": 11 * tower // 4, "depth": depth}
    vision["fullatt_block_indexes"] = list(range(3, depth, 4))
    return save_model(folder / f"{tower}-{decoder}-{depth}-{layers}", text | {"num_attention_heads": 4}, vision)


def grow(tiny: Path, folder: Path, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Path:
    """A model of these sizes in `folder`, beside the tokenizer and the image processor of dhp's tiny one."""
    config = tiny_config(load_tokenizer(str(tiny)))
    for part, sizes in ((config.text_config, text), (config.vision_config, vision)):
        for key, value in sizes.items():
            setattr(part, key, value)
    half = config.text_config.hidden_size // config.text_config.num_attention_heads // 2
    config.text_config.layer_types = ["full_attention"] * text["num_hidden_layers"]
    config.text_config.rope_parameters["mrope_section"] = [half // 4, 3 * half // 8, 3 * half // 8]
    config.vision_config.out_hidden_size = text["hidden_size"]
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for file in tiny.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def make_sample(seed: int, grid: tuple[int, int, int], words: int, targets: int) -> Sample:
    """One picture of that grid, frames × rows × columns of patches, and words, the last of which are targets."""
    rng, patches = np.random.default_rng(seed), int(np.prod(grid))
    text = rng.integers(3, WORD_IDS, words)
    ids = np.concatenate([[5], np.full(patches // 4, IMAGE), text])
    labels = np.concatenate([np.full(len(ids) - targets, IGNORED), text[words - targets :]])
    pixels = rng.standard_normal((patches, PATCH_VALUES), dtype=np.float32)
    return Sample("made", seed, ids, labels, (ids == IMAGE).astype(np.int64), (pixels,), (grid,))


def make_samples(count: int, side: int, words: int) -> list[Sample]:
    """Samples with a picture of side × side patches and so many words each, half of them targets."""
    return [make_sample(seed, (1, side, side), words, (words + 1) // 2) for seed in range(count)]


def dealer(make: Callable[..., BatchReader], samples: Sequence[Sample], layout: BatchLayout) -> StepData:
    """A step's samples dealt out as by that layout. make: a reader of a source of steps."""

    def step(k: int) -> StepSamples:
        return StepSamples(k, 0, tuple(tuple(tuple(slot) for slot in row) for row in slots(list(samples), layout)), ())

    return make(SimpleNamespace(step=step)).step(0)


def deal(model: str, vision: Degrees, text: Degrees, samples: Sequence[Sample], micro_batches: int = 1) -> StepData:
    """The step's samples dealt out to the ranks of both parts, packed."""
    layout = BatchLayout(text.data, micro_batches, -(-len(samples) // (text.data * micro_batches)))
    encoders = {VISION: Split(vision.data, vision.sequence, stages=2 if micro_batches > 1 else 1)}
    division = Division(encoders, packing=True, text=text)
    return dealer(lambda source: BatchReader(source, load_family(model), 0, division), samples, layout)


def wait_for(groups: Iterable[Any]) -> None:
    """All that was called on these groups."""
    wait_all([watched for group in groups for watched in group.take_watched()], TIMEOUT_S)


def layout_of(graph: StageGraph, folder: str, **changes: Any) -> ClusterSpec:
    """The graph's actors, on CPUs of this host and a Ray of their own, one thread each."""
    given = {"address": "local", "threads": 1, "log_dir": folder, "checkpoint_dir": folder} | changes
    return ClusterSpec(graph=graph, device="cpu", start_timeout_s=TIMEOUT_S, step_timeout_s=TIMEOUT_S, **given)


@contextmanager
def started(
    graph: StageGraph, engines: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any], **changes: Any
) -> Iterator[Stages]:
    """The graph's stages, loaded. engines: by part; settings: by stage; changes: of the layout."""
    with tempfile.TemporaryDirectory() as folder, Cluster(layout_of(graph, folder, **changes)) as cluster:
        for stage in graph.stages:
            cluster.groups[stage.name].start(engines[stage.part], settings[stage.name])
        cluster.link()
        wait_for(cluster.groups.values())
        yield make_stages(graph, cluster.groups, cluster.linked)


def timed(
    graph: StageGraph, stages: Stages, schedule: Schedule, batch: Batch, steps: int
) -> tuple[tuple[float, ...], dict[str, list[StageReport]]]:
    """Seconds from the end of each step to the end of the next one, after one that does not count, and what all ranks
    tell of the last. As in a run, the next step is submitted while one runs."""

    def submit() -> tuple[list[Any], Mapping[str, Sequence[Any]]]:
        reports = train_step(stages, schedule, graph.ties, batch).reports
        return [watched for stage in stages.values() for watched in stage.group.take_watched()], reports

    ends, following = [], submit()
    for step in range(steps + 1):
        watched, reports = following
        if step < steps:
            following = submit()
        wait_all(watched, TIMEOUT_S)
        ends.append(time.perf_counter())
    return tuple(end - begin for begin, end in pairwise(ends)), {name: ray.get(refs) for name, refs in reports.items()}


Choice = TypeVar("Choice")

ANNOTATIONS = "annotations.json"
TOKEN_SIDE = 28  # pixels that one token of an image covers, in either direction
LONGEST = 640  # words of a sample; more are cut off, as trainers cut at what a model takes

# Sides of an image in tokens, height and width apart, and their shares.
SIDES = {4: 0.20, 6: 0.30, 8: 0.25, 10: 0.15, 14: 0.07, 18: 0.03}
# Made up of two syllables each, so that the tokenizer learns every word as one token.
WORDS = [a + b for a in "ba de fi go ku la me ni po ru sa ti".split() for b in "ban del fin gor kum lat".split()]


@dataclass(frozen=True)
class ConfigSource:
    """One of the datasets of a mixture. share: of all samples. words: mean of a sample, all turns together, whose
    logarithm is normal with deviation sigma. images: shares of their number. turns: questions and answers."""

    share: float
    words: float
    sigma: float
    images: dict[int, float]
    turns: int = 1


SOURCES = {
    "question": ConfigSource(0.40, 25, 0.6, {1: 1.0}),
    "description": ConfigSource(0.20, 120, 0.5, {1: 1.0}),
    "dialogue": ConfigSource(0.18, 160, 0.6, {1: 1.0}, turns=3),
    "several": ConfigSource(0.10, 60, 0.7, {2: 0.50, 3: 0.25, 4: 0.15, 6: 0.10}),
    "text": ConfigSource(0.12, 280, 0.9, {0: 1.0}),
}


def make_dataset(folder: Path, samples: int, seed: int) -> Path:
    """Write that many samples in LLaVA format to `folder`, annotations and PNG images; return it."""
    (folder / "images").mkdir(parents=True)
    annotations = [_sample(folder, number, Random(f"{seed}/{number}")) for number in range(samples)]
    (folder / ANNOTATIONS).write_text(json.dumps(annotations), encoding="utf-8")
    return folder


def texts(folder: Path) -> list[str]:
    """Every question and answer, to train a tokenizer on."""
    annotations = json.loads((folder / ANNOTATIONS).read_text(encoding="utf-8"))
    return [turn["value"] for sample in annotations for turn in sample["conversations"]]


def _sample(folder: Path, number: int, random: Random) -> dict[str, object]:
    """Draw one sample, save its images and return its annotation."""
    source = SOURCES[_choose(random, {name: source.share for name, source in SOURCES.items()})]
    names = [f"images/{number:05d}_{index}.png" for index in range(_choose(random, source.images))]
    for name in names:
        _image(random).save(folder / name)
    drawn = random.lognormvariate(math.log(source.words) - source.sigma**2 / 2, source.sigma)
    words = min(max(round(drawn), 2 * source.turns), LONGEST)
    turns = [turn for index in range(source.turns) for turn in _exchange(random, words, index, source.turns)]
    turns[0]["value"] = "<image>\n" * len(names) + turns[0]["value"]
    return {"id": f"{number:05d}", **({"image": names} if names else {}), "conversations": turns}


def _exchange(random: Random, words: int, index: int, turns: int) -> list[dict[str, str]]:
    """The index-th question and answer of a sample: a third of its share of the words, and the rest of them."""
    share = words * (index + 1) // turns - words * index // turns
    asked = max(share // 3, 1)
    return [
        {"from": speaker, "value": " ".join(random.choices(WORDS, k=count))}
        for speaker, count in (("human", asked), ("gpt", share - asked))
    ]


def _image(random: Random) -> Image.Image:
    width, height = (_choose(random, SIDES) * TOKEN_SIDE for _ in range(2))
    ground, colour = (tuple(random.randrange(256) for _ in range(3)) for _ in range(2))
    image = Image.new("RGB", (width, height), ground)
    corners = sorted(random.sample(range(width), 2)), sorted(random.sample(range(height), 2))
    ImageDraw.Draw(image).ellipse([pair[end] for end in range(2) for pair in corners], fill=colour)
    return image


def _choose(random: Random, shares: dict[Choice, float]) -> Choice:
    return random.choices(list(shares), list(shares.values()))[0]


# Matrices of the tower take 1.8 million multiply-adds a patch, those of the decoder 5.9 million a token.
DECODER = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
TOWER = {"hidden_size": 128, "intermediate_size": 352, "depth": 8, "fullatt_block_indexes": [3, 7]}


def make_model(folder: Path, corpus: Iterable[str]) -> Path:
    """A model directory in `folder`, with a tokenizer that learned `corpus`; return it."""
    logging.disable_progress_bar()  # one small file
    return grow(make_tiny_model(folder / "tiny", corpus), folder / "model", DECODER, TOWER)


LIMIT_S = 900.0


def train(
    config: Path,
    run_dir: Path,
    overrides: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    limit_s: float = LIMIT_S,
) -> list[StepMetrics]:
    """`python -m dhp.train_ray` with that YAML file and those overrides; its steps, oldest first. variables: of its
    environment, beside those of this process.

    Raises RuntimeError with the end of what a failed run printed, subprocess.TimeoutExpired after limit_s seconds."""
    command = ["dhp.train_ray", f"--config-path={config.parent}", f"--config-name={config.stem}"]
    run_module([*command, f"run_dir={run_dir}", *overrides], variables, limit_s)
    return read_metrics(run_dir)


def place(model: Path, data: Path, annotations: str) -> list[str]:
    """Overrides that say where the model and the dataset `made` lie; lengths are kept beside the latter."""
    return [
        f"vision.model_name={model}", f"text.model_name={model}",
        f"data.data_registry.made.annotation_path={data / annotations}", f"data.data_registry.made.data_path={data}",
        f"data.cache_dir={data / 'lengths'}",
    ]  # fmt: skip
