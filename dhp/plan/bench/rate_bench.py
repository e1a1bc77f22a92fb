"""Measures this machine's rates in some 20 seconds.

One layer of each kind of each part is run with random weights (`dhp.plan.bench.layer_bench`), on a CPU while the other
cores compute too, and what it does counted as a plan counts it (`dhp.plan.count.unit_work`): the rates are those at
which the one takes the seconds of the other."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp.config.devices import Figure
from dhp.config.parts import DECODER
from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import DhpError
from dhp.core.parameters import TrainingRules
from dhp.core.process import count_cores, say_nothing
from dhp.models.family import Family
from dhp.plan.bench.rate_fit import (
    MeasuredChannel,
    MeasuredRates,
    Observation,
    PartRates,
    fit_channel,
    fit_rates,
    residual,
)
from dhp.plan.count.costs import read_entries, read_entry, write_entry
from dhp.plan.count.rates import Operation, Operations
from dhp.plan.count.row_bytes import NONE, PartBytes, RowBytes, TracedRows
from dhp.plan.count.unit_work import (
    ATTENTION_BACKWARD,
    Passes,
    TextLoad,
    TowerLoad,
    decoder_passes,
    tower_passes,
    tower_pieces,
)

if TYPE_CHECKING:
    from dhp.plan.bench.layer_bench import LayerSeconds
    from dhp.plan.bench.stopwatch import Stopwatch

FILE = "rates.json"  # in the caller's folder
LIMIT_S = 5.0  # of each part's layers
SHORTER = 4  # the other length with which layers are measured is so many times shorter
PIECE = 0.1  # weight of a pass, of matrices or of attention by themselves, beside a layer's forward and backward
LAUNCH = 0.01  # of launching, which decides where layers say little of it
_FORM = 3  # of what the file keeps: another number where it, or what is measured, has changed


@dataclass(frozen=True)
class RateRequest:
    """What is measured. dtypes: in which each part computes, and which parts. rows: of each, the tokens or patches that
    a rank has of a micro-batch, near which its rates hold. device: cpu or cuda. threads: of a rank on a CPU."""

    dtypes: Mapping[str, str]
    rows: Mapping[str, int]
    device: str = "cpu"
    threads: int = 1


def measured_rates(
    source: str, family: Family, asked: RateRequest, folder: Path, say: Callable[[str], None] = say_nothing
) -> MeasuredRates:
    """Rates of the model of `source` on this machine: those that `folder` keeps of an earlier call with the same model,
    versions and device, or new ones, which it keeps then. Where a CPU takes too long for the asked rows, layers are
    measured with fewer.

    Raises DhpError where the machine is busy, ModelError for a part whose layers cannot be measured, and ClusterError
    where two processes cannot reach each other."""
    shape = _shape(family, asked)
    found = _kept(folder / FILE, shape)
    if found is None:
        require_idle()
        say(f"measuring this machine's rates with one layer of each kind of {', '.join(asked.dtypes)}, some 20 s")
        found = _measure(source, family, asked, _origin(shape))
        write_entry(folder / FILE, shape, found.to_json())
    return found


def cached_rates(family: Family, asked: RateRequest, folder: Path) -> MeasuredRates | None:
    """Rates that `folder` keeps of an earlier measurement with the same model, versions and device, of rows as near to
    the asked ones as there are; None where there are none."""
    shape = _shape(family, asked)
    near = {key: value for key, value in shape.items() if key != "rows"}
    found = [
        (_distance(asked.rows, entry["shape"]["rows"]), entry["costs"])
        for entry in read_entries(folder / FILE)
        if {key: value for key, value in entry["shape"].items() if key != "rows"} == near
    ]
    try:
        return MeasuredRates.from_json(min(found, key=lambda one: one[0])[1]) if found else None
    except (KeyError, TypeError, AttributeError):
        return None


def _distance(asked: Mapping[str, int], known: Mapping[str, int]) -> float:
    return sum(abs(math.log(asked[name] / known[name])) for name in asked)


def require_idle() -> None:
    """Raises DhpError where more processes want to run than this process may use cores."""
    load, cores = os.getloadavg()[0], count_cores()
    if load > cores:
        raise DhpError(
            f"the rates of this machine cannot be measured now: in the last minute {load:.1f} processes wanted to run "
            f"on {cores} cores, so that others' work would count as this one's. End them or wait a minute, or plan "
            "with the rates of a known device: device=NAME"
        )


def _kept(file: Path, shape: Mapping[str, Any]) -> MeasuredRates | None:
    try:
        return MeasuredRates.from_json(read_entry(file, shape))
    except (KeyError, TypeError, AttributeError):
        return None


def _shape(family: Family, asked: RateRequest) -> dict[str, Any]:
    """All that the rates depend on."""
    config = json.dumps(family.values, sort_keys=True, default=str)
    return {
        "form": _FORM,
        "device": _device_name(asked.device),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "dtypes": dict(asked.dtypes),
        "rows": dict(asked.rows),
        "threads": asked.threads,
        "model": hashlib.sha256(config.encode()).hexdigest()[:16],
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        from dhp.parallel.device import device_name  # imports torch

        return device_name()
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{count_cores()} cores of {model or 'an unnamed CPU'}"


def _origin(shape: Mapping[str, Any]) -> Callable[[float], Figure]:
    source = f"{shape['device']}, torch {shape['versions']['torch']}, {date.today().isoformat()}"
    return lambda value: Figure(value, "measured", source)


def _measure(source: str, family: Family, asked: RateRequest, origin: Callable[[float], Figure]) -> MeasuredRates:
    from dhp.cluster.host import keep_freed_memory
    from dhp.cluster.link_seconds import measure_links
    from dhp.plan.bench.stopwatch import companions, stopwatch

    others = 0
    if asked.device == "cpu":
        keep_freed_memory()  # as a rank does there
        others = max(0, count_cores() // asked.threads - 1)  # ranks that compute at the same time
    parts = {}
    with companions(others, asked.threads), stopwatch(asked.device, asked.threads) as watch:
        for name in asked.dtypes:
            parts[name] = _of_part(source, family, name, asked, watch, origin)
    links = measure_links(asked.device, asked.threads)
    sums = None if links.sums is None else _channel("all-reduce", links.sums, origin)
    return MeasuredRates(parts, sums, _channel("send", links.handovers, origin))


def _channel(
    operation: Operation, measured: Sequence[tuple[int, float]], origin: Callable[[float], Figure]
) -> MeasuredChannel:
    found = fit_channel(operation, 2, measured)
    return MeasuredChannel(origin(found.bytes_s), origin(found.latency_s))


def _of_part(
    source: str, family: Family, name: str, asked: RateRequest, watch: Stopwatch, origin: Callable[[float], Figure]
) -> PartRates:
    from dhp.plan.bench.layer_bench import measure_layers
    from dhp.plan.bench.stopwatch import measure_update

    dtype = asked.dtypes[name]
    longest = asked.rows[name]
    lengths = [row_shape(family, name, count) for count in dict.fromkeys((max(1, longest // SHORTER), longest))]
    measured = measure_layers(source, family, name, lengths, dtype, watch, LIMIT_S)
    observed = list(observe(source, family, name, dtype, measured))
    rates = fit_rates([one for own in observed for one in own], ahead=asked.device == "cuda")
    update_s = measure_update(dtype, watch, LIMIT_S / 10)
    return PartRates(
        products=origin(rates.products),
        attention=origin(rates.attention),
        elementwise=origin(rates.elementwise),
        host_s=origin(rates.host_s),
        update=origin(1 / update_s),
        rows=tuple(sorted({own.rows.patches or own.rows.tokens for own in measured})),
        residual=residual(rates, [both for both, *_ in observed]),
        ahead=rates.ahead,
    )


def row_shape(family: Family, name: str, count: int) -> TracedRows:
    """So many tokens of one sample; of a tower, patches of one picture, in whole windows."""
    if name == DECODER:
        return TracedRows(count)
    window = _window(family)
    windows = max(1, round(count / window))
    return TracedRows(0, patches=windows * window, windows=windows)


def _window(family: Family) -> int:
    """Patches of a tower's attention window, or, where all layers attend to whole pictures, that become one token."""
    part = family.tower
    if part.work is None or not part.work.window_pair:
        return part.merge_unit
    side = 1
    while True:  # of a picture that has several windows
        side *= 2
        lengths = part.image_layout((1, side, side)).window_lengths if side**2 >= part.merge_unit else ()
        if len(lengths) > 1:
            return max(lengths)


