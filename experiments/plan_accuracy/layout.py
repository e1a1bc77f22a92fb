"""A layout: its small model, what a plan expects of it, its actors; and the layouts that are compared."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray

from dhp.batch.reader import BatchReader
from dhp.batch.row_shards import NO_DRAWS
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.steps import micro_batches
from dhp.core.batch import StepData
from dhp.data.sample.sample import Sample
from dhp.plan.batches import batch_layout, feed_settings
from dhp.plan.bench.machine import Machine
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.samples import EqualSamples, Samples
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.run_plan import Question, RunPlan, plan_run
from dhp.step.schedule import make_schedule
from dhp.step.stages import Stages
from dhp.trainer.settings import stage_settings
from experiments.pair import as_batch
from experiments.small import dealer, make_sample, save_model, started, timed, wait_for

MERGED = 4  # patches of a token


@dataclass(frozen=True)
class Shape:
    """Of a model: layers, width and inner width of both parts. experts: in each of the decoder's layers; 0: none."""

    tower: tuple[int, int, int]
    decoder: tuple[int, int, int]
    experts: int = 0


SHAPES = {
    "balanced": Shape((4, 128, 384), (4, 256, 704)), "decoder": Shape((2, 64, 128), (6, 320, 1024)),
    "tower": Shape((8, 192, 640), (2, 128, 320)), "experts": Shape((3, 128, 384), (3, 128, 192), 4),
}  # fmt: skip


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


