"""Qwen2.5-VL 3B's shape with random weights, samples for it, and both its parts on one rank each in this process."""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedModel, Qwen2_5_VLConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import BatchSharder, Division
from dhp.config.devices import shipped_directory
from dhp.config.layout import read_choices
from dhp.config.schema import PartConfig
from dhp.core.batch import IGNORED, Answer, Bundle, Sampling, StepData
from dhp.core.reports import RecomputePolicies, StageReport
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.doctor.plain_model import model_inputs
from dhp.engine import encoder_engine as encoder
from dhp.engine import text_engine as text
from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import OptimizerSettings
from dhp.models.empty import part_shape
from dhp.models.load import drop_modules, drop_parameters, model_class
from dhp.models.registry import load_family
from dhp.models.tower import project_as_product
from dhp.parallel.attention.attention_kernels import attend_varlen
from dhp.parallel.tensor.styles import with_fused
from dhp.plan.count.state_bytes import RankBytes, rank_bytes
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION, pair_of, settings_of

SHAPE = "model/shapes/Qwen/Qwen2.5-VL-3B-Instruct.json"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
TINY_DEPTH = 2  # of what has full depth on a GPU


def make_shape(setting: Setting, layers: int | None = None) -> str:
    """A directory with the configuration alone. layers: of each part; None: as many as the model has, on a CPU two.
    On a CPU the layers are tiny."""
    folder = setting.folder / f"shape_{layers or 'whole'}"
    if not folder.exists():
        shape_config(setting, layers).save_pretrained(folder)
    return str(folder)


def shape_config(setting: Setting, depth: int | None = None) -> Qwen2_5_VLConfig:
    """depth: of each part; None: as many layers as the model has, on a CPU two."""
    depth = depth if depth is not None or setting.cuda else TINY_DEPTH
    shape = json.loads((Path(shipped_directory()) / SHAPE).read_text(encoding="utf-8"))
    decoder, tower = shape["text_config"], shape["vision_config"]
    if depth is not None:
        decoder |= {"num_hidden_layers": depth}
        # Of the last layers each attends to whole images, as every eighth one does.
        tower |= {"depth": depth, "fullatt_block_indexes": [depth - 1]}
    if not setting.cuda:
        decoder |= TINY | {"vocab_size": 512}
        tower |= TINY_TOWER
        shape["image_token_id"] = 505
    half = decoder["hidden_size"] // decoder["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    decoder["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return Qwen2_5_VLConfig(**{key: value for key, value in shape.items() if key != "model_type"})


def build_whole(folder: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The plain model with random weights, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(folder)._from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=dtype, attn_implementation="sdpa"
        )


@contextmanager
def built_on(device: str) -> Iterator[None]:
    """In the block, a stage of one rank builds its weights in the place of reading them."""

    def build(folder: str, dropped: Sequence[str], dtype: torch.dtype, *_: Any) -> PreTrainedModel:
        model = build_whole(folder, dtype, device)
        drop_modules(model, dropped)
        drop_parameters(model, dropped)
        return model.train()

    with patch.object(encoder, "load_part", build), patch.object(text, "load_part", build):
        yield


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch: samples of one image and so many tokens of text behind it, the half of which are targets."""

    samples: int
    grid: tuple[int, int, int]
    text_tokens: int


def sizes(setting: Setting, samples: int) -> Sizes:
    """`samples` of 4,896 patches and 1,524 tokens each; on a CPU, of 48 and 36."""
    return Sizes(samples, (1, 68, 72), 300) if setting.cuda else Sizes(samples, (1, 6, 8), 24)


def make_samples(folder: str, wanted: Sizes) -> tuple[Sample, ...]:
    """For the model of that directory; the same each time."""
    image_token = load_family(folder).processor.image_token_id
    return tuple(_sample(wanted, seed, image_token) for seed in range(wanted.samples))


def deal(setting: Setting, folder: str, samples: tuple[Sample, ...]) -> StepData:
    """One micro-batch; pixels travel in the format that the tower computes in, as in a run."""
    return _dealer(setting, folder).shard(StepSamples(0, 0, ((samples,),), ()))


def deal_prompt(setting: Setting, folder: str, sample: Sample, new_tokens: int) -> StepData:
    """One prompt, which nothing ends before it has so many new tokens."""
    return _dealer(setting, folder).shard_prompts(StepSamples(0, 0, (((sample,),),), ()), Sampling(new_tokens))


def _dealer(setting: Setting, folder: str) -> BatchSharder:
    family = load_family(folder)
    return BatchSharder(family, Collator(family, 0, packing=True), Division({VISION: Split(dtype=setting.format)}))


def _sample(wanted: Sizes, seed: int, image_token: int) -> Sample:
    rng = np.random.default_rng(seed)
    patches = wanted.grid[0] * wanted.grid[1] * wanted.grid[2]
    text = rng.integers(3, 500, wanted.text_tokens)
    ids = np.concatenate([np.full(patches // 4, image_token), text]).astype(np.int64)
    labels = np.where(np.arange(len(ids)) < len(ids) - wanted.text_tokens // 2, IGNORED, ids)
    pixels = rng.standard_normal((patches, 3 * 2 * 14 * 14), dtype=np.float32)
    return Sample("made", seed, ids, labels, (ids == image_token).astype(np.int64), (pixels,), (wanted.grid,))


def states_of(setting: Setting, folder: str, part: str) -> RankBytes:
    """Of the whole part of the model in that directory on one rank."""
    family = load_family(folder)
    own = family.parts[part]
    shape = part_shape(folder, family.outside(part), added_plan=with_fused(own.tensor_plan, own.fused))
    config = PartConfig(dtype=setting.format, data=1, ring=1, ulysses=1, tensor=1)
    return rank_bytes(config, pair_of(family).stage(part), shape)


UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
Mark = Callable[[str], None]


@cache
def join() -> None:
    """A group of this process alone, and the allocator's settings of a rank."""
    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():  # as a run's ranks: a row that had no room must leave none in pieces
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as ranks have it
        torch._C._accelerator_setAllocatorSettings(settings)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def start(setting: Setting, part: str, folder: str, recompute: str = "none", **changes: Any) -> Any:
    """A trainer of that part, with random weights. changes: of its settings."""
    join()
    own = {"dtype": setting.format, "device": setting.device} | changes
    with built_on(setting.device):
        return make_rank(settings_of(pair_of(load_family(folder)), part, folder, UPDATE, recompute, **own))


