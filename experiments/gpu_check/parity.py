"""Rows: ranks of both parts that share the device, against the plain model on the same device."""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import BatchSharder, Division
from dhp.checkpoint.folder import OPTIMIZER
from dhp.checkpoint.shard_reader import ShardReader, read_shards
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph
from dhp.core.parameters import MASTER, AdapterSettings, Selector, TrainingRules
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.doctor.plain_model import plain_gradients
from dhp.doctor.trial import SampleMaker
from dhp.engine.build import DEEPSPEED
from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.contract.twin import ProbeModel, exact_experts
from dhp.models.family import Family
from dhp.models.lora import add_adapters, find_targets
from dhp.models.quantized import quantize
from dhp.models.registry import load_family
from dhp.models.tower import project_as_product
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.gpu_check.ranks import Ranks
from experiments.gpu_check.rows import LAYOUTS
from experiments.gpu_check.setting import NotHere, Setting
from experiments.pair import TEXT, VISION, as_batch, pair_of, settings_of

LAYERS = 2
DECODER = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
TOWER = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "out_hidden_size": 64,
}  # fmt: skip
TOKENS = {"image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 503, "vision_end_token_id": 504}
DEEP = TOWER | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
WHOLE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _turned(sections: list[int]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}}


EXPERTS: dict[str, Any] = {
    "text_config": DECODER
    | _turned([2, 1, 1])
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []},
    "vision_config": DEEP,
    **TOKENS,
}
# By model type, and what is said behind it.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": DECODER | _turned([1, 1, 2]),
        "vision_config": TOWER | {"window_size": 56, "fullatt_block_indexes": [1, 3]},
        **TOKENS,
    },
    "qwen3_vl": {"text_config": DECODER | _turned([2, 1, 1]), "vision_config": DEEP, **TOKENS},
    "qwen3_vl_moe": EXPERTS,
    # Each token visits each expert: which two it visits is decided by rounding where they are nearly as good.
    "qwen3_vl_moe, all experts": EXPERTS | {"text_config": EXPERTS["text_config"] | {"num_experts_per_tok": 4}},
    # By the generic contract, with windows in its decoder.
    "gemma3": {
        "text_config": DECODER
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": WHOLE | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        "image_token_index": 505,
        "image_token_id": 505,
        "boi_token_index": 503,
        "eoi_token_index": 504,
        "mm_tokens_per_image": 4,
    },
}


@dataclass(frozen=True)
class Tiny:
    """folder: of the model, in float32. steps: the samples of each."""

    folder: str
    steps: tuple[Sequence[Sample], ...]


@cache
def make_tiny(setting: Setting, family: str) -> Tiny:
    """The same each time; its files are written once for all processes."""
    twin = ProbeModel(AutoConfig.for_model(family.partition(",")[0], tie_word_embeddings=False, **FAMILIES[family]))
    folder = setting.folder / family
    if not folder.exists():
        partial = setting.folder / f"{family}_unfinished"
        twin.model.to(torch.float32).save_pretrained(partial)
        twin.model.to(torch.float64)
        partial.rename(folder)
    maker = SampleMaker(twin, load_family(str(folder)))
    first = [maker.sample([0], 4, 1), maker.sample([], 3, 2), maker.sample([1, 2], 5, 3), maker.sample([1], 6, 4)]
    second = [maker.sample([], 9, 5), maker.sample([2], 2, 6), maker.sample([], 4, 7), maker.sample([0, 1], 7, 8)]
    return Tiny(str(folder), (first, second))


Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """losses and norms of each step, the norms before clipping; weights before and after all of them, on the host."""

    losses: list[float]
    norms: list[float]
    start: Weights
    end: Weights

    def moved(self) -> dict[str, float]:
        """By how much each weight that is trained moved."""
        by = {name: float((self.end[name].double() - start.double()).norm()) for name, start in self.start.items()}
        return {name: distance for name, distance in by.items() if distance}