def save_shape(folder: Path, name: str, shapes: Mapping[str, Shape] = SHAPES) -> str:
    """A model of one of these shapes, made where it is not there yet."""
    if (folder / name).is_dir():
        return str(folder / name)
    (depth, width, inner), (layers, hidden, between) = shapes[name].tower, shapes[name].decoder
    text: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": between, "num_hidden_layers": layers}
    vision: dict[str, Any] = {"depth": depth, "hidden_size": width, "intermediate_size": inner}
    if not shapes[name].experts:
        return save_model(folder / name, text, vision | {"fullatt_block_indexes": [depth - 1]})
    text |= {"num_experts": shapes[name].experts, "num_experts_per_tok": 2, "moe_intermediate_size": between}
    text |= {"head_dim": hidden // 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision |= {"patch_size": 14, "deepstack_visual_indexes": [1], "num_position_embeddings": 1024}
    return save_model(folder / name, text, vision, "qwen3_vl_moe")


def make_samples(load: Load, count: int) -> list[Sample]:
    """So many samples of that load."""
    return [make_sample(seed, (1, load.rows, load.columns), load.words, load.targets) for seed in range(count)]


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
        return forecast(Question(self.plan, machine, self.loads))

    def data(self) -> StepData:
        """A step's, dealt to the ranks as a run's data are."""
        config = self.plan.config
        layout, feed = batch_layout(config), feed_settings(config)
        samples = make_samples(self.load, config.training.batch_size)
        division = replace(feed.division, draws=NO_DRAWS)
        return dealer(lambda source: BatchReader(source, self.plan.family, 0, division), samples, layout)


class Running:
    """The actors of a layout, and steps of one batch."""

    def __init__(self, layout: Layout, stages: Stages):
        plan = layout.plan
        self.graph, self.groups = plan.graph, {name: stage.group for name, stage in stages.items()}
        schedule = make_schedule(plan.config.training.schedule, plan.graph, micro_batches(plan.config))
        self.train = partial(timed, plan.graph, stages, schedule, as_batch(layout.data(), ray.put))

    def ask(self, method: str) -> dict[str, list[Any]]:
        """What each rank of each stage answers to a method."""
        refs = {name: group.execute_all_async(method) for name, group in self.groups.items()}
        wait_for(self.groups.values())
        return {name: [ray.get(one)[0] for one in of_ranks] for name, of_ranks in refs.items()}

    def tell(self, method: str) -> None:
        """Call a method of each rank that answers nothing."""
        for group in self.groups.values():
            group.execute_all_async(method, returns=0)
        wait_for(self.groups.values())


@contextmanager
def running(layout: Layout, make: Callable[..., Any]) -> Iterator[Running]:
    """The layout's actors, on a Ray of their own. make: of a rank's settings, its engine."""
    plan = layout.plan
    settings = {s.name: stage_settings(plan.config, plan.graph, s, "cpu", STEPS, rules=plan.rules)
                for s in plan.graph.stages}  # fmt: skip
    engines = dict.fromkeys((stage.part for stage in plan.graph.stages), make)
    with started(plan.graph, engines, settings, transport=plan.config.cluster.transport) as stages:
        yield Running(layout, stages)


PLAIN_NORMS = ("vision.kernels=norm:plain", "text.kernels=norm:plain")  # auto's proof in 16 bits depends on weights
SIXTEEN = ("vision.dtype=bfloat16", "text.dtype=bfloat16", *PLAIN_NORMS)
SMALL, LONG = Load(32, 32), Load(64, 64, 96, 64)


@dataclass(frozen=True)
class Case:
    """One configuration whose memory is counted."""

    shape: str
    settings: tuple[str, ...]
    load: Load = SMALL


def both(how: str, *more: str) -> tuple[str, ...]:
    """Two actors a part that share the work in one way."""
    keys = ("num_actors=2", f"parallelism={how}", *more)
    return tuple(f"{part}.{key}" for part in ("vision", "text") for key in keys)


def _steps(samples: int, of_micro_batch: int) -> tuple[str, ...]:
    return f"training.batch_size={samples}", f"training.micro_batch_size={of_micro_batch}"


ONE, TWO, FOUR = _steps(2, 2), _steps(4, 2), _steps(4, 1)
PACKED = ("data.packing=true",)
SHARDED = ("vision.sequence_sharded_norms=true", "text.sequence_sharded_norms=true")
STAGES = ("vision.num_actors=1", "text.num_actors=2", "text.parallelism=pipeline")
CHAINED = (
    "vision.num_actors=2", "vision.parallelism=pipeline", "text.num_actors=1", "cluster.chain=true",
    "training.schedule=1f1b",
)  # fmt: skip


def _choice(name: str) -> tuple[str, ...]:
    return f"vision.recompute={name}", f"text.recompute={name}"


CASES = {
    "plain": Case("balanced", ONE),
    "packed, in two micro-batches": Case("balanced", (*TWO, *PACKED)),
    "light": Case("balanced", (*TWO, *PACKED, *_choice("light"))),
    "mlp": Case("decoder", (*ONE, *_choice("mlp")), LONG),
    "linear, a long row": Case("tower", (*ONE, *PACKED, *_choice("linear")), LONG),
    "everything again": Case("balanced", (*TWO, *PACKED, *_choice("full"))),
    "everything again, 16 bits": Case("balanced", (*TWO, *PACKED, *SIXTEEN, *_choice("full"))),
    "16 bits": Case("decoder", (*TWO, *PACKED, *SIXTEEN)),
    "16 bits, 12 bytes": Case("balanced", (*TWO, *SIXTEEN, "vision.state_bytes=12", "text.state_bytes=12")),
    "replicas": Case("balanced", (*FOUR, *both("data"))),
    "sequence + tensor": Case("balanced", (*TWO, *PACKED, *both("tensor"), "vision.parallelism=sequence")),
    "sequence of both, recomputed": Case("tower", (*ONE, *PACKED, *both("sequence"), *_choice("linear")), LONG),
    "tensor": Case("decoder", (*TWO, *both("tensor"))),
    "tensor, sharded norms": Case("balanced", (*TWO, *PACKED, *both("tensor"), *SHARDED)),
    "pipeline, 1f1b": Case("decoder", (*FOUR, *STAGES, "training.schedule=1f1b", "cluster.collocate=false")),
    "chain": Case("tower", (*FOUR, *PACKED, *CHAINED)),
    "LoRA, frozen tower": Case("decoder", (*TWO, *PACKED, "text.lora.rank=8", "training.frozen=[vision,projector]")),
    "offload": Case("balanced", (*TWO, *PACKED, *_choice("offload"))),
    "MLPs in chunks, many targets": Case(
        "decoder", (*ONE, *PACKED, "text.mlp_chunks=4", "vision.mlp_chunks=2"), Load(32, 32, 1400, 1398)
    ),
    "experts, 16 bits": Case("experts", (*TWO, *PACKED, *SIXTEEN)),
    "experts over two, 16 bits": Case("experts", (*FOUR, *both("data"), "text.expert=2", *SIXTEEN)),
    "ZeRO-1": Case("balanced", (*FOUR, *both("data", "zero_stage=1"))),
    "ZeRO-2": Case("balanced", (*FOUR, *both("data", "zero_stage=2"))),
    "ZeRO-3": Case("balanced", (*FOUR, *both("data", "zero_stage=3"))),
    "FSDP2": Case("balanced", (*FOUR, *both("data", "zero_stage=3", "zero_engine=fsdp"))),
    "FSDP2, gradients cut, 16 bits": Case(
        "decoder", (*FOUR, *both("data", "zero_stage=2", "zero_engine=fsdp"), *SIXTEEN)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Work, and what each layout does it with. settings: of all layouts."""

    shape: str
    load: Load
    layouts: tuple[str, ...]
    settings: tuple[str, ...] = ()


_SAMPLES = 4
_EACH, _SPLIT = (
    f"training.micro_batch_size={_SAMPLES // replicas}" for replicas in (2, 1)
)  # of a replica: all samples in one micro-batch
_ALL = (f"training.batch_size={_SAMPLES}", "data.packing=true")
_PIPELINED = ("training.schedule=1f1b", "training.micro_batch_size=1")
LAYOUTS = {
    "DP": (*both("data"), _EACH),
    "SP+TP": (*both("tensor"), "vision.parallelism=sequence", _SPLIT),
    "TP": (*both("tensor"), _SPLIT),
    "SP": (*both("sequence"), _SPLIT),
    "SP+DP": (*both("data"), "vision.parallelism=sequence", _EACH),
    "ZeRO-1": (*both("data", "zero_stage=1"), _EACH),
    "ZeRO-3": (*both("data", "zero_stage=3"), _EACH),
    "FSDP2": (*both("data", "zero_stage=3", "zero_engine=fsdp"), _EACH),
    "pipeline": (*STAGES, *_PIPELINED),
    "apart": ("cluster.collocate=false", "training.schedule=vision_ahead", "training.micro_batch_size=1"),
    "chain": (
        "vision.num_actors=2", "vision.parallelism=pipeline", "text.num_actors=1", "cluster.chain=true", *_PIPELINED,
    ),
}  # fmt: skip
_FROZEN = ("training.frozen=[vision,projector]",)
_UNCUT = tuple(name for name in LAYOUTS if name not in ("ZeRO-1", "ZeRO-3", "FSDP2", "chain"))
GROUPS = {
    "decoder-heavy": Group("decoder", Load(32, 32), tuple(LAYOUTS)),
    "tower-heavy": Group("tower", Load(48, 48), tuple(name for name in LAYOUTS if name not in ("SP", "ZeRO-1"))),
    "frozen tower": Group("balanced", Load(48, 48), _UNCUT, _FROZEN),
    "long rows": Group("decoder", Load(32, 32, 800, 256), ("DP", "SP+TP", "TP", "SP", "pipeline", "FSDP2", "apart")),
}


def settings_of(group: Group, layout: str) -> tuple[str, ...]:
    """Of one layout's run."""
    return (*_ALL, *LAYOUTS[layout], *group.settings)
