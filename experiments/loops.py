"""Tiny models made wide, samples of mixed lengths, and a step of them by dhp and by a plain loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from dhp.batch.collate import Collator, pixels_by_argument
from dhp.batch.shard import BatchSharder, Division
from dhp.core.batch import IGNORED, StepData
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.doctor.trial import SampleMaker
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.contract.random_rows import kinds_for, token_types
from dhp.models.contract.twin import ProbeModel
from dhp.models.registry import load_family
from dhp.objectives.objectives import find_objective
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import evaluate_batch, train_step
from experiments.pair import TEXT, VISION, Here, as_batch, pair_of, settings_of
from tests.helpers.tiny_families import FAMILIES, VOCABULARY

WIDER = 8  # times as wide as in the tests
WORDS = 4096  # rows of the vocabulary
PATCH = 14  # pixels along a side
SIDE = 16  # patches along a side of a picture where all have one size
CELLS = 4  # times as many patches along a side of a picture of any size as the doctor's have

# Numbers of a configuration that are widths, by their factor.
_TIMES = {
    **dict.fromkeys(
        ("hidden_size", "head_dim", "global_head_dim", "embed_dim", "out_hidden_size", "projection_dim",
         "query_pre_attn_scalar", "hidden_size_per_layer_input", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
         "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "projection_hidden_size",
         "moe_intermediate_size", "shared_expert_intermediate_size", "mrope_section", "d_model", "output_dim",
         "downsample_hidden_size"),
        WIDER,
    ),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "alignment_intermediate_size"), 2 * WIDER),
    "sliding_window": 2 * WIDER,
    "max_position_embeddings": WIDER,
}  # fmt: skip
_PIXELS = ("image_size", "patch_size", "window_size", "image_grid_pinpoints")


def make_config(name: str) -> PreTrainedConfig:
    """Of a case of `tests.helpers.tiny_families`, widened."""
    model_type, arguments = FAMILIES[name]
    return CONFIG_MAPPING[model_type](**_wide(arguments, _patch(arguments["vision_config"])))


def save_model(name: str, folder: Path) -> str:
    """A model of the case with random weights, as an ordinary directory."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(make_config(name)).save_pretrained(folder)
    return str(folder)


def grow(picture: dict[str, Any], seed: int) -> dict[str, Any]:
    """A picture of the doctor's with `CELLS` times as many patches along each side, where its family's may have any
    number; else as it is. The arguments of one picture are those of `dhp.models.contract.random_pictures`."""
    random = torch.Generator().manual_seed(seed)
    pixels = picture["pixel_values"]
    drawn = lambda *shape: torch.randn(*shape, dtype=pixels.dtype, generator=random)
    for name in ("image_grid_thw", "image_grid_hw"):
        if name in picture:
            grid = picture[name].clone()
            grid[:, -2:] *= CELLS
            return picture | {"pixel_values": drawn(len(pixels) * CELLS**2, *pixels.shape[1:]), name: grid}
    if "target_sizes" in picture:
        shape = (*pixels.shape[:-1], pixels.shape[-1] * CELLS**2)
        return picture | {"pixel_values": drawn(*shape), "target_sizes": picture["target_sizes"] * CELLS}
    if "image_position_ids" in picture:
        return _positioned(picture, drawn)
    if "image_sizes" in picture and pixels.ndim == 4:
        shape = (*pixels.shape[:2], *(CELLS * side for side in pixels.shape[2:]))
        return picture | {"pixel_values": drawn(*shape), "image_sizes": picture["image_sizes"] * CELLS}
    return picture


def _positioned(picture: dict[str, Any], drawn: Any) -> dict[str, Tensor]:
    """Patches in rows of one length, with their places; -1 where there is none."""
    places = picture["image_position_ids"][0]
    columns, rows = ((places.max(0).values + 1) * CELLS).tolist()
    most = len(places) * CELLS**2
    pixels = torch.zeros(1, most, picture["pixel_values"].shape[-1], dtype=picture["pixel_values"].dtype)
    pixels[:, : rows * columns] = drawn(1, rows * columns, pixels.shape[-1]).sigmoid()
    wide = torch.full((1, most, 2), -1)
    down, along = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    wide[0, : rows * columns] = torch.stack([along.flatten(), down.flatten()], dim=-1)
    return {"pixel_values": pixels, "image_position_ids": wide}


def _patch(vision: dict[str, Any]) -> int:
    size = vision["patch_size"]
    return size[0] if isinstance(size, list) else size


