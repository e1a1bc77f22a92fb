"""One layout on local ranks beside the plain model, by the run's own configuration: equal, or refused, or a defect."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder
from dhp.config.command_line import compose_config
from dhp.config.parts import decoder, parts
from dhp.config.schema import Config
from dhp.config.steps import micro_batches
from dhp.core.batch import Batch
from dhp.core.errors import ConfigError, DhpError
from dhp.core.graph import StageGraph
from dhp.core.parameters import ADAFACTOR
from dhp.core.process import say_nothing
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.models.contract.double import staying_double
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings, passes_of
from dhp.plan.count.counted_model import count_model
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import adapters_of, training_rules
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import evaluate_batch, train_step
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import stage_settings
from tests.engine.test_declared_families import ExactText, ExactVision
from tests.fuzz.draws import SAMPLES, Draw
from tests.helpers.families import Maker
from tests.helpers.layouts import InspectedAudio, InspectedText, InspectedVision, _deviation
from tests.helpers.oracle import Oracle
from tests.helpers.ranks import LocalGroup

STEPS = 2
EQUAL, REFUSED, DEFECT = "equal", "refused", "DEFECT"
# Of losses, of norms, and of updates. What is further off in float32 must be as near the plain model's value in float64
# as that model itself is in float32: a rounding of its weights moves norms of a delta net's gradients by 2e-3.
LIMITS = {"float64": (1e-9, 1e-9, 1e-6), "float32": (2e-5, 1e-3, None)}
NOISES = 3  # times the most that some roundings make: a few samples of what one may make, whose tails are heavy


class ExactAudio(InspectedAudio):
    """Its process computes in float64 all through."""

    def __init__(self, settings: Any):
        self._double = staying_double()
        self._double.__enter__()
        super().__init__(settings)


RANKS = {
    "float64": {"vision": ExactVision, "text": ExactText, "audio": ExactAudio},
    "float32": {"vision": InspectedVision, "text": InspectedText, "audio": InspectedAudio},
}


@dataclass(frozen=True)
class Verdict:
    """What came of a draw."""

    word: str
    told: str = ""


def try_draw(draw: Draw, folder: str, everywhere: bool) -> Verdict:
    """folder: of the family's tiny model. everywhere: no sample is without a picture."""
    try:
        layouts = [_Layout.of(configure(draw.overrides, draw, folder), folder)]
    except ConfigError as error:
        return Verdict(REFUSED, str(error))
    except Exception:
        return Verdict(DEFECT, f"checking fails: {traceback.format_exc()[-2500:]}")
    with suppress(ConfigError):
        layouts += [_Layout.of(configure(draw.onward, draw, folder), folder)] if draw.onward else []
    try:
        with staying_double() if draw.dtype == "float64" else nullcontext():
            steps = []
            for k in range(STEPS):
                config = layouts[min(k, len(layouts) - 1)].config
                count = samples_of(layout_of(config)) if config.data.packing else SAMPLES
                steps.append(make_steps(folder, draw.data_seed, everywhere, "audio" in parts(config), count)[k])
            found = _run(layouts, steps, draw.dtype)
            wrong = _compare(found, layouts[0].config, layouts[0].graph, folder, steps, draw.dtype)
    except DhpError as error:
        return Verdict(DEFECT, f"passes every check and is refused at work: {error}")
    except Exception as error:
        return Verdict(DEFECT, f"{type(error).__name__}: {str(error)[-2500:]}")
    return Verdict(DEFECT, "; ".join(wrong)) if wrong else Verdict(EQUAL)


@dataclass(frozen=True)
class _Layout:
    config: Config
    graph: StageGraph
    schedule: Any

    @classmethod
    def of(cls, config: Config, folder: str) -> _Layout:
        """Raises ConfigError."""
        graph = plan_run(config, folder).graph
        return cls(config, graph, make_schedule(config.training.schedule, graph, micro_batches(config)))


def check_draw(draw: Draw, folder: str) -> list[str]:
    """What a run of the draw would say before actors start. Stages are cut by parameters, which is quicker than by what
    layers are counted to take. Raises ConfigError where it is refused."""
    notes: list[str] = []
    overrides = [one.replace("partition=bmp", "partition=parameters") for one in draw.overrides]
    configure(overrides, draw, folder, notes.append)
    return notes


def configure(overrides: Sequence[str], draw: Draw, folder: str, say: Callable[[str], None] = say_nothing) -> Config:
    """The run's configuration in a layout of the draw, after its checks. Raises ConfigError."""
    names = [f"{part}.model_name={folder}" for part in ("vision", "text")]
    own = [f"{part}.dtype={draw.dtype}" for part in ("vision", "text")]
    fixed = ["training.dry_run=true", "training.max_steps=3", "training.learning_rate=1e-3", "training.eps=1e-3"]
    fixed += ["training.warmup_steps=0", "tiny_assets=null", "cluster.device=cpu", "training.max_grad_norm=1.0"]
    if draw.kind == "hears":
        fixed += [f"audio.dtype={draw.dtype}", f"audio.model_name={folder}"]
    return prepare(compose_config("tiny", overrides=[*names, *own, *fixed, *overrides]), False, say)


