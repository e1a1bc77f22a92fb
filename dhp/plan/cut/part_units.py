"""Makes a part's units for cuts, as forecasts have them."""

from collections.abc import Mapping
from dataclasses import replace

from dhp.config.layout import read_choices
from dhp.config.parts import DECODER, degrees, parts, resolved
from dhp.config.schema import Config, PartConfig
from dhp.plan.bench.machine import Machine, expected_machine
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads, text_rows, tower_rows
from dhp.plan.count.row_bytes import CHOICES, NONE
from dhp.plan.count.samples import assumed_samples
from dhp.plan.count.seconds import UnitSeconds, unit_seconds
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.count.unit_operations import hidden_width, tower_width
from dhp.plan.cut.units import Saved, StageLink, Unit


class PartUnits:
    """Units of the parts of one run. Rows are assumed, as before any sample is read; the devices are those that a dry
    run names."""

    def __init__(self, config: Config, counted: Counted):
        """config: resolved."""
        self._config, self._counted = config, counted
        self._loads: RunLoads = assumed_samples(config, counted.family).loads(config)
        self._machine: Machine = expected_machine(config, counted.family, self._loads)

    @property
    def link(self) -> StageLink:
        """Between two stages."""
        return StageLink(self._machine.handover.bytes_s, self._machine.handover.latency_s)

    @property
    def note(self) -> str:
        """Where seconds are from, if not from data sheets."""
        return ", by rates measured before" if self._machine.measured else ""

    def of(self, name: str, keeps: bool = False) -> tuple[Unit, ...]:
        """What precedes the layers, each layer, and what follows them; the outer two stay with their neighbours, and
        nothing is cut behind the last: in a chain the next part goes on there. keeps: with what they keep of a
        micro-batch, under each choice of recompute where the part has auto. Raises ModelError where that is not
        known."""
        section = parts(self._config)[name]
        found = self._timed(name, section)
        if not keeps:
            return found
        saved = self._saved(name, section)
        return tuple(replace(unit, saved=own) for unit, own in zip(found, saved, strict=True))

    def _timed(self, name: str, section: PartConfig) -> tuple[Unit, ...]:
        seconds, trained = self._seconds(name, section), self._trained(name)
        parameters, states = self._parameters(name), self._handed(name, section)
        last = len(seconds) - 1
        choices = (
            ("", *fixed_choices(section, last - 1), "") if fixed_choices(section, last - 1) else ("",) * (last + 1)
        )
        ends = {0: ("before", "embedding", "patches"), last: ("after", "head", "merger")}
        found = []
        for at, (one, count) in enumerate(zip(seconds, parameters, strict=True)):
            unit = f"layer {at - 1}" if at not in ends else ends[at][1 if name == DECODER else 2]
            inner, again_s = at not in ends, one.again_s(choices[at]) if choices[at] else 0.0
            backward_s = one.backward.total + again_s
            held = Unit(unit, name, int(inner), one.forward.total, backward_s, count, trains=trained[at])
            found.append(replace(held, output_bytes=states[at], cut="may" if inner and at < last - 1 else "never"))
        return tuple(found)

    def _seconds(self, name: str, section: PartConfig) -> tuple[UnitSeconds, ...]:
        kept = self._counted.keeps_if_quick(name, Cut.of(section))
        rates = self._machine.of(name, section.dtype)
        return unit_seconds(self._counted, name, section, degrees(section), self._loads, rates, kept)

    def _trained(self, name: str) -> list[bool]:
        if name != DECODER:
            return [piece.trained > 0 for piece in self._counted.pieces]
        shares, layers = self._counted.trained, len(self._counted.sizes.layers)
        inside = [True if shares is None else shares.get(at, 0.0) > 0 for at in range(layers)]
        outside = True if shares is None else shares.get(None, 0.0) > 0
        return [outside, *inside, outside]

    def _parameters(self, name: str) -> list[int]:
        if name != DECODER:
            return [piece.size for piece in self._counted.pieces]
        sizes = self._counted.sizes
        return [sizes.embedding, *sizes.layers, sizes.norm + sizes.head]

    def _handed(self, name: str, section: PartConfig) -> list[float]:
        """Bytes that a rank hands on behind each unit of a mean micro-batch."""
        value, own, family = VALUE_BYTES[section.dtype], degrees(section), self._counted.family
        layers = len(family.parts[name].layers.kinds)
        if name == DECODER:
            states = value * hidden_width(family) * self._loads.text.tokens / own.sequence
            return [0.0, *[states] * layers, 0.0]
        pictures = self._loads.pictures
        states = value * tower_width(family) * pictures.patches / own.shards
        return [0.0, *[states] * layers, value * hidden_width(family) * pictures.features / own.shards]

    def _saved(self, name: str, section: PartConfig) -> list[Mapping[str, Saved]]:
        """Of each unit, by choice of recompute; where the configuration says what is recomputed, as it is."""
        rows = (text_rows if name == DECODER else tower_rows)(self._loads.worst, degrees(section))
        layers = len(self._counted.family.parts[name].layers.kinds)
        costs = self._counted.keeps(name, Cut.of(section)).costs(rows, range(layers))
        seconds, chosen = self._seconds(name, section), fixed_choices(section, layers)
        found: list[Mapping[str, Saved]] = []
        for at in range(layers):
            own = costs.layers[str(at)]
            if chosen:
                found.append({NONE: Saved(own[chosen[at]].held_bytes)})
                continue
            again = seconds[at + 1].again_s
            found.append({c: Saved(own[c].held_bytes, own[c].replay_bytes, again(c)) for c in CHOICES})
        return [{NONE: Saved(costs.before_bytes)}, *found, {NONE: Saved(costs.after_bytes)}]


def fixed_choices(section: PartConfig, layers: int) -> tuple[str, ...]:
    """What layers recompute, where the configuration says it; else none."""
    recompute = resolved(section.recompute)
    return () if recompute == "auto" else read_choices(recompute, layers)
