"""Rows: ranks of both parts that share the device, against the plain model on the same device."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import BatchSharder
from dhp.checkpoint.manifest import OPTIMIZER
from dhp.checkpoint.shard_reader import ShardReader
from dhp.checkpoint.source import read_shards
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph
from dhp.core.parameters import AdapterSettings, Selector, TrainingRules
from dhp.core.state_forms import MASTER
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.engine.build import DEEPSPEED
from dhp.engine.kinds import make_rank
from dhp.engine.settings import OptimizerSettings, StageSettings
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.gpu_check.plain import Trained, Weights, train_plain
from experiments.gpu_check.ranks import Ranks
from experiments.gpu_check.rows import LAYOUTS
from experiments.gpu_check.setting import NotHere, Setting
from experiments.gpu_check.tiny import make_tiny
from experiments.pair import TEXT, VISION, as_batch, pair_of, settings_of

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
    dealer = BatchSharder(family, collator, {VISION: split}, text=layout.text, even_calls=even)
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
