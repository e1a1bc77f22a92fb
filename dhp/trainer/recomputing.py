"""Runs recompute=auto: reports to the planner, plans to ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dhp.config.command_line import with_words
from dhp.config.parts import parts, resolved
from dhp.config.resolve import resolve
from dhp.config.rules import no_budget
from dhp.config.schema import Config
from dhp.core.errors import Fault, MoreRecompute, PartFailed
from dhp.core.graph import StageGraph
from dhp.core.reports import StageReport
from dhp.core.text import binary_size
from dhp.plan.count.costs import Plan, StageCosts, arrange, plan_table, read_costs, write_costs
from dhp.plan.recompute.planner import Planner, as_text
from dhp.plan.recompute.profile import run_shape, usage_of
from dhp.plan.run_plan import RunPlan, stage_choices, world
from dhp.plan.search.verdict import relief
from dhp.step.schedule import Schedule
from dhp.step.stages import EngineProtocol, Stages
from dhp.supervise.launch import changes
from dhp.supervise.supervisor import Begun

GIB = 2**30
_LEFT_FREE = 0.1  # of a device's memory, where the budget is read from it
_TOO_SMALL = (
    "; it does not fit even so: raise memory.budget_gib, lower training.micro_batch_size, training.vision_batch or "
    "data.max_pixels, "
    "or share the work among more actors"
)


def plans_any(config: Config, graph: StageGraph) -> bool:
    """Whether there is a stage to plan for: recompute=auto, and gradients that go back through it."""
    asked = parts(config)
    return any(asked[s.part].recompute == "auto" and any(map(graph.goes_back, s.nodes)) for s in graph.stages)


def recompute_more(config: Config, fault: Fault) -> tuple[str, ...]:
    """Settings with which a run goes on where a rank ran out of memory: the part that did, or where its own recompute
    is not planned those whose is, recomputes every layer. None where that is not so, or nothing is left to
    recompute."""
    planned = [name for name, part in parts(config).items() if part.recompute == "auto"]
    eased = [fault.part] if fault.part in planned else planned
    return tuple(f"{name}.recompute=full" for name in eased) if fault.short else ()


def eased(config: Config, words: Sequence[str], saved: bool) -> Config:
    """The run's configuration with these settings, to go on with it: from its newest checkpoint or, where it has not
    saved any, from where it began."""
    goes_on = changes(config, Begun(opened=True, saved=saved))
    training = replace(config.training, resume=goes_on["training.resume"])
    again = replace(config, training=training, overwrite=goes_on["overwrite"] == "true")
    return resolve(with_words(again, words))


@contextmanager
def naming_relief(plan: RunPlan, saved: Callable[[], bool]) -> Iterator[None]:
    """Where a rank runs out of its GPU's memory in here, the error says what would free how much. Raises MoreRecompute
    in its place where recomputing more may do. saved: whether the run has finished a checkpoint by now."""
    try:
        yield
    except PartFailed as error:
        if words := recompute_more(plan.config, error.fault):
            raise MoreRecompute(str(error), words, saved()) from error
        said = relief(plan, error.fault.part) if error.fault.short else ""
        if not said:
            raise
        raise type(error)(f"{error}\n{said}", error.fault) from error.__cause__


def with_more_recomputed(config: Config, run: Callable[[Config], None], say: Callable[[str], None]) -> None:
    """Run as configured; where that ends for want of memory under a plan, go on with less kept, until nothing more can
    be recomputed."""
    while (again := _short(config, run, say)) is not None:
        config = again


def _short(config: Config, run: Callable[[Config], None], say: Callable[[str], None]) -> Config | None:
    """The configuration with which a run is to go on; None where it has completed."""
    try:
        run(config)
        return None
    except MoreRecompute as error:
        first = str(error).partition("\n")[0]
        say(f"{first}\nrecompute      ran out of memory as planned, so the run goes on with {' '.join(error.words)}")
        return eased(config, error.words, error.saved)


class Recomputing:
    """One run's plan, from the first step on. It knows the stages through which gradients go back; others save
    nothing."""

    def __init__(
        self,
        plan: RunPlan,
        stages: Stages,
        device: str,
        schedule: Schedule,
        say: Callable[[str], None],
        memory_bytes: int | None = None,
        counted: Mapping[str, StageCosts] | None = None,
    ):
        """device: cpu | cuda. memory_bytes: of each device; None: not known. counted: costs by the model's shape, by
        which a plan is made where none were measured. Raises ConfigError where there is neither memory_bytes nor
        memory.budget_gib."""
        config, graph, family = plan.config, plan.graph, plan.family
        self._stages, self._graph, self._say = stages, graph, say
        of_part = {name: part.layers.kinds for name, part in family.parts.items()}
        written = {name: resolved(part.recompute) for name, part in parts(config).items()}
        kept = [stage for stage in graph.stages if any(graph.goes_back(node) for node in stage.nodes)]
        kinds = {stage.name: tuple(of_part[stage.part][layer] for layer in stage.layers) for stage in kept}
        fixed = {s.name: stage_choices(written[s.part], graph, s) for s in kept if written[s.part] != "auto"}
        self._auto = [stage for stage in kinds if stage not in fixed]
        self._folder = Path(config.memory.cache_dir or config.run_dir)
        self._shape = run_shape(config, device, family.config.to_dict(), fixed, world(config))
        given = config.memory.budget_gib
        if given is None and memory_bytes is None:
            raise no_budget("recompute")
        self._memory_bytes = memory_bytes if given is None else None  # to be read from
        self._budget = 0.0 if given is None else given * GIB
        known = read_costs(self._folder, self._shape)
        self._arrangement = arrange(graph, schedule, device)
        counted = None if known is not None else counted
        self._keeps = counted is None  # costs that are measured are kept for later runs
        costs, waits = known or counted, given is None  # a plan for what is left waits for what is left
        self._planner = Planner(kinds, fixed, self._arrangement, self._budget, costs, counted is not None, waits)
        origin = f"measured before, in {self._folder}" if known else "counted by the model's shape"
        if self._planner.settled:
            self._say(f"recompute      {origin}")
            self._apply()
        elif costs is not None:
            self._say(f"recompute      {origin}; everything at first, until steps show what memory is left")
        else:
            self._say("recompute      everything at first, and measured; the plan follows after some steps")

    def learn(self, reports: Mapping[str, Sequence[StageReport]]) -> None:
        """Take a step's reports of all ranks, by stage. A new plan is sent to the ranks, for steps after the last one
        submitted."""
        if short := [stage for stage, of_ranks in reports.items() if any(report.short for report in of_ranks)]:
            self._say(f"recompute      {', '.join(short)} ran out of memory, so more is recomputed from now on")
            self._planner.run_short()
            self._apply()
            return
        usages = {stage: usage_of(of_ranks) for stage, of_ranks in reports.items() if stage in self._planner.asked}
        if self._memory_bytes is not None and self._planner.measures_everything:
            self._budget = room(self._memory_bytes, self._arrangement.sharing, reports)
            self._planner.budget_bytes = self._budget
        peak = self._planner.measured_bytes(usages)
        was_settled = self._planner.settled
        if not self._planner.learn(usages):
            return
        if was_settled and self._planner.settled:
            self._say(f"recompute      {binary_size(peak)} are more than the budget, so more is recomputed")
        elif was_settled:
            self._say("recompute      a stage has its first work: everything again, and measured; a new plan follows")
        if self._planner.settled and self._keeps:
            write_costs(self._folder, self._shape, self._planner.costs())
        self._apply()

    def _apply(self) -> None:
        plan = self._planner.asked
        for stage in self._auto:
            self._stages[stage].group.execute_all_async(EngineProtocol.set_recompute, plan[stage], returns=0)
        if not self._planner.settled:
            return
        self._tell_untried()
        needed = self._planner.predicted_bytes()
        fits = "" if needed <= self._budget else _TOO_SMALL
        lines = [*plan_table(self._planner.costs(), plan), *self._as_configured(plan)]
        lines.append(
            f"{binary_size(needed)} of {binary_size(self._budget)} expected on the fullest device, "
            f"{self._planner.saved_s() * 1e3:.0f} ms a step less than with everything recomputed{fits}"
        )
        for line in lines:
            self._say(f"recompute      {line}")

    def _tell_untried(self) -> None:
        by_stage: dict[str, list[str]] = {}
        for stage, choice in sorted(self._planner.untried):
            by_stage.setdefault(stage, []).append(choice)
        for stage, choices in by_stage.items():
            self._say(
                f"recompute      {stage}: {', '.join(choices)} not tried, since the budget may not have room for one "
                "layer that keeps so much"
            )

    def _as_configured(self, plan: Plan) -> list[str]:
        """The plan as each part's key would say it: its stages' layers in the part's order."""
        keys = []
        for part in self._graph.parts():
            stages = [stage for stage in self._graph.of_part(part) if stage.name in self._planner.costs()]
            by_layer = {layer: plan[s.name][at] for s in stages for at, layer in enumerate(s.layers)}
            if by_layer:
                keys.append(f"{part}.recompute={as_text(tuple(by_layer[layer] for layer in sorted(by_layer)))}")
        return keys


def room(memory_bytes: int, sharing: Sequence[frozenset[str]], reports: Mapping[str, Sequence[StageReport]]) -> float:
    """Bytes that activations may take on the fullest device, after a step: what it has besides the most that ranks had
    reserved, and what of that was activations. A part of the memory stays free, for fragments and for longer rows.

    sharing: the stages of each device. reports: of all ranks, by stage, with memory_bytes."""
    most = {stage: max(report.memory_bytes or 0 for report in of) for stage, of in reports.items()}
    usages = {stage: usage_of(of) for stage, of in reports.items()}
    activations = {stage: usage.peak_bytes for stage, usage in usages.items() if usage is not None}
    others = [sum(most[stage] - activations.get(stage, 0) for stage in stages) for stages in sharing]
    return max(0.0, (1 - _LEFT_FREE) * memory_bytes - max(others, default=0))


def activation_bytes(reports: Mapping[str, Sequence[StageReport]]) -> dict[str, int] | None:
    """By stage, the peak of the rank whose activations took most; None where they are not measured."""
    usages = {stage: usage_of(of_ranks) for stage, of_ranks in reports.items()}
    return {stage: usage.peak_bytes for stage, usage in usages.items() if usage is not None} or None
