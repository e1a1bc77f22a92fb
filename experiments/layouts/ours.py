"""dhp on the same work: two vision and two text actors that share two cores in each layout, or four and four; and one
chain over two devices, of which the second has the tower's last stage and the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray

from dhp.config.layout import DEEPSPEED, FSDP
from dhp.core.axes import Degrees
from dhp.core.graph import StageGraph
from dhp.core.reports import StageReport, StageUsage
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.registry import load_family
from dhp.plan.recompute.profile import usage_of
from dhp.step.schedule import make_schedule
from dhp.trainer.recomputing import arrange
from dhp.trainer.settings import stage_settings
from experiments.layouts.peers import LEARNING_RATE
from experiments.layouts.work import SAMPLES, Run
from experiments.pair import ONE, TEXT, VISION, as_batch, pair_of, settings_of
from experiments.partition.chain import ENGINES, SCHEDULE, STEPS, Stages, plan_chain
from experiments.small import deal, started, timed

LOCAL = "local"
TWO = {name: Degrees(**{name: 2}) for name in ("data", "ulysses", "tensor")}


@dataclass(frozen=True)
class Spread:
    """Degrees of both parts, and the ZeRO stage and engine of each. Device k has rank k of both."""

    vision: Degrees
    text: Degrees
    vision_stage: int = 0
    text_stage: int = 0
    text_engine: str = DEEPSPEED


# The last two have four ranks a part: torch cuts the states of replicas beside tensor parallelism, or nobody does.
FOUR = Degrees(data=2, ulysses=2), Degrees(data=2, tensor=2)
LAYOUTS = {
    "DP": Spread(TWO["data"], TWO["data"]), "SP+TP": Spread(TWO["ulysses"], TWO["tensor"]),
    "TP": Spread(TWO["tensor"], TWO["tensor"]), "DP+TP": Spread(TWO["data"], TWO["tensor"]),
    "SP+DP": Spread(TWO["ulysses"], TWO["data"]), "ZeRO-3": Spread(TWO["data"], TWO["data"], 3, 3),
    "TP+replicas": Spread(*FOUR), "TP+FSDP": Spread(*FOUR, text_stage=3, text_engine=FSDP),
}  # fmt: skip
CHAIN = "chain"  # of two stages of a tower and a decoder, cut as a run cuts them
NAMES = (*LAYOUTS, CHAIN)
UPDATE = OptimizerSettings(LEARNING_RATE, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, None)


@dataclass(frozen=True)
class Made:
    """A layout of a model: its stages and their settings, and in how many micro-batches a step goes through them."""

    graph: StageGraph
    settings: Mapping[str, StageSettings]
    vision: Degrees
    text: Degrees
    micro_batches: int = 1


def make_layout(name: str, model: str, measure: bool) -> Made:
    """The stages and settings of a layout. measure: bytes too."""
    if name == CHAIN:
        return _make_chain(model, measure)
    spread = LAYOUTS[name]
    graph = pair_of(load_family(model), spread.vision, spread.text)
    vision = settings_of(graph, VISION, model, UPDATE, measure=measure, zero_stage=spread.vision_stage)
    text = settings_of(
        graph, TEXT, model, UPDATE, measure=measure, zero_stage=spread.text_stage, zero_engine=spread.text_engine
    )
    return Made(graph, {VISION: vision, TEXT: text}, spread.vision, spread.text)


def _make_chain(model: str, measure: bool) -> Made:
    plan = plan_chain(model, Stages(2, 1, (), (), shared=True), SAMPLES, "", "text.partition=exact")
    settings = {
        stage.name: stage_settings(plan.config, plan.graph, stage, "cpu", STEPS, rules=plan.rules)
        for stage in plan.graph.stages
    }
    own = {name: replace(one, update=UPDATE, measure=measure) for name, one in settings.items()}
    return Made(plan.graph, own, ONE, ONE, SAMPLES)


def run_layout(
    name: str,
    model: str,
    batches: Mapping[str, Sequence[Sample]],
    steps: int,
    measure: bool = False,
    address: str = LOCAL,
) -> dict[str, Run]:
    """Of every batch, `steps` steps after one that does not count. measure: bytes of the last. address: of a Ray."""
    made, found = make_layout(name, model, measure), {}
    graph = made.graph
    schedule = make_schedule("sequential" if made.micro_batches == 1 else SCHEDULE, graph, made.micro_batches)
    with started(graph, ENGINES, made.settings, address=address) as stages:
        for size, samples in batches.items():
            batch = as_batch(deal(model, made.vision, made.text, samples, made.micro_batches), ray.put)
            seconds, reports = timed(graph, stages, schedule, batch, steps)
            last = graph.stages[-1].name
            loss = sum(report.loss for report in stages[last].leaders(reports[last]))
            found[size] = Run(seconds, loss, *(_bytes(name, graph, reports) if measure else ()))
    return found


def device_bytes(graph: StageGraph, usages: Mapping[str, StageUsage]) -> int:
    """The most activations of a device with a rank of both stages, which take turns: vision keeps what its forward
    kept while text works. usages: of its ranks."""
    held = {
        stage: usage.before_bytes + sum(layer.held_bytes for layer in usage.layers) + usage.after_bytes
        for stage, usage in usages.items()
    }
    taking_turns = arrange(graph, make_schedule("sequential", graph, 1), "cpu")
    return int(taking_turns.device_bytes(held, {stage: usage.peak_bytes for stage, usage in usages.items()}))


def _bytes(name: str, graph: StageGraph, reports: Mapping[str, Sequence[StageReport]]) -> tuple[int, int]:
    """Peak of activations on the fuller device, and bytes sent by all: device k has rank k of both parts. In a chain,
    as if all stages of a device had their most at once."""
    if name == CHAIN:
        of_device = [[s.name for s in graph.stages if device in s.devices] for device in range(graph.device_count())]
        peak = max(sum(usage_of(reports[stage]).peak_bytes for stage in stages) for stages in of_device)
    else:
        ranks = zip(reports[VISION], reports[TEXT], strict=True)
        peak = max(device_bytes(graph, {VISION: vision.usage, TEXT: text.usage}) for vision, text in ranks)
    return peak, sum(sum(r.sent_bytes.values()) for of_stage in reports.values() for r in of_stage)
