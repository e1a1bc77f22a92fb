"""Says a forecast in a few lines; explains losing layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dhp.config.command_line import with_words
from dhp.config.devices import GIB
from dhp.config.layout import DEGREES, OFFERED, resolve_part
from dhp.config.parts import DECODER, parts, resolved, sections
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.config.steps import vision_batch
from dhp.core.errors import DhpError
from dhp.core.parameters import FORMS
from dhp.core.text import binary_size
from dhp.plan.bench.machine import Machine, device_here, expected_machine
from dhp.plan.count.samples import Samples, assumed_equal, equal_samples
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.run_plan import Question, RunPlan, attempt, is_quick, plan_run
from dhp.plan.search.candidates import NEAR, Candidate, evaluate_layouts
from dhp.plan.search.layout_search import Found
from dhp.plan.search.layouts import PartLayout, Refused
from dhp.plan.search.space import Space

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table


@dataclass(frozen=True)
class Expected:
    """What is expected of a run before it begins. question, forecast: None where it is not known; why: then."""

    question: Question | None = None
    forecast: Forecast | None = None
    why: str = ""


def expect(plan: RunPlan, table: Table | None = None) -> Expected:
    """Of a run's own layout: on `ASSUMED` devices, or on this machine's CPUs. table: lengths of its samples; None: rows
    are assumed."""
    if not is_quick(plan):
        return Expected(why="not yet: python -m dhp plan traces this model, once, and then a dry run says it too")

    def make() -> Expected:
        equal = assumed_equal(plan.config)
        samples = Samples(plan.family, table, equal) if table else equal_samples(plan.config, plan.family, equal)
        loads = samples.loads(plan.config)
        question = Question(plan, expected_machine(plan.config, plan.family, loads, plan.graph.device_count()), loads)
        return Expected(question, forecast(question))

    made = attempt(make)
    return Expected(why=f"not known: {made}") if isinstance(made, str) else made


def verdict(expected: Expected, measured: bool = False) -> list[str]:
    """Lines of what is expected. measured: of samples whose lengths are known."""
    found, question = expected.forecast, expected.question
    if found is None or question is None:
        return [f"planned        {expected.why}"]
    machine = question.machine
    lines = [f"planned        {_memory(found, machine)}"]
    here = "" if device_here() is not None else "; no GPU is here"
    if machine.figures:
        lines.append(f"               {_speed(found, machine)}, on {machine} (assumed{here})")
    others = "other devices and the best layout: python -m dhp plan"
    return [*lines, f"               for {others if measured else f'your data, {others}'}"]


def relief(plan: RunPlan, part: str) -> str:
    """A line about what would free how much on the fullest device where a rank of `part` ran out of memory, each change
    by itself as forecasts have it; "" where that is not known."""
    now = expect(plan).forecast
    if now is None:
        return ""
    freed = {}
    for change in _smaller(plan.config, part):
        made = attempt(partial(_changed, plan, change))
        if isinstance(made, Forecast) and (less := now.peak.total - made.peak.total) > 0.01 * now.peak.total:
            freed[change] = less
    said = ", ".join(f"{key} {binary_size(less)}" for key, less in sorted(freed.items(), key=lambda one: -one[1]))
    return f"By the forecast of this run, on the fullest device would free: {said}" if said else ""


def _smaller(config: Config, part: str) -> Iterator[str]:
    """Changes that each take less memory, as key=value."""
    section, rows = parts(config)[part], config.training.micro_batch_size
    if section.recompute != "full":
        yield f"{part}.recompute=full"
    yield from (f"{part}.state_bytes={form}" for form in FORMS if form < section.state_bytes)
    if rows % 2 == 0:
        yield f"training.micro_batch_size={rows // 2}"
    if part != DECODER and vision_batch(config) > 1:
        yield f"training.vision_batch={vision_batch(config) // 2}"


def _changed(plan: RunPlan, change: str) -> Forecast | None:
    return expect(plan_run(resolve(with_words(plan.config, [change])), counted=plan.counted)).forecast


def _memory(found: Forecast, machine: Machine) -> str:
    """`fits: at most 65.3 GiB of 75.1 (79.1 less 5%), at the loss of text`."""
    most, limit = found.peak.total, machine.limit_bytes
    where = f"{binary_size(most)} on the fullest device ({found.peak.name})"
    if limit == float("inf"):
        return where
    room = f"{limit / GIB:.1f} GiB ({machine.memory_bytes / GIB:.1f} less {machine.reserve:.0%})"
    if most > limit:
        return f"does not fit: {where}, {binary_size(most - limit)} more than {room}"
    near = most > machine.sure_bytes
    return f"{'may fit, within the error of this' if near else 'fits'}: {where} of {room}"


def _speed(found: Forecast, machine: Machine) -> str:
    bubble = f", bubble {found.timeline.bubble:.0%}" if found.timeline.bubble >= 0.01 else ""
    return f"{found.step_s:.3g} s a step, {found.tokens_s / machine.count:,.0f} tokens/s a device{bubble}"


NAMED = 0.6  # of a gap that the named kinds make
WORDS = {
    "products": "products of matrices",
    "attention": "attention",
    "elementwise": "elementwise work",
    "sent": "exchanges in layers",
    "exposed": "weights and gradients waited for",
    "host": "launches",
    "recompute": "recomputing",
    "update": "optimizer",
    "sync": "sums of gradients",
    "bubble": "idle devices",
    "driver": "driver, micro-batches",
}
_SAME_SPEED = "as fast, less simple"
_EQUATION = "%"  # the sign of a check's own equation: 28 heads % 8


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit. change: the single one with which it would, as key=value; "": none was found."""

    candidate: Candidate
    change: str