def observe(
    source: str, family: Family, name: str, dtype: str, measured: Sequence[LayerSeconds]
) -> Iterator[list[Observation]]:
    """Of each measured layer, work with seconds: of both passes first, then of each and of its pieces alone."""
    counted: dict[TracedRows, tuple[Passes, ...]] = {}
    longest = max(own.rows.patches or own.rows.tokens for own in measured)
    for own in measured:
        if own.rows not in counted:
            counted[own.rows] = _passes(source, family, name, dtype, own.rows)
        work = counted[own.rows][own.layer + (name != DECODER)]  # a tower's first unit is its patch embedding
        there, back = own.whole.forward, own.whole.backward
        weight = (own.rows.patches or own.rows.tokens) / longest  # fewer rows are further from a run's
        found = [Observation(work.forward + work.backward, there + back, weight)]
        found += [Observation(work.forward, there, PIECE), Observation(work.backward, back, PIECE)]
        if own.matrices is not None:
            operations, alone = own.matrices
            found.append(Observation(Operations(products=operations), alone.forward, PIECE))
            found.append(Observation(Operations(products=2 * operations), alone.backward, PIECE))
        if own.attention is not None and work.forward.attention:
            pairs = work.forward.attention
            found.append(Observation(Operations(attention=pairs), own.attention.forward, PIECE))
            found.append(Observation(Operations(attention=ATTENTION_BACKWARD * pairs), own.attention.backward, PIECE))
        found.append(Observation(Operations(launched=1.0), own.launch_s, LAUNCH))
        yield found