def train_plain(
    folder: str,
    dtype: torch.dtype,
    device: str,
    update: OptimizerSettings,
    steps: Sequence[Sequence[Sample]],
    lora: AdapterSettings | None = None,
    trains: Callable[[str], bool] = lambda _: True,
) -> Trained:
    """Steps of torch's AdamW. In 16 bits beside master weights and gradient sums in float32. lora: adapters of the
    decoder, beside which nothing of it is trained. trains: which parameters, by name."""
    family = load_family(folder)
    model = _load(folder, dtype, device, family, lora, trains)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    # The model as it was written, rounded to what computes only behind these.
    masters = {n: p.detach().to(exact, copy=True).requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    for parameter in model.parameters():  # buffers stay: rounded frequencies would turn positions
        parameter.data = parameter.data.to(dtype)
    trained = [master for master in masters.values() if master.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, update.learning_rate, update.betas, update.eps, update.weight_decay, fused=True
    )
    start, losses, norms = _on_host(masters), [], []
    for samples in steps:
        losses.append(_accumulate(model, family, samples, masters))
        norms.append(float(nn.utils.clip_grad_norm_(trained, update.max_grad_norm or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return Trained(losses, norms, start, _on_host(masters))


def _load(
    folder: str,
    dtype: torch.dtype,
    device: str,
    family: Family,
    lora: AdapterSettings | None,
    trains: Callable[[str], bool],
) -> PreTrainedModel:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=exact, attn_implementation="sdpa", trust_remote_code=False
    ).train()
    if dtype == torch.float64:
        exact_experts(model)
    for parameter in model.parameters():  # some of which the library keeps in float32
        parameter.data = parameter.data.to(exact)
    if lora is not None:
        add_adapters(model, find_targets(model, family.parts["text"], lora), lora, seed=0)
        if lora.quantization is not None:
            layers, put = family.decoder.layers, torch.device(device)
            quantize(model, layers, lora, trains, torch.bfloat16, put, "text.lora.quantization")
            _write_out(model, exact)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    for module in model.modules():
        if device == "cuda" and isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride == module.kernel_size:
            project_as_product(module)  # in 16 bits libraries lack kernels for it, or take seconds
    return model.to(device)


def _write_out(model: nn.Module, dtype: torch.dtype) -> None:
    """Matrices in four bits as the numbers that they stand for, which torch multiplies in any format."""
    import bitsandbytes

    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            owner, _, own = name.rpartition(".")
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight, plain.bias = nn.Parameter(weight.to(dtype)), module.bias
            setattr(model.get_submodule(owner), own, plain)


def _accumulate(model: PreTrainedModel, family: Family, samples: Sequence[Sample], masters: dict[str, Tensor]) -> float:
    """Σ token losses / targets; gradients are added up where the masters are."""
    loss, gradients = plain_gradients(model, family, samples)
    for name, gradient in gradients.items():
        masters[name].grad = gradient.to(masters[name].dtype)
    return loss


def _on_host(weights: dict[str, Tensor]) -> Weights:
    return {name: weight.detach().cpu().clone() for name, weight in weights.items()}


MICRO_BATCHES = 2
EXACT = {"loss": 1e-5, "norm": 1e-5, "update": 1e-3}  # relative, of a float32 layout to the plain float32 model
ROUNDED = 2.5  # times the error of one plain process in 16 bits
CHANCE = 1e-3  # relative: a loss of the plain process with a smaller error happened to come out so well
# With so large an eps AdamW's update is the gradient, scaled: what weights move by is as exact as that. They would move
# by its sign otherwise.
UPDATE = OptimizerSettings(30.0, (0.0, 0.0), 100.0, 0.0, "constant", 0, 10, 1.0)


@dataclass(frozen=True)
class Layout:
    """How both parts are split. pipeline: stages of the text part. engine: fsdp | deepspeed, where zero_stage is not 0,
    of the text part. lora: rank of the text part's adapters; quantization: of what is beside them."""

    vision: Degrees = Degrees()
    text: Degrees = Degrees()
    family: str = "qwen2_5_vl"
    recompute: str = "light"
    pipeline: int = 1
    zero_stage: int = 0
    engine: str = "fsdp"
    lora: int = 0
    quantization: str | None = None

    @property
    def adapters(self) -> AdapterSettings | None:
        return AdapterSettings(self.lora, 2.0 * self.lora, quantization=self.quantization) if self.lora else None


def read_layout(name: str) -> Layout:
    """One of those that `rows` lists."""
    said = LAYOUTS[name]
    return Layout(**said | {part: Degrees(**said[part]) for part in (VISION, TEXT) if part in said})


def check(setting: Setting, name: str, dtype: str) -> dict[str, Any]:
    """Two steps of made samples in a layout by its name. In float32 deviations from the plain model; in bfloat16 from
    double precision, as multiples of the plain 16-bit process's."""
    layout = read_layout(name)
    require_packages(setting, layout)
    torch.backends.cudnn.allow_tf32 = False
    found = _train(setting, layout, dtype)
    if dtype == "float32":
        wanted = _plain(setting, layout, dtype)
        errors, worst = _deviations(found, wanted), _worst_update(found, wanted)
        ok = all(errors[name] < limit for name, limit in EXACT.items())
        return {"ok": ok, "limits": EXACT, **errors, "worst_update": worst}
    exact, rough = _plain(setting, layout, "float64"), _plain(setting, layout, dtype)
    ours, theirs = _deviations(found, exact), _deviations(rough, exact)
    ratios = {name: ours[name] / max(theirs[name], CHANCE) for name in ours}
    # The norm is off by no more than gradients are; by how much less is chance.
    ok = all(ratios[name] < ROUNDED for name in ("loss", "update"))
    return {"ok": ok, "limits": ROUNDED, **ratios, "plain_errors": theirs, "worst_update": _worst_update(found, exact)}


def require_packages(setting: Setting, layout: Layout) -> None:
    """Raises NotHere for a package that the layout needs."""
    needed = ["peft"] if layout.lora else []
    needed += ["bitsandbytes"] if layout.quantization else []
    needed += ["deepspeed"] if layout.zero_stage and layout.engine == DEEPSPEED else []
    for name in needed:
        if find_spec(name) is None:
            raise NotHere(f"{name} is not installed")
    if layout.quantization:
        setting.require_cuda("a layout with weights in four bits")


@cache
def _plain(setting: Setting, layout: Layout, dtype: str) -> Trained:
    """Once for all layouts of a family that train the same."""
    alike = Layout(family=layout.family, lora=layout.lora, quantization=layout.quantization)
    if layout != alike:
        return _plain(setting, alike, dtype)
    tiny = make_tiny(setting, layout.family)
    rules = _rules(load_family(tiny.folder), layout)
    return train_plain(
        tiny.folder, getattr(torch, dtype), setting.device, UPDATE, tiny.steps, layout.adapters, rules.trains
    )


def _rules(family: Family, layout: Layout) -> TrainingRules:
    return TrainingRules(adapted=(Selector(TEXT, family.parts[TEXT].modules),) if layout.lora else ())


def _train(setting: Setting, layout: Layout, dtype: str) -> Trained:
    """The same steps by ranks of the layout; weights at the end as a checkpoint has them."""
    tiny = make_tiny(setting, layout.family)
    graph, losses, norms = _graph(load_family(tiny.folder), layout), [], []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        groups = {}
        for spec in graph.stages:
            own = stage_settings(setting, graph, spec.name, layout, dtype)
            ranks = Ranks(spec.name, spec.degrees.world, setting.device, make_rank, own)
            groups[spec.name] = stack.enter_context(ranks)
        stages, schedule = make_stages(graph, groups), make_schedule("sequential", graph, MICRO_BATCHES)
        for number in range(len(tiny.steps)):
            data = deal_step(setting, layout, number)
            reports = train_step(stages, schedule, graph.ties, as_batch(data)).reports
            last = graph.stages[-1]
            losses.append(sum(report.loss for report in reports[last.name][:: last.degrees.tensor]))
            norms.append(max(report.grad_norm for of_stage in reports.values() for report in of_stage))
        for spec in graph.stages:
            groups[spec.name].execute_all_async("save", str(Path(folder) / spec.part), False)
        ends = {name: one for part in (VISION, TEXT) for name, one in _masters(Path(folder) / part).items()}
    return Trained(losses, norms, {}, ends)


def _graph(family: Family, layout: Layout) -> StageGraph:
    """Both parts on the same devices; the text part as a pipeline's stages where the layout has some."""
    whole = pair_of(family, layout.vision, layout.text)
    if layout.pipeline == 1:
        return whole
    (tower, decoder), (edge,) = whole.stages, whole.edges
    layers, count = len(decoder.layers), layout.pipeline
    stages = [
        replace(decoder, name=f"{TEXT}.{at}", chunks=(range(layers * at // count, layers * (at + 1) // count),))
        for at in range(count)
    ]
    links = (Edge(Node(one.name), Node(other.name), (HIDDEN_STATES,), True) for one, other in pairwise(stages))
    return StageGraph((tower, *stages), (replace(edge, target=Node(stages[0].name)), *links))


def stage_settings(setting: Setting, graph: StageGraph, stage: str, layout: Layout, dtype: str) -> StageSettings:
    """Of one stage of the layout. dtype: a torch dtype's name."""
    folder = make_tiny(setting, layout.family).folder
    own = {
        "dtype": dtype, "device": setting.device, "zero_stage": layout.zero_stage, "zero_engine": layout.engine,
        "rules": _rules(load_family(folder), layout),
        "adapters": layout.adapters if graph.stage(stage).part == TEXT else None,
    }  # fmt: skip
    return settings_of(graph, stage, folder, UPDATE, layout.recompute, **own)


def deal_step(setting: Setting, layout: Layout, step: int) -> StepData:
    """A step of the tiny model's samples for the ranks of the layout."""
    tiny, even = make_tiny(setting, layout.family), layout.zero_stage == 3
    family, samples = load_family(tiny.folder), tiny.steps[step]
    split = Split(layout.vision.data, layout.vision.sequence, even_calls=even)
    collator = Collator(family, 0, packing=True)
    dealer = BatchSharder(family, collator, Division({VISION: split}, text=layout.text, even_calls=even))
    size = -(-len(samples) // (MICRO_BATCHES * layout.text.data))
    dealt = slots(samples, BatchLayout(layout.text.data, MICRO_BATCHES, size))
    return dealer.shard(StepSamples(step, 0, tuple(tuple(tuple(slot) for slot in row) for row in dealt), ()))


def _masters(folder: Path) -> Weights:
    """What the optimizer updates of a part, as its checkpoint has it: weights, or what they are rounded copies of."""
    weights, mark = dict(read_shards(folder)), f".{MASTER}"
    states = ShardReader(folder / OPTIMIZER)
    return weights | {name.removesuffix(mark): states.whole(name) for name in states.names if name.endswith(mark)}


def _deviations(found: Trained, wanted: Trained) -> dict[str, float]:
    """Largest ones, relative; of the weights, of all together what they moved by."""
    pairs = lambda name: zip(getattr(found, name), getattr(wanted, name), strict=True)
    largest = lambda name: max(_unless_nan(abs(one - other) / abs(other)) for one, other in pairs(name))
    moved = wanted.moved()
    off = math.hypot(*(_unless_nan(float(_off(found, wanted, name).norm())) for name in moved))
    return {"loss": largest("losses"), "norm": largest("norms"), "update": off / math.hypot(*moved.values())}


def _worst_update(found: Trained, wanted: Trained) -> tuple[float, str]:
    """Of one weight: by how much of what it moved by it is off, not of less than a thousandth of what all moved by."""
    moved = wanted.moved()
    floor = 1e-3 * math.hypot(*moved.values())
    return max((float(_off(found, wanted, name).norm()) / max(by, floor), name) for name, by in moved.items())


def _off(found: Trained, wanted: Trained, name: str) -> Tensor:
    return found.end[name].double() - wanted.end[name].double()


def _unless_nan(error: float) -> float:
    return math.inf if math.isnan(error) else error  # max() would pass over it
