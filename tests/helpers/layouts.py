"""Run all stages of a layout on local ranks beside the oracle, and compare everything there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.row_shards import Draws
from dhp.batch.shard import BatchSharder, Division
from dhp.config.layout import read_choices
from dhp.config.schema import Config, PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.batch import Batch, StepData
from dhp.core.graph import StageGraph, StageSpec, part_of
from dhp.core.parameters import COMPENSATION, AdapterSettings, GroupRule, TrainingRules
from dhp.core.reports import EvaluatedShare, SavedShare
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.models import lora as adapters
from dhp.models.empty import list_parameters
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.types import chunks_of
from dhp.objectives.objectives import find_objective
from dhp.parallel.optim import zero
from dhp.parallel.optim.base import Frozen, join_master
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.tensor.slices import as_dtensors
from dhp.plan.trainable import trained_stage, training_rules
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import accumulate_gradients, evaluate_batch, update_weights
from tests.helpers.graphs import make_graph
from tests.helpers.norms import rounding
from tests.helpers.oracle import MixedOracle, Oracle, Step
from tests.helpers.ranks import LocalGroup

if TYPE_CHECKING:
    from dhp.batch.reader import BatchReader

FIRST_OUT = 0.5
UPDATE = OptimizerSettings(
    learning_rate=1e-3,
    betas=(0.85, 0.97),  # no default of torch, so that one that is ignored shows
    eps=1e-7,
    weight_decay=0.02,
    lr_scheduler_type="linear",  # another rate in each step, so that a wrong one shows
    warmup_steps=0,
    total_steps=10,
    max_grad_norm=1.0,
)


@dataclass(frozen=True)
class Case:
    """A layout and a precision."""

    vision: Degrees
    text: Degrees
    micro_batches: int = 2
    dtype: str = "float64"
    zero_stage: int = 0
    checkpointing: bool = False
    schedule: str = "sequential"
    packing: bool = False
    text_zero_stage: int = 0
    autotp: bool = False
    recompute: str = "none"
    fsdp: bool = False  # the states of both parts are cut by torch, not by DeepSpeed
    stages: int = 1  # of the text part
    tower_stages: int = 1
    chunks: int = 1  # of each of them
    cuts: tuple[int, ...] = ()  # of the text part's layers; none: even ones
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    groups: tuple[GroupRule, ...] = ()
    lora: tuple[tuple[str, AdapterSettings], ...] = ()  # of each part that has adapters
    device: str = "cpu"
    audio: Degrees | None = None  # None: the run has no audio part
    audio_zero_stage: int = 0
    audio_stages: int = 1
    mlp_chunks: int = 1  # of both parts
    sequence_groups: str = "one"
    checked: bool = False  # ranks agree on each collective before it begins
    objective: str = "sft"
    state_bytes: int = 18  # of both parts
    sharded_norms: bool = False  # of each part with tensor ranks
    optimizer: str = "adamw"
    padded: bool = False  # gated MLPs of both parts compute with zeros up to a multiple of 64
    vision_batch: int = 1  # micro-batches whose pictures the tower takes at a time

    def __str__(self) -> str:
        zero = f", zero {self.zero_stage}" if self.zero_stage else ""
        zero += f", text zero {self.text_zero_stage}" if self.text_zero_stage else ""
        zero += ", fsdp" if self.fsdp else ""
        zero += ", autotp" if self.autotp else ""
        again = ", recompute" if self.checkpointing else ""
        again += f", {self.recompute}" if self.recompute != "none" else ""
        vision, text = (str(d).replace(" ", "") for d in (self.vision, self.text))
        packed = ", packed" if self.packing else ""
        packed += f", {self.stages} stages" if self.stages > 1 else ""
        packed += f" of {self.chunks}" if self.chunks > 1 else ""
        packed += f" cut at {list(self.cuts)}" if self.cuts else ""
        packed += f", tower of {self.tower_stages}" if self.tower_stages > 1 else ""
        packed += f", trains {' '.join(self.trainable)}" if self.trainable else ""
        packed += f", {' '.join(self.frozen)} frozen" if self.frozen else ""
        packed += f", groups {' '.join(rule.name for rule in self.groups)}" if self.groups else ""
        packed += "".join(f", lora {own.rank} of {part}{_dropping(own)}" for part, own in self.lora)
        packed += f", {self.mlp_chunks} chunks" if self.mlp_chunks > 1 else ""
        packed += ", in groups" if self.sequence_groups != "one" else ""
        packed += f", {self.objective}" if self.objective != "sft" else ""
        packed += f", {self.state_bytes} bytes" if self.state_bytes != 18 else ""
        packed += ", sharded norms" if self.sharded_norms else ""
        packed += f", {self.optimizer}" if self.optimizer != "adamw" else ""
        packed += ", padded MLPs" if self.padded else ""
        packed += f", pictures of {self.vision_batch}" if self.vision_batch > 1 else ""
        packed += "" if self.audio is None else f", audio {str(self.audio).replace(' ', '')}"
        packed += f" of {self.audio_stages} stages" if self.audio_stages > 1 else ""
        ahead = f", {self.schedule}" if self.schedule != "sequential" else ""
        return f"{vision} to {text}, {self.micro_batches} micro, {self.dtype}{zero}{again}{ahead}{packed}"


def _dropping(adapters: AdapterSettings) -> str:
    return f" dropping {adapters.dropout}" if adapters.dropout else ""


@dataclass(frozen=True)
class Errors:
    """The largest deviations from the oracle: relative, and for gradients above the floor."""

    loss: float
    norm: float
    gradient: float
    gradient_name: str
    update: float
    update_name: str


class Inspected:
    """Verbs that tests alone need: whole gradients and weights by name."""

    def __init__(self, settings: StageSettings):
        zero.PERSISTENT_ELEMENTS = 0  # so that stage 3 cuts weights this small too
        adapters.FIRST_OUT = FIRST_OUT  # so that every matrix has a gradient in the first step
        super().__init__(settings)

    def gradients(self) -> dict[str, Tensor]:
        return _on_host(self._gradients())

    def weights(self) -> dict[str, Tensor]:
        """What the optimizer updates: the master weights, where the module has rounded copies."""
        return _on_host(self._weights())

    def _gradients(self) -> dict[str, Tensor]:
        update: Any = self.optimizer
        if isinstance(update, Frozen):
            return {}
        if isinstance(update, FullySharded):
            update._take_sums()
            return {shard.name: _gathered(shard, shard.weight.grad) for shard in update._trained}
        if self.settings.part.zero_stage:
            from deepspeed.utils import safe_get_full_grad

            trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
            return {n: safe_get_full_grad(p).clone() for n, p in trained}
        update._take_sums()
        masters = zip(update._names, update._layouts, update._masters, strict=True)
        return {name: _whole(master.grad, layout) for name, layout, master in masters}

    def _weights(self) -> dict[str, Tensor]:
        update: Any = self.optimizer
        if isinstance(update, FullySharded):
            return {shard.name: _gathered(shard, shard.weight.detach()) for shard in update._shards}
        named = dict(self.model.named_parameters())
        if self.settings.part.zero_stage and not isinstance(update, Frozen):
            from deepspeed.utils import safe_get_full_fp32_param

            trained = {n: safe_get_full_fp32_param(p) for n, p in named.items() if p.requires_grad}
            return update._frozen | {n: weight.clone() for n, weight in trained.items()}
        layouts = as_dtensors(self.model)
        if isinstance(update, Frozen):
            return {n: _whole(layouts[n].detach(), layouts[n]) for n in named}
        masters = zip(update._names, update._layouts, update._masters, strict=True)
        frozen = {n: _whole(layouts[n].detach(), layouts[n]) for n, p in named.items() if not p.requires_grad}
        return frozen | {n: _whole(_master(update, weight), layout) for n, layout, weight in masters}

    def rounded(self) -> bool:
        """Whether every weight that the module computes with is its master weight, rounded."""
        masters = self._weights()
        named = as_dtensors(self.model).items()
        return all(torch.equal(_whole(p.detach(), p), masters[n].to(p.dtype)) for n, p in named)


class InspectedVision(Inspected, EncoderEngine):
    pass


class InspectedText(Inspected, TextEngine):
    pass


class InspectedAudio(Inspected, EncoderEngine):
    pass


def _gathered(shard: Any, rows: Tensor) -> Tensor:
    """What FSDP has cut by rows, put together to this rank's slice, and that to the whole."""
    parameter = shard.parameter
    own = DTensor.from_local(
        rows.detach(), parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()
    return own.clone() if shard.cut is None else shard.cut.around(own).full_tensor().clone()


def _master(update: Any, weight: Tensor) -> Tensor:
    """What the optimizer updates, of which it may hold the halves."""
    state = update.optimizer.state.get(weight, {})
    return join_master(weight.detach(), state[COMPENSATION]) if COMPENSATION in state else weight.detach()


def _whole(value: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
        return value.full_tensor().clone()
    return value.clone()


def graph_of(model: str, case: Case) -> StageGraph:
    """The stages of a case for a model."""
    family = family_of(model, case)
    takes = {name: layer for name, layer in family.decoder.takes.items() if name in family.tower.tensors}
    rules, decoder = rules_of(model, case), family.decoder
    make = partial(
        make_graph,
        case.vision,
        case.text,
        case.stages,
        case.chunks,
        len(decoder.layers.kinds),
        len(family.tower.layers.kinds),
        cuts=case.cuts,
        enters=takes,
        tied=decoder.tied,
        tie_trained=rules.trains(decoder.tied_weight),
        tower_stages=case.tower_stages,
        leaves=dict(family.tower.leaves),
        audio=case.audio,
        audio_stages=case.audio_stages,
        audio_layers=0 if case.audio is None else len(family.parts["audio"].layers.kinds),
        batch=case.vision_batch,
    )
    trains = trained_stage(rules, lambda: list_parameters(model, family, dict(case.lora)))
    chunks = [chunks_of(stage.chunks, decoder.whole) for stage in make().of_part("text")]
    of_tower = [chunks_of(stage.chunks, family.tower.whole) for stage in make().of_part("vision")]
    heard = None if case.audio is None else family.parts["audio"]
    own = () if heard is None else make().of_part("audio")
    of_audio = [heard.absent(chunks_of(stage.chunks, heard.whole)) for stage in own if heard is not None]
    return make(
        vision_trains=tuple(trains("vision", family.tower.absent(held)) for held in of_tower),
        audio_trains=tuple(trains("audio", absent) for absent in of_audio),
        text_trains=tuple(trains("text", decoder.absent(held)) for held in chunks),
    )


def rules_of(model: str, case: Case) -> TrainingRules:
    """What of a model the case trains, and how."""
    asked = TrainingConfig(trainable=list(case.trainable), frozen=list(case.frozen))
    return replace(training_rules(asked, family_of(model, case), dict(case.lora)), groups=case.groups)


def update_of(case: Case) -> OptimizerSettings:
    """The settings of its optimizer."""
    return replace(UPDATE, optimizer=case.optimizer)


def family_of(model: str, case: Case) -> Family:
    """With the parts that the case has."""
    return load_family(model).having(() if case.audio is None else ("audio",))


def settings(stage: StageSpec, graph: StageGraph, model: str, case: Case) -> StageSettings:
    """Settings of one stage of a case."""
    zero_stage = {"vision": case.zero_stage, "audio": case.audio_zero_stage, "text": case.text_zero_stage}
    layers = sum(len(one.layers) for one in graph.of_part(stage.part))
    choices = read_choices("full" if case.checkpointing else case.recompute, layers)
    section = PartConfig(
        model_name=model,
        dtype=case.dtype,
        mlp_chunks=case.mlp_chunks,
        zero_stage=zero_stage[stage.part],
        zero_engine="fsdp" if case.fsdp else "deepspeed",
        state_bytes=case.state_bytes,
        sequence_sharded_norms=case.sharded_norms and stage.degrees.tensor > 1,
        parallelism="autotp" if case.autotp and stage.part == "text" else "none",
        kernels="mlp:padded" if case.padded else "auto",
    )
    return StageSettings(
        config=Config(training=TrainingConfig(objective=case.objective), **{stage.part: section}),
        spec=stage,
        graph=graph,
        device=case.device,
        update=update_of(case),
        recompute=tuple(choices[layer] for layer in stage.layers),
        rules=rules_of(model, case),
        adapters=dict(case.lora).get(stage.part),
    )


def with_part(settings: StageSettings, **changes: Any) -> StageSettings:
    """With other values of its part's section."""
    section = replace(settings.part, **changes)
    return replace(settings, config=replace(settings.config, **{settings.spec.part: section}))


def make_reader(
    model: str, case: Case, steps: Sequence[Sequence[Sample]], published_positions: bool = True
) -> BatchReader:
    """A feed that deals the given samples of each step over the case's micro-batches and replicas."""
    from dhp.batch.reader import BatchReader  # which decodes videos, and needs a package for it

    source: Any = SimpleNamespace(step=lambda k: _slotted(k, case, steps[k]))
    family = family_of(model, case)
    family.processor.published_positions = published_positions
    return BatchReader(source, family, 0, _division(case), objective=find_objective(case.objective))


def _division(case: Case) -> Division:
    draws = Draws(0, tuple(part for part, asked in case.lora if asked.dropout))
    rows = {"text": case.text, "sequence_groups": case.sequence_groups, "even_calls": case.text_zero_stage == 3}
    return Division(_encoders(case), case.packing, **rows, draws=draws, batch=case.vision_batch)


def _encoders(case: Case) -> dict[str, Split]:
    parts = {
        "vision": (case.vision, case.zero_stage, case.tower_stages),
        "audio": (case.audio, case.audio_zero_stage, case.audio_stages),
    }
    return {
        name: Split(degrees.data, degrees.sequence, even_calls=zero_stage == 3, stages=stages)
        for name, (degrees, zero_stage, stages) in parts.items()
        if degrees is not None
    }


def _slotted(step: int, case: Case, samples: Sequence[Sample]) -> StepSamples:
    size = -(-len(samples) // (case.micro_batches * case.text.data))
    dealt = slots(samples, BatchLayout(case.text.data, case.micro_batches, size))
    return StepSamples(step, 0, tuple(tuple(tuple(slot) for slot in row) for row in dealt), ())


def make_sharder(model: str, case: Case) -> BatchSharder:
    """What deals samples out over the case's ranks: the feed without what reads and decodes them."""
    family = family_of(model, case)
    division = _division(case)
    return BatchSharder(family, Collator(family, 0, division.packed, find_objective(case.objective)), division)


@dataclass(frozen=True)
class Fault:
    """A planted mistake: trainers in place of the right ones, or an edit of what the feed deals out."""

    vision: type = InspectedVision
    text: type = InspectedText
    edit: Callable[[StepData], StepData] = lambda data: data
    audio: type = InspectedAudio


@dataclass(frozen=True)
class Trained:
    """What a layout did in each step, on every rank: losses[step], norms[step][rank], gradients[step][rank][name];
    and the weights at the end, weights[part][rank][name]."""

    losses: list[float]
    norms: list[list[float]]
    gradients: list[list[dict[str, Tensor]]]
    weights: list[list[dict[str, Tensor]]]


class Running:
    """All stages of a case on local ranks, from the moment that it is entered until it is left."""

    def __init__(self, model: str, case: Case, fault: Fault | None = None, **changes: Any):
        """changes: of every stage's settings, or its part's section; a function is given the stage."""
        self.case, self.graph, self._fault = case, graph_of(model, case), fault or Fault()
        self.schedule = make_schedule(case.schedule, self.graph, case.micro_batches)
        self._settings = {spec.name: settings(spec, self.graph, model, case) for spec in self.graph.stages}
        for spec in self.graph.stages:
            own = {key: value(spec) if callable(value) else value for key, value in changes.items()}
            of_stage = {key: value for key, value in own.items() if key in StageSettings.__dataclass_fields__}
            of_part = {key: value for key, value in own.items() if key not in of_stage}
            self._settings[spec.name] = replace(with_part(self._settings[spec.name], **of_part), **of_stage)

    def __enter__(self) -> Running:
        with ExitStack() as stack:
            self.groups = {}
            for spec in self.graph.stages:
                trainer = getattr(self._fault, spec.part)
                group = LocalGroup(trainer, spec.degrees.world, self._settings[spec.name], checked=self.case.checked)
                self.groups[spec.name] = stack.enter_context(group)
            self._stack = stack.pop_all()
        self.stages = make_stages(self.graph, self.groups)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def accumulate(self, data: StepData) -> Batch:
        """Submit a step's actions, and leave the gradients where they are."""
        batch = Batch(data.info, data.work, data.routes)
        accumulate_gradients(self.stages, self.schedule, batch)
        return batch

    def update(self, batch: Batch) -> tuple[float, dict[str, list[Any]]]:
        """Norms and optimizer steps: the step's loss, and by stage the report of every rank."""
        reports = update_weights(self.stages, self.graph.ties, batch).reports
        last = self.graph.stages[-1].name
        return sum(r.loss for r in self.stages[last].leaders(reports[last])), reports

    def step(self, data: StepData) -> tuple[float, dict[str, list[Any]]]:
        """A whole step."""
        return self.update(self.accumulate(data))

    def evaluate(self, data: StepData) -> EvaluatedShare:
        """The loss of a step's data, and how many of its targets are the likeliest token, forward alone."""
        shares = evaluate_batch(self.stages, self.graph, Batch(data.info, data.work, data.routes)).shares
        return EvaluatedShare(*(sum(getattr(one, name) for one in shares) for name in ("loss", "right", "targets")))

    def judge(self, data: StepData) -> Any:
        """The same by sample: `dhp.trainer.evaluation.JudgedSample`s."""
        from dhp.trainer.evaluation import judge_samples  # it imports Ray

        shares = evaluate_batch(self.stages, self.graph, Batch(data.info, data.work, data.routes)).shares
        return judge_samples(data.info, shares, self.graph.stages[-1].degrees.sequence)

    def weights(self) -> list[list[dict[str, Tensor]]]:
        """Of every stage and rank."""
        return [group.execute_all("weights") for group in self.groups.values()]

    def save(self, folder: Path, background: bool = False) -> None:
        """As a run does, by part. background: ranks go on while they write, until `await_saved`."""
        for spec in self.graph.stages:
            self.groups[spec.name].execute_all("save", str(folder / spec.part), background)
        if not background:
            self.await_saved()

    def await_saved(self) -> list[SavedShare]:
        """What all ranks have written, once they have."""
        shares = [one for group in self.groups.values() for one in group.execute_all("saved", True)]
        assert not [one.error for one in shares if not one.done or one.error]
        return shares


def train(model: str, case: Case, steps: Sequence[Sequence[Sample]], fault: Fault | None = None) -> Trained:
    """Train the steps in the case's layout."""
    fault = fault or Fault()
    dealer = make_sharder(model, case)
    losses, norms, gradients = [], [], []
    with Running(model, case, fault) as running:
        for k in range(len(steps)):
            data = fault.edit(dealer.shard(_slotted(k, case, steps[k])))
            batch = running.accumulate(data)
            idle = {part for part, shown in (("vision", data.info.images), ("audio", data.info.clips)) if not shown}
            gradients.append(_found_gradients(running.groups, running.graph, idle))
            loss, reports = running.update(batch)
            losses.append(loss)
            norms.append([r.grad_norm for of_stage in reports.values() for r in of_stage])
        return Trained(losses, norms, gradients, running.weights())


def compare(
    model: str, case: Case, steps: Sequence[Sequence[Sample]], fault: Fault | None = None, kind: type[Oracle] = Oracle
) -> Errors:
    """Train the steps in the case's layout and in the oracle; the largest deviations of all of it."""
    trained = train(model, case, steps, fault)
    start, expected, end = _expected(model, case, steps, kind)
    losses = [_deviation(found, e.loss) for found, e in zip(trained.losses, expected, strict=True)]
    norms = [_deviation(n, e.norm) for found, e in zip(trained.norms, expected, strict=True) for n in found]
    gradients = [_worst_gradient(found, e) for found, e in zip(trained.gradients, expected, strict=True)]
    single = case.dtype == "float32"
    undecided = _without_gradient(expected) if single else set()
    update = _worst_update(trained.weights, start, end, undecided, _below_rounding(expected) if single else {})
    return Errors(max(losses), max(norms), *max(gradients), *update)


Wanted = tuple[dict[str, Tensor], list[Step], dict[str, Tensor]]
_KNOWN: dict[tuple, tuple[Sequence, Wanted]] = {}


def _expected(model: str, case: Case, steps: Sequence[Sequence[Sample]], kind: type[Oracle] = Oracle) -> Wanted:
    """Weights before, every step, and weights after in the oracle; once for all layouts of the same samples."""
    rules = rules_of(model, case)
    key = (
        kind,
        model,
        case.dtype,
        case.device,
        rules,
        case.lora,
        update_of(case),
        rounding(),  # a float64 reference of a 16-bit row has the library's own float32 inside, others do not
        tuple(tuple(map(id, samples)) for samples in steps),
    )
    if key not in _KNOWN:
        oracle = kind(model, getattr(torch, case.dtype), update_of(case), case.device, rules, dict(case.lora))
        start = _on_host(oracle.weights())
        wanted = (start, [_step_on_host(oracle, samples) for samples in steps], _on_host(oracle.weights()))
        _KNOWN[key] = (steps, wanted)  # the samples are kept, so that their ids stay theirs
    return _KNOWN[key][1]


def _step_on_host(oracle: Oracle, samples: Sequence[Sample]) -> Step:
    step = oracle.step(samples)
    return replace(step, gradients=_on_host(step.gradients))


def _on_host(tensors: dict[str, Any]) -> dict[str, Any]:
    """Where the ranks' own come to. None stays."""
    return {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Ratios:
    """Deviations of a 16-bit layout from double precision, as multiples of those of one plain 16-bit process."""

    loss: float
    gradient: float
    gradient_name: str
    update: float


def compare_rounding(
    model: str, case: Case, steps: Sequence[Sequence[Sample]], fault: Fault | None = None, together: bool = False
) -> Ratios:
    """Train the steps in the case's layout, in one plain process of the same precision, and exactly.

    together: each gradient's errors of all steps count as one. Of decoders with experts: of a token whose experts are
    nearly tied rounding decides which it visits, here as in one process, and in which step that happens is chance."""
    trained = train(model, case, steps, fault)
    start, wanted, exact = _expected(model, replace(case, dtype="float64"), steps)
    _, rough, plain = _expected(model, case, steps, MixedOracle)
    ours = max(_deviation(found, e.loss) for found, e in zip(trained.losses, wanted, strict=True))
    theirs = max(_deviation(r.loss, e.loss) for r, e in zip(rough, wanted, strict=True))
    errors = [
        _gradient_errors(found, r.gradients, e.gradients, 1e-3 * e.norm)
        for found, r, e in zip(trained.gradients, rough, wanted, strict=True)
    ]
    gradients = _worst_ratio([_as_one(errors)] if together else errors)
    moved = {name for name, weight in exact.items() if not torch.equal(weight, start[name])}
    of_ranks = [{n: w for n, w in of_rank.items() if n in moved} for part in trained.weights for of_rank in part]
    ends = [_ratio(of_rank, plain, exact) for of_rank in of_ranks]
    return Ratios(ours / theirs, *gradients, max(ends))


def _ratio(ours: dict, theirs: dict, exact: dict) -> float:
    """Of the distances to `exact`, ours / theirs, over all weights at once.

    One by one they say nothing: Adam's first updates are the gradient's sign, so that a gradient near zero decides
    the whole error of a short bias."""
    distance = lambda found: math.hypot(*(float((found[name].double() - exact[name]).norm()) for name in ours))
    return distance(ours) / (distance(theirs) or 1.0)  # of a part that nothing trains


_Distances = dict[str, tuple[float, float]]


def _gradient_errors(of_ranks: list[dict], theirs: dict, exact: dict, floor: float) -> _Distances:
    """The distances to `exact` by name: ours, of the worst rank, and theirs; theirs not below `floor`, where nothing
    but chance decides."""
    errors: _Distances = {}
    for name, value in (item for of_rank in of_ranks for item in of_rank.items() if theirs[item[0]] is not None):
        wanted = exact[name].double()
        ours = _deviation(float((value.double() - wanted).norm()), 0.0)
        allowed = max(float((theirs[name].double() - wanted).norm()), floor)
        errors[name] = (max(ours, errors.get(name, (0.0,))[0]), allowed)
    return errors


def _as_one(errors: list[_Distances]) -> _Distances:
    """The distances of several steps as one."""
    names = {name for of_step in errors for name in of_step}
    of = lambda name: zip(*(of_step[name] for of_step in errors if name in of_step), strict=True)
    return {name: tuple(math.hypot(*distances) for distances in of(name)) for name in names}


def _worst_ratio(errors: list[_Distances]) -> tuple[float, str]:
    """Of the distances, ours / theirs."""
    ratios = [(ours / theirs if ours else 0.0, name) for one in errors for name, (ours, theirs) in one.items()]
    return max(ratios, default=(0.0, ""))


def _deviation(found: float, wanted: float) -> float:
    """Relative, or absolute where nothing is wanted; a value that is no number deviates without bound."""
    error = abs(found - wanted) / (abs(wanted) or 1.0)
    return math.inf if math.isnan(error) else error  # max() would pass over it


def _found_gradients(groups: dict[str, LocalGroup], graph: StageGraph, idle: set[str]) -> list[dict[str, Tensor]]:
    """Of every rank: all must agree, not only the first. Of a weight that two stages hold, the sum of both. idle:
    encoders that saw nothing in the step."""
    found = {name: group.execute_all("gradients") for name, group in groups.items() if part_of(name) not in idle}
    for tie in graph.ties:
        for ours, theirs in zip(found[tie.owner], found[tie.other], strict=True):
            for name in ours.keys() & theirs.keys():
                ours[name] = theirs[name] = ours[name] + theirs[name]
    return [of_rank for of_stage in found.values() for of_rank in of_stage]


def _worst_gradient(found: list[dict[str, Tensor]], expected: Step) -> tuple[float, str]:
    floor = 1e-6 * expected.norm or 1.0
    worst = (0.0, "")
    for of_rank in found:
        for name, gradient in of_rank.items():
            wanted = expected.gradients[name]
            assert wanted is not None, f"{name} got a gradient that the plain model does not have"
            error = _deviation(float((gradient.to(wanted) - wanted).norm()) / max(float(wanted.norm()), floor), 0.0)
            worst = max(worst, (error, name))
    missing = {n for n, g in expected.gradients.items() if g is not None} - {n for r in found for n in r}
    assert not missing, f"no rank has a gradient of {sorted(missing)[:3]}"
    return worst


def _without_gradient(steps: Sequence[Step]) -> set[str]:
    """Weights whose gradient is zero but for rounding: what Adam makes of it in float32 is the rounding's sign.

    Key biases without rotary positions, for one: softmax does not see what shifts all scores of a query."""
    small = lambda step, name: step.gradients[name] is None or float(step.gradients[name].norm()) < 1e-6 * step.norm
    taken = [step for step in steps if step.norm]
    named = (name for name in steps[0].gradients if any(step.gradients[name] is not None for step in taken))
    return {name for name in named if all(small(step, name) for step in taken)}


def _below_rounding(steps: Sequence[Step]) -> dict[str, Tensor]:
    """By weight that has some: its elements whose gradients are smaller than what float32 resolves of the steps'
    norms, and not zero. One of them can be off by half: Adam divides it by its own size."""
    resolved = torch.finfo(torch.float32).eps
    largest: dict[str, Tensor] = {}
    for step in steps:
        for name, gradient in step.gradients.items():
            if step.norm and gradient is not None:
                share = gradient.abs() / step.norm
                largest[name] = torch.maximum(largest[name], share) if name in largest else share
    found = {name: (share > 0) & (share < resolved) for name, share in largest.items()}
    return {name: elements for name, elements in found.items() if elements.any()}


def _worst_update(
    trained: list[list[dict[str, Tensor]]], start: dict, end: dict, undecided: set[str], elements: dict[str, Tensor]
) -> tuple[float, str]:
    """`undecided` weights, and the named elements of others, are passed over."""
    worst = (0.0, "")
    for of_rank in (rank for part in trained for rank in part):
        for name, weight in of_rank.items():
            if name in undecided:
                continue
            wanted = end[name] - start[name]
            off = weight.to(wanted) - end[name]
            if name in elements:
                off = off.masked_fill(elements[name], 0.0)
            error = _deviation(float(off.norm()) / (float(wanted.norm()) or 1.0), 0.0)
            worst = max(worst, (error, name))
    moved = {name for name, weight in end.items() if not torch.equal(weight, start[name])}
    missing = moved - {name for part in trained for of_rank in part for name in of_rank}
    assert not missing, f"no rank holds {sorted(missing)[:3]}"
    return worst