def no_mark(_: str) -> None:
    """Of a step whose phases are not timed."""


class Pair:
    """Both parts' trainers on given work, over and over."""

    def __init__(self, vision: Any, text: Any):
        self.vision, self.text = vision, text

    def hand_over(self, bundles: Sequence[Bundle]) -> Sequence[Bundle]:
        """What one part answers as the other gets it: here, as it is."""
        return bundles

    def choose(self, recompute: str) -> None:
        """What is recomputed from the next step on. Of a pair that was started with anything but "none"."""
        for trainer in (self.vision, self.text):
            trainer.layers.choose(read_choices(recompute, len(trainer.layers.choices)))

    def micro_batch(self, data: StepData, mark: Mark = no_mark) -> None:
        """Forward and back through both. mark: called with the name of each phase when it has been submitted."""
        embeddings = self.hand_over(self.vision.forward_step(0, 0, data.work[VISION][0][0]))
        mark("vision_forward")
        self.text.forward_step(0, 0, data.work[TEXT][0][0], *embeddings)
        mark("text_forward")
        gradients = self.hand_over(self.text.backward_step(0, 0, True))
        mark("text_backward")
        self.vision.backward_step(0, 0, True, *gradients)
        mark("vision_backward")

    def end_step(self, data: StepData, mark: Mark = no_mark) -> tuple[StageReport, StageReport]:
        """Norms and optimizer steps: the reports of vision and text."""
        of_vision, of_text = self.vision.grad_norm_sq(data.info), self.text.grad_norm_sq(data.info)
        reports = self.vision.optimizer_step(data.info, of_text), self.text.optimizer_step(data.info, of_vision)
        mark("update")
        return reports

    def step(self, data: StepData, mark: Mark = no_mark) -> tuple[StageReport, StageReport]:
        """A whole step of one micro-batch."""
        self.micro_batch(data, mark)
        return self.end_step(data, mark)

    def answer(self, data: StepData) -> Answer:
        """A prompt's, with its picture."""
        embeddings = self.vision.evaluate_step(0, 0, data.work[VISION][0][0])
        return self.text.generate(0, 0, data.work[TEXT][0][0], *embeddings)


def start_pair(setting: Setting, folder: str, recompute: str = "none", **changes: Any) -> Pair:
    """Both parts as `start` makes them."""
    return Pair(*(start(setting, part, folder, recompute, **changes) for part in (VISION, TEXT)))


_SHARED: dict[Any, Pair] = {}


def shared_pair(setting: Setting, **changes: Any) -> Pair:
    """The model at full depth, which rows that follow one another share: a device has room for one. changes: of its
    parts' settings."""
    key = (setting, *sorted(changes.items()))
    if key not in _SHARED:
        free()
        _SHARED[key] = start_pair(setting, make_shape(setting), "full", **changes)
    return _SHARED[key]


