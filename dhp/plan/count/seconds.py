"""Seconds of units, of a stage's passes, and per step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from dhp.config.parts import DECODER
from dhp.config.rules import FSDP
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.reports import RecomputePolicies
from dhp.models.shape import PartShape
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads, tower_load
from dhp.plan.count.rank_traffic import DividedWeights
from dhp.plan.count.rates import Operations, Rates, TimeSplit, spend
from dhp.plan.count.row_bytes import NONE, PartBytes
from dhp.plan.count.state_bytes import VALUE_BYTES, RankBytes, spread_evenly, sum_bytes
from dhp.plan.count.unit_work import Passes, decoder_passes, recomputed, tower_passes

KINDS = ("products", "attention", "elementwise", "sent", "exposed", "host", "recompute", "update", "sync")


@dataclass(frozen=True, eq=False)
class UnitSeconds:
    """One unit: what precedes the layers, a layer, or what follows them. shares: of a forward that each choice of
    recompute runs again."""

    passes: Passes
    rates: Rates
    shares: Mapping[str, float]

    @cached_property
    def forward(self) -> TimeSplit:
        return spend(self.passes.forward, self.rates)

    @cached_property
    def backward(self) -> TimeSplit:
        """Without recomputing."""
        return spend(self.passes.backward, self.rates)

    def again_s(self, choice: str) -> float:
        """That recomputing adds to a backward."""
        if choice not in self._again:
            self._again[choice] = self._recomputing(choice)
        return self._again[choice]

    @cached_property
    def _again(self) -> dict[str, float]:
        return {}

    def _recomputing(self, choice: str) -> float:
        share = self.shares.get(choice, 0.0)
        if not share:
            return 0.0
        again = recomputed(self.passes.forward, choice, share)
        return spend(self.passes.backward + replace(again, hidden=()), self.rates).total - self.backward.total


@dataclass(frozen=True)
class StageSeconds:
    """One stage. forward_s, backward_s: of a run of its layers and one micro-batch, by run.

    kinds: seconds of one micro-batch by `KINDS`, those of what is done once a step for the whole step. once_s: of
    these, what devices take once."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    once_s: float
    kinds: Mapping[str, float]

    @property
    def micro_batch_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)


def unit_seconds(
    counted: Counted,
    name: str,
    section: PartConfig,
    degrees: Degrees,
    loads: RunLoads,
    rates: Rates,
    kept: PartBytes | None = None,
) -> tuple[UnitSeconds, ...]:
    """Of a part's units. section: resolved. kept: what layers keep, which elementwise kernels move; None: it is traced.
    Raises ModelError where it cannot be."""
    weights = [counted.unit_parameters(name, Cut.of(section), experts=experts) for experts in (False, True)]
    found = unit_passes(counted, name, section, degrees, loads, kept)
    return _alike(found, counted.replays[name], list(zip(*weights, strict=True)), section, degrees, rates)


def unit_passes(
    counted: Counted, name: str, section: PartConfig, degrees: Degrees, loads: RunLoads, kept: PartBytes | None = None
) -> tuple[Passes, ...]:
    """The work of a part's units, without what is sent of their weights. kept: see `unit_seconds`."""
    kept = kept or counted.keeps(name, Cut.of(section))
    if name == DECODER:
        load = loads.even if waits_for_others(section) else loads.text
        found = decoder_passes(section, degrees, counted.family, counted.sizes, load, kept, counted.trained)
        return (Passes(Operations(), Operations()), *found)
    pictures = tower_load(loads.passed, degrees, counted.window)
    divided = loads.passed.divided(degrees.data, degrees.sequence)
    done = counted.tower_operations(pictures)
    return tower_passes(section, degrees, counted.family, counted.pieces, pictures, kept, divided, done)


def waits_for_others(section: PartConfig) -> bool:
    """Whether replicas exchange weights or gradients in every micro-batch."""
    return section.zero_stage >= 2


def _alike(
    passes: Sequence[Passes],
    shares: Sequence[Mapping[str, float]],
    weights: Sequence[tuple[int, int]],
    section: PartConfig,
    degrees: Degrees,
    rates: Rates,
) -> tuple[UnitSeconds, ...]:
    """Units that are the same have one object, whose seconds are counted once. weights: see `with_weights`."""
    known: dict[tuple[int, tuple[int, int]], UnitSeconds] = {}
    found = []
    for own, share, held in zip(passes, shares, weights, strict=True):
        key = (id(own), held)
        if key not in known:
            known[key] = UnitSeconds(with_weights(own, *held, section, degrees), rates, share)
        found.append(known[key])
    return tuple(found)