def loses_by(one: Forecast, best: Forecast) -> str:
    """The kinds of work that make most of the gap to the best layout, with its milliseconds."""
    gap = one.step_s - best.step_s
    if gap <= NEAR * best.step_s:
        return _SAME_SPEED
    kinds, bests = one.kinds(), best.kinds()
    longer = sorted(((kinds[kind] - bests[kind], kind) for kind in kinds), reverse=True)
    named, made = [], 0.0
    for seconds, kind in longer:
        if seconds <= 0 or made >= NAMED * gap:
            break
        named.append(WORDS[kind])
        made += seconds
    return f"{1000 * gap:.0f} ms: {', '.join(named) or 'all of it'}"


def refusals(found: Found, most: int) -> list[Refused]:
    """Some of what is refused, each message once, equations of checks first."""
    by_reason = {one.reason: one for one in found.refused}
    return sorted(by_reason.values(), key=lambda one: (_EQUATION not in one.reason, "from 1 on" in one.reason))[:most]


def too_large(space: Space, best: Candidate) -> list[TooLarge]:
    """Layouts near the best one that do not fit: replicas alone without ZeRO, and the best one without recomputing."""
    found, seen = [], set()
    for settings in _simpler(space, best):
        one = evaluated(space, settings)
        if one is None or one.fits or round(one.found.peak.total) in seen:
            continue
        seen.add(round(one.found.peak.total))
        found.append(TooLarge(one, single_change(space, settings)))
    return found


def _simpler(space: Space, best: Candidate) -> Iterator[dict[str, Any]]:
    names = parts(space.config)
    plain = dict(best.settings)
    for name in names:
        free = [axis for axis in DEGREES if axis not in space.held.get(name, ())]
        if "data" in free and "zero_stage" not in space.held.get(name, ()):
            world = best.settings[f"{name}.num_actors"]
            kept = [resolved(getattr(sections(space.config)[name], axis)) for axis in DEGREES if axis not in free]
            for own in kept:
                world //= own
            plain |= {f"{name}.{axis}": 1 for axis in free} | {f"{name}.data": world, f"{name}.zero_stage": 0}
            plain[f"{name}.sequence_sharded_norms"] = False
            plain[f"{name}.parallelism"] = "data" if world > 1 else "none"
    yield plain | _recompute(space, "none")
    yield dict(best.settings) | _recompute(space, "none")


def _recompute(space: Space, choice: str) -> dict[str, Any]:
    return {f"{name}.recompute": choice for name, part in parts(space.config).items() if part.recompute == "auto"}


def single_change(space: Space, settings: Mapping[str, Any]) -> str:
    """The first change of one key, of a row that goes from what costs least to what costs most, with which the layout
    would fit; "" for none."""
    for key, value in _changes(space, settings):
        changed = {**settings, key: value} | _sharded_devices(settings, key, value)
        one = evaluated(space, changed)
        if one is not None and one.fits:
            return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
    return ""


def _changes(space: Space, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    names = [DECODER, *(name for name in parts(space.config) if name != DECODER)]
    for name in names:
        if parts(space.config)[name].recompute == "auto":
            yield f"{name}.recompute", "auto"
    for name in names:
        if "zero_stage" not in space.held.get(name, ()):
            yield from ((f"{name}.zero_stage", stage) for stage in range(settings[f"{name}.zero_stage"] + 1, 4))
    rows = settings["training.micro_batch_size"]
    if not space.rows_held and rows % 2 == 0:
        yield "training.micro_batch_size", rows // 2
    for name in names:
        tensor = settings[f"{name}.tensor"]
        if "tensor" not in space.held.get(name, ()) and "tensor" in OFFERED[name]:
            yield f"{name}.tensor", tensor * 2


def _sharded_devices(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    name, _, leaf = key.partition(".")
    if leaf != "tensor":
        return {}
    replicas = settings[f"{name}.data"]
    return {f"{name}.data": replicas // 2, f"{name}.parallelism": "tensor"}


def evaluated(space: Space, settings: Mapping[str, Any]) -> Candidate | None:
    """The forecast of a whole layout by its settings; None where the run's checks refuse it."""
    layouts: dict[str, PartLayout] = {}
    try:
        for name, part in parts(space.config).items():
            own = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name}.")}
            layouts[name] = PartLayout(name, own, resolve_part(name, replace(part, **own)))
        return evaluate_layouts(space, layouts, settings)
    except DhpError:
        return None


def equations(found: Found, most: int = 5) -> Sequence[str]:
    """Why nothing can be: messages of checks, each once."""
    return [one.reason for one in refusals(found, most)]