def _passes(source: str, family: Family, name: str, dtype: str, rows: TracedRows) -> tuple[Passes, ...]:
    """The work of a part's units with these rows, on one rank that trains all of it."""
    from dhp.models.empty import decoder_sizes, list_parameters

    section, kept = PartConfig(dtype=dtype), _kept_bytes(source, family, name, dtype, rows)
    if name == DECODER:
        load = TextLoad(rows.tokens, rows.tokens**2, rows.targets)
        return decoder_passes(section, Degrees(), family, decoder_sizes(source), load, kept)
    pieces = tower_pieces(family, list_parameters(source, family), TrainingRules())
    squares = rows.patches**2
    features = rows.patches / family.tower.patches_of_token
    tower = TowerLoad(rows.patches, squares / rows.windows, squares, features, 1.0)
    return tower_passes(section, Degrees(), family, pieces, tower, kept)


def _kept_bytes(source: str, family: Family, name: str, dtype: str, rows: TracedRows) -> PartBytes:
    """What each kind of layer keeps of these rows, and of no others."""
    from dhp.plan.count.traced import TraceSettings, trace_part

    kinds, none = family.parts[name].layers.kinds, RowBytes()
    usage = trace_part(source, family, name, rows, TraceSettings(dtype, 1, (NONE,) * len(kinds)))
    held: dict[tuple[str, str], RowBytes] = {}
    for kind, layer in reversed(list(zip(kinds, usage.layers, strict=True))):
        held[kind, NONE] = RowBytes(fixed=layer.held_bytes)
    return PartBytes(kinds, held, dict.fromkeys(held, none), (none,) * len(kinds), none, none)