def with_weights(passes: Passes, held: int, experts: int, section: PartConfig, degrees: Degrees) -> Passes:
    """With what is sent of the unit's weights and gradients in every micro-batch. held: parameters of a rank; experts:
    of these, those of experts that replicas share out."""
    if section.zero_stage < 2 or not held:
        return passes
    cut = divided_weights(section, degrees, held, held, experts)
    there, back = cut.forward(False), cut.backward(False)
    if cut.by_torch:
        return Passes(_hiding(passes.forward, there), _hiding(passes.backward, back))
    gathers = tuple(one for one in back if one.operation == "all-gather")  # DeepSpeed prefetches, and waits for sums
    behind = replace(passes.backward, sent=(*passes.backward.sent, *(one for one in back if one not in gathers)))
    return Passes(_hiding(passes.forward, there), _hiding(behind, gathers))


def _hiding(work: Operations, sent: tuple) -> Operations:  # type: ignore[type-arg]
    return replace(work, hidden=(*work.hidden, *sent))


def divided_weights(section: PartConfig, degrees: Degrees, parameters: int, again: int, experts: int) -> DividedWeights:
    """Parameters of a rank as ranks that hold the same ones divide them. again, experts: see `DividedWeights`."""
    return DividedWeights(
        degrees.shards,
        parameters,
        VALUE_BYTES[section.dtype],
        sum_bytes(section),
        section.zero_stage,
        section.zero_stage > 1 and section.zero_engine == FSDP,
        again,
        degrees.tensor,
        experts,
        degrees.copies,
    )


def stage_seconds(
    units: Sequence[UnitSeconds],
    chunks: Sequence[range],
    choices: RecomputePolicies,
    backward_from: int | None,
    once: tuple[float, float],
) -> StageSeconds:
    """A stage with these runs of layers. choices: of its layers, in order. backward_from: the first unit, by its place
    among all of the part, through which a backward goes; None: through none. once: seconds of its update, and of
    gradients and weights that are exchanged once a step and waited for."""
    last, choice_of = len(units) - 2, dict(zip((at for run in chunks for at in run), choices, strict=True))
    forwards, backwards = [], []
    kinds = dict.fromkeys(KINDS, 0.0)
    for run in chunks:
        own = range(run.start + (run.start > 0), run.stop + 1 + (run.stop == last))
        forward_s = backward_s = 0.0
        for at in own:
            forward_s += units[at].forward.total
            _count(kinds, units[at].forward)
            if backward_from is not None and at >= backward_from:
                again_s = units[at].again_s(choice_of.get(at - 1, NONE))
                backward_s += units[at].backward.total + again_s
                _count(kinds, units[at].backward)
                kinds["recompute"] += again_s
        forwards.append(forward_s)
        backwards.append(backward_s)
    kinds["update"], kinds["sync"] = once
    return StageSeconds(tuple(forwards), tuple(backwards), sum(once), kinds)


def _count(kinds: dict[str, float], spent: TimeSplit) -> None:
    """Add a pass. exposed: seconds that hidden sends, and the joining of what goes on at once, add."""
    done = spent.products + spent.attention + spent.elementwise + spent.sent
    for one in fields(spent):
        if one.name in ("products", "attention", "elementwise", "sent"):
            kinds[one.name] += getattr(spent, one.name)
    more = spent.total - done
    kinds["host" if spent.host > spent.hidden else "exposed"] += more


def once_a_step(
    section: PartConfig, degrees: Degrees, shape: PartShape, states: RankBytes, backward: Operations, rates: Rates
) -> tuple[float, float]:
    """Seconds of a stage's update, and of what is exchanged once a step beyond what its last backward hides.

    shape: of the stage. states: of a rank. backward: of one micro-batch."""
    trained = shape.per_rank if shape.trained is None else shape.trained
    if not trained:
        return 0.0, 0.0
    weights = divided_weights(section, degrees, trained, 0, shape.trained_experts)
    if rates.update is None:  # states are read and written, gradients read twice (their norm first), weights written
        traffic = 2 * (states.optimizer + states.host) + 2 * states.gradients + states.weights
        updated = traffic / rates.elementwise
    else:
        spread = spread_evenly(shape, degrees)
        share = (spread.per_rank if spread.trained is None else spread.trained) / degrees.shards
        updated = (share if section.zero_stage else trained) / rates.update
    # Of matrices that are cut, each is put together and made orthogonal on one of the ranks.
    updated += shape.orthogonalizing / (degrees.shards if section.zero_stage else 1) / rates.products
    sent = sum(one.seconds(rates) for one in weights.update())
    if section.zero_stage >= 2:
        return updated, sent
    gradients = weights.backward(True)
    if section.zero_stage == 1:  # DeepSpeed begins its sums behind backward
        return updated, sent + sum(one.seconds(rates) for one in gradients)
    beside = spend(replace(backward, hidden=gradients), rates).total - spend(backward, rates).total
    return updated, sent + beside