def _wide(value: Any, patch: int, key: str = "") -> Any:
    """A part of a configuration, widened. patch: the tiny model's patches, pixels along a side."""
    if isinstance(value, dict):
        return {name: _wide(inner, patch, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_wide(inner, patch, key) for inner in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key in _PIXELS:
        # What is a picture's side in the tests has 4 or 8 patches.
        return value * PATCH // patch * (1 if key in ("patch_size", "window_size") else SIDE // 4)
    if key in ("vocab_size", "vocab_size_per_layer_input") and value == VOCABULARY:
        return WORDS
    if key in ("mm_tokens_per_image", "image_seq_length"):
        return value * (SIDE // 4) ** 2
    if key in ("num_position_embeddings", "pos_emb_height", "pos_emb_width"):
        return value * SIDE
    return value * _TIMES.get(key, 1)


MICRO_BATCHES, ROWS = 2, 4  # samples of a micro-batch
LR, CLIP = 1e-4, 1.0
UPDATE = OptimizerSettings(LR, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, CLIP)
# Words of a sample: log-normal, as conversations about pictures are: most are short and some are long.
MEDIAN, SPREAD, FEWEST, MOST = 90, 0.9, 16, 600
EVEN = 128  # words of a sample where all have as many
PICTURES = {0: 0.15, 1: 0.6, 2: 0.15, 3: 0.1}  # of a sample, and how often it has so many


MicroBatches = tuple[tuple[Sample, ...], ...]


def now() -> float:
    """Seconds. Where one thread computes, its own are those of the work, whoever else is on the machine."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Data:
    """Steps of one model's samples. even: all of one length, each with one picture, so that packing gains nothing."""

    def __init__(self, model: str, even: bool = False):
        self._even = even
        self.family = load_family(model)
        twin = ProbeModel(AutoConfig.from_pretrained(model, trust_remote_code=False))
        own = twin.make
        twin.make = lambda number: grow(own(number), number)
        self._maker = SampleMaker(twin, self.family)

    def step(self, number: int) -> MicroBatches:
        """The samples of a step by micro-batch; the same for the same number."""
        rng = np.random.default_rng(number)
        return tuple(tuple(self._sample(rng) for _ in range(ROWS)) for _ in range(MICRO_BATCHES))

    def _sample(self, rng: np.random.Generator) -> Sample:
        count = rng.choice(list(PICTURES), p=list(PICTURES.values()))
        numbers = rng.integers(1, 4, size=count).tolist()  # not 0, whose tokens the twin knows already, ungrown
        words = int(np.clip(rng.lognormal(np.log(MEDIAN), SPREAD), FEWEST, MOST))
        if self._even:
            numbers, words = [1], EVEN
        shown = self._maker.sample(numbers, 0, int(rng.integers(1 << 30)))
        said = rng.integers(10, 300, words)
        labels = np.where(np.arange(words) < words // 3, IGNORED, said)  # a question, and an answer twice as long
        return replace(
            shown,
            input_ids=np.concatenate([shown.input_ids, said]),
            labels=np.concatenate([np.full_like(shown.labels, IGNORED), labels]),
            mm_token_type_ids=np.concatenate([shown.mm_token_type_ids, np.zeros(words, dtype=np.int64)]),
        )


class Ours:
    """dhp's trainers of both parts in this process, one rank each, and its step."""

    def __init__(
        self,
        model: str,
        data: Data,
        packing: bool = True,
        trainers: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        **changes: Any,
    ):
        """trainers: by part, in the place of the product's. changes: of both parts' settings."""
        self._graph = graph = pair_of(data.family)
        every = {VISION: EncoderEngine, TEXT: TextEngine, **trainers}
        self.trainers = {s: t(settings_of(graph, s, model, UPDATE, **changes)) for s, t in every.items()}
        self._stages = make_stages(graph, {stage: Here(trainer) for stage, trainer in self.trainers.items()})
        self._schedule = make_schedule("sequential", graph, MICRO_BATCHES)
        objective = find_objective(changes.get("objective", "sft"))
        self._dealer = BatchSharder(data.family, Collator(data.family, 0, packing, objective), Division())

    def shard(self, samples: MicroBatches) -> StepData:
        """What other processes do ahead of a step."""
        return self._dealer.shard(StepSamples(0, 0, tuple((row,) for row in samples), ()))

    def step(self, data: StepData) -> tuple[float, float]:
        """Seconds and loss of a whole step."""
        begin = now()
        (report,) = train_step(self._stages, self._schedule, (), as_batch(data)).reports[TEXT]
        return now() - begin, report.loss

    def evaluate(self, data: StepData) -> float:
        """The loss of a batch, without a step."""
        (share,) = evaluate_batch(self._stages, self._graph, as_batch(data)).shares
        return share.loss


class Plain:
    """transformers' model and the usual loop: rows padded on the right with their mask, AdamW, clipping."""

    def __init__(self, model: str, data: Data, adapt: Callable[[nn.Module], nn.Module] = lambda model: model):
        """adapt: what is made of the model before it is trained."""
        self._family, self._collator = data.family, Collator(data.family, 0, packing=False)
        own = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
        self._forward: Any = type(own).forward
        self.model = adapt(own).train()
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=UPDATE.weight_decay, fused=True)

    def shard(self, samples: MicroBatches) -> list[dict[str, Tensor]]:
        """The arguments of each micro-batch, which a data loader's processes make ahead of a step."""
        return [self._collate(row) for row in samples]

    def step(self, micro_batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
        """Seconds and loss of a whole step."""
        begin = now()
        targets = sum(int((named["labels"][:, 1:] != IGNORED).sum()) for named in micro_batches)
        total = torch.zeros(())
        for named in micro_batches:
            given = {name: value for name, value in named.items() if name != "labels"}
            logits = self.model(**given, use_cache=False).logits[:, :-1]
            wanted = named["labels"][:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
            (loss / targets).backward()
            total += loss.detach() / targets
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return now() - begin, total.item()

    def _collate(self, row: Sequence[Sample]) -> dict[str, Tensor]:
        named = self._collator.padded(tuple(row)) | pixels_by_argument(tuple(row))
        pairs = zip(named["mm_token_type_ids"].split(1), named["labels"].split(1), strict=True)
        kinds = torch.cat([token_types(self._family.config, *pair) for pair in pairs])  # of one sample each
        plain = self._family.processor.plain_inputs(named) | kinds_for(self._forward, kinds)
        plain.pop("position_ids")  # the model makes them of the mask and the grids
        lengths = torch.tensor([len(sample.input_ids) for sample in row])
        mask = torch.arange(plain["input_ids"].shape[1]) < lengths[:, None]
        return plain | {"attention_mask": mask.long()}