def free() -> None:
    """Give the device back what the shared pair has there."""
    _SHARED.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Text:
    """The text part alone, with one trainer's memory in the process: embeddings come from nowhere."""

    def __init__(self, setting: Setting, folder: str, data: StepData, recompute: str, **changes: Any):
        self.trainer = start(setting, TEXT, folder, recompute, **changes)
        self._data = data
        rows, hidden = sum(data.work[VISION][0][0].rows), self.trainer.family.config.get_text_config().hidden_size
        self._embeddings = torch.randn(rows, hidden).to(self.trainer.dtype).to(setting.device)

    def choose(self, choices: RecomputePolicies) -> None:
        """What each layer recomputes from the next step on."""
        self.trainer.set_recompute(choices)

    def step(self) -> StageReport:
        """One micro-batch, and an optimizer step."""
        self.trainer.forward_step(0, 0, self._data.work[TEXT][0][0], Bundle({"embeddings": self._embeddings.detach()}))
        self.trainer.backward_step(0, 0, True)
        self.trainer.grad_norm_sq(self._data.info)
        return self.trainer.optimizer_step(self._data.info)


def time_steps(setting: Setting, step: Callable[[Mark], Any], rounds: int = 5, budget_s: float = 6.0) -> dict[str, Any]:
    """Medians of milliseconds: "step_ms" of whole steps, and of each phase that they mark, as the device spends them.
    One step before does not count; fewer rounds where they take longer than `budget_s`, but one."""
    step(no_mark)
    taken: list[dict[str, float]] = []
    end = time.perf_counter() + budget_s
    while len(taken) < rounds and (not taken or time.perf_counter() < end):
        taken.append(_time_step(setting, step))
    return {name: round(median(one[name] for one in taken), 3) for name in taken[0]}


def _time_step(setting: Setting, step: Callable[[Mark], Any]) -> dict[str, float]:
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        if setting.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, event))
        else:
            marks.append((name, time.perf_counter()))

    setting.wait()
    begin = time.perf_counter()
    mark("begin")
    step(mark)
    setting.wait()
    step_ms = (time.perf_counter() - begin) * 1e3
    between = lambda a, b: a.elapsed_time(b) if setting.cuda else (b - a) * 1e3
    phases = {f"{name}_ms": between(before, now) for (_, before), (name, now) in zip(marks, marks[1:], strict=False)}
    return {"step_ms": step_ms} | phases


def _flash(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **how: Any) -> Any:
    """As the package flash-attn is called by transformers for a tower: [1, heads, patches, width], all windows."""
    states = (state[0].transpose(0, 1).contiguous() for state in (query, key, value))
    bounds = how["cu_seq_lens_q"].to(torch.int32)
    return attend_varlen(*states, bounds, int(how["max_length_q"]), False, how["scaling"])[None], None


def attend_in_one_call(model: Any) -> None:
    """Let the tower of a plain model attend to all windows of a layer at once."""
    ALL_ATTENTION_FUNCTIONS["flash_by_torch"] = _flash
    model.model.visual.config._attn_implementation = "flash_by_torch"


class PlainLoop:
    """Samples of one length, so that nothing is padded. checkpointing: transformers' own, of all layers. Attention is
    PyTorch's flash attention, of a tower on a GPU in one call a layer."""

    def __init__(self, setting: Setting, folder: str, samples: Sequence[Sample], checkpointing: bool):
        self.model = build_whole(folder, setting.dtype, setting.device).train()
        for module in self.model.modules():
            if isinstance(module, nn.Conv3d):
                project_as_product(module)  # or the comparison is with a library's slow convolution
        if setting.cuda:
            attend_in_one_call(self.model)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._masters = [p.detach().to(torch.float32, copy=True) for p in self.model.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._masters, UPDATE.learning_rate, UPDATE.betas, UPDATE.eps, UPDATE.weight_decay, fused=True
        )
        family = load_family(folder)
        each = [model_inputs(sample, family, self.model) for sample in samples]
        self._inputs = {name: torch.cat([one[name] for one in each]) for name in each[0] if name != "attention_mask"}
        self._inputs["labels"] = torch.stack([torch.from_numpy(sample.labels) for sample in samples])
        if setting.cuda:
            self._inputs = {name: tensor.pin_memory() for name, tensor in self._inputs.items()}

    def step(self) -> float:
        """One step; its loss."""
        inputs = {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in self._inputs.items()}
        loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self._masters, UPDATE.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self._masters)
        return float(loss.detach())