def layout_of(config: Config) -> BatchLayout:
    """How a step's samples become rows."""
    micro, replicas = micro_batches(config), decoder(config).data
    return BatchLayout(replicas, micro, SAMPLES // (micro * replicas))


def samples_of(layout: BatchLayout) -> int:
    """So many that packed rows can hold differing numbers of them."""
    return SAMPLES + (2 if layout.micro_batch_size == 1 else 0)


def make_steps(folder: str, seed: int, everywhere: bool, heard: bool, samples: int = SAMPLES) -> list[list[Sample]]:
    """Samples that differ between ranks on purpose: none to five pictures of any shapes, a token to nine."""
    rng, make = random.Random(seed), Maker(folder).sample
    steps = []
    for k in range(STEPS):
        shown = [[], rng.sample(range(5), 3), [rng.randrange(5)], rng.sample(range(5), rng.randrange(1, 5))]
        shown += [rng.sample(range(5), rng.randrange(3)) for _ in range(samples - len(shown))]
        rng.shuffle(shown)
        shown = [pictures or [3] for pictures in shown] if everywhere else shown
        clips = [[rng.randrange(20, 300) for _ in range(rng.randrange(3))] if heard else [] for _ in shown]
        steps.append(
            [
                make(pictures, rng.randrange(1, 9), 100 * seed + 10 * k + number, clips[number])
                for number, pictures in enumerate(shown)
            ]
        )
    return steps


def deal_unevenly(samples: Sequence[Sample], layout: BatchLayout) -> tuple[tuple[tuple[Sample, ...], ...], ...]:
    """[micro-batch][replica]: of each micro-batch the last replica has all that the others leave, which is more than
    one of them has."""
    most = len(samples) // layout.micro_batches
    rows = [samples[number * most : (number + 1) * most] for number in range(layout.micro_batches)]
    others = layout.replicas - 1
    return tuple((*((sample,) for sample in row[:others]), tuple(row[others:])) for row in rows)


@dataclass(frozen=True)
class _Found:
    losses: list[float]
    norms: list[list[float]]
    evaluated: float
    weights: list[dict[str, Tensor]]  # of each rank


def _run(layouts: Sequence[_Layout], steps: list[list[Sample]], dtype: str) -> _Found:
    """Both steps in one layout, or each in its own: the second goes on from a checkpoint of the first."""
    if len(layouts) == 1:
        return _some_steps(layouts[0], dict(enumerate(steps)), dtype)
    with TemporaryDirectory() as folder:
        first = _some_steps(layouts[0], {0: steps[0]}, dtype, save=Path(folder))
        rest = _some_steps(layouts[1], {1: steps[1]}, dtype, checkpoint=Path(folder))
    return _Found([*first.losses, *rest.losses], [*first.norms, *rest.norms], rest.evaluated, rest.weights)


def _some_steps(
    layout: _Layout,
    steps: Mapping[int, list[Sample]],
    dtype: str,
    checkpoint: Path | None = None,
    save: Path | None = None,
) -> _Found:
    config, graph = layout.config, layout.graph
    family = load_family(parts(config)["text"].model_name).having(parts(config))
    settings = feed_settings(config, None, passes_of(count_model(config)))
    dealer = BatchSharder(family, Collator(family, 0, settings.division.packed), settings.division)
    rows = layout_of(config)
    rules = training_rules(config.training, family, adapters_of(config))
    losses, norms, evaluated = [], [], 0.0
    with ExitStack() as stack:
        groups = {}
        for spec in graph.stages:
            own = stage_settings(config, graph, spec, "cpu", 3, checkpoint, rules=rules)
            group = LocalGroup(RANKS[dtype][spec.part], spec.degrees.world, own, checked=True)
            groups[spec.name] = stack.enter_context(group)
        stages = make_stages(graph, groups)
        last = graph.stages[-1].name
        for k, samples in steps.items():
            even = tuple(tuple(tuple(slot) for slot in row) for row in slots(samples, rows))
            dealt = deal_unevenly(samples, rows) if config.data.packing else even
            data = dealer.shard(StepSamples(k, 0, dealt, ()))
            batch = Batch(data.info, data.work, data.routes)
            if k == 1:
                evaluated = sum(share.loss for share in evaluate_batch(stages, graph, batch).shares)
            reports = train_step(stages, layout.schedule, graph.ties, batch).reports
            losses.append(sum(r.loss for r in stages[last].leaders(reports[last])))
            norms.append([r.grad_norm for of_stage in reports.values() for r in of_stage])
        for spec in graph.stages if save is not None else ():
            groups[spec.name].execute_all("save", str(save / spec.part), False)
        weights = [of_rank for group in groups.values() for of_rank in group.execute_all("weights")]
    return _Found(losses, norms, evaluated, weights)


def _compare(
    found: _Found, config: Config, graph: StageGraph, folder: str, steps: list[list[Sample]], dtype: str
) -> list[str]:
    """What differs from the plain model."""
    limit, of_norm, of_update = LIMITS[dtype]
    oracle = _plain(config, graph, folder, dtype)
    start = {name: weight.clone() for name, weight in oracle.weights().items()}
    wanted = _values(oracle, steps)
    held = _values_of(found, wanted)
    wrong = {
        name: f"{name}: {held[name]:.12g}, plain {value:.12g}"
        for name, value in wanted.items()
        if _deviation(held[name], value) > (of_norm if "norm" in name else limit)
    }
    if of_update is not None:
        end = oracle.weights()
        if config.training.optimizer == ADAFACTOR:  # scales the noise up that is the gradient of biases of keys
            end = {name: weight for name, weight in end.items() if not ("att" in name and name.endswith("bias"))}
        if any(group.weight_decay == 0 for group in config.training.groups.values()):
            # A softmax does not see what is added to all keys: where nothing decays, rounding is all that moves them.
            end = {name: weight for name, weight in end.items() if not name.endswith("k_proj.bias")}
        shown = [{n: w for n, w in own.items() if n in end or n not in start} for own in found.weights]
        return [*wrong.values(), *_wrong_updates(shown, start, end, of_update)]
    if wrong:
        exact, noise = _noise(config, graph, folder, steps, wanted)
        wrong = {n: told for n, told in wrong.items() if _deviation(held[n], exact[n]) > NOISES * noise[n]}
        wrong = {n: f"{told}, in float64 {exact[n]:.12g}, noise {noise[n]:.2g}" for n, told in wrong.items()}
    return [*wrong.values()]


def _plain(config: Config, graph: StageGraph, folder: str, dtype: str) -> Oracle:
    family = load_family(folder).having(parts(config))
    rules = training_rules(config.training, family, adapters_of(config))
    update = stage_settings(config, graph, graph.stages[0], "cpu", 3, rules=rules).update
    return Oracle(folder, getattr(torch, dtype), update, "cpu", rules, adapters_of(config))


def _values(oracle: Oracle, steps: list[list[Sample]]) -> dict[str, float]:
    """What the plain model has of each step, by its name."""
    values = {}
    for k, samples in enumerate(steps):
        if k == 1:
            values["evaluated"] = oracle.evaluate(samples).loss
        step = oracle.step(samples)
        values |= {f"loss of step {k}": step.loss, f"norm of step {k}": step.norm}
    return values


def _values_of(found: _Found, wanted: dict[str, float]) -> dict[str, float]:
    """The same of ranks; of their norms the one that is furthest off."""
    values = {"evaluated": found.evaluated}
    for k, (loss, norms) in enumerate(zip(found.losses, found.norms, strict=True)):
        plain = wanted[f"norm of step {k}"]
        values |= {f"loss of step {k}": loss, f"norm of step {k}": max(norms, key=lambda own: _deviation(own, plain))}
    return values


def _noise(
    config: Config, graph: StageGraph, folder: str, steps: list[list[Sample]], plain: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The plain model's values in float64, and how far from them it is in float32 at most: as it is, and with weights
    that are off by a rounding."""
    with staying_double():
        exact = _values(_plain(config, graph, folder, "float64"), steps)
    samples = [plain]
    for seed in range(5):
        oracle = _plain(config, graph, folder, "float32")
        generator = torch.Generator().manual_seed(seed)
        for parameter in oracle.model.parameters():
            off = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.data.mul_(1 + torch.finfo(torch.float32).eps * off)
        samples.append(_values(oracle, steps))
    return exact, {name: max(_deviation(values[name], exact[name]) for values in samples) for name in exact}


def _wrong_updates(
    of_ranks: list[dict[str, Tensor]], start: dict[str, Tensor], end: dict[str, Tensor], limit: float
) -> list[str]:
    wrong = []
    for weights in of_ranks:
        for name, weight in weights.items():
            if name not in end or weight.shape != end[name].shape:
                wrong.append(f"{name} has the shape {tuple(weight.shape)}")
                continue
            moved = float((end[name] - start[name]).norm())
            error = float((weight.to(end[name]) - end[name]).norm())
            if error > limit * (moved or 1.0):
                wrong.append(f"update of {name} off by {error / (moved or 1.0):.2g}")
    return wrong[:4]
