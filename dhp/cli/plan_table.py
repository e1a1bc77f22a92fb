"""Writes a plan as text: layouts, their losses, memory, needs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dhp.cli.plan_outcome import BYTES_ERROR, SECONDS_ERROR, Outcome
from dhp.cli.plan_request import seconds_text
from dhp.config.devices import GIB
from dhp.config.layout import DEGREES
from dhp.config.parts import DECODER, parts
from dhp.core.text import aligned
from dhp.models.family import VISION
from dhp.plan.batches import a_step, rows_by_tokens
from dhp.plan.forecast.moments import NAMES
from dhp.plan.search.candidates import Candidate
from dhp.plan.search.free_keys import ROWS
from dhp.plan.search.inverse import MOST_TOKENS, samples_a_step
from dhp.plan.search.needs import FAILURE_HOURS, PIXELS_S, SAVED_BYTES_S, crossing
from dhp.plan.search.verdict import loses_by, refusals

SHOWN = 10  # layouts of the table
_REFUSED = 3  # messages that are shown
_WIDE = 24  # characters of a recompute that is shown whole
_HEAD = ("", "step_s", "GiB", "margin", "tok/s/dev", "MFU", "m×size")


def head_lines(outcome: Outcome) -> Iterator[str]:
    """Model, devices, data, what was searched."""
    config, machine = outcome.config, outcome.machine
    formats = ", ".join(dict.fromkeys(part.dtype for part in parts(config).values()))
    counted = outcome.space.counted
    total = outcome.parameters
    trained = sum(one.size for one in counted.parameters if one.used and counted.rules.trains(one.name))
    share = "all trained" if trained == total else f"{trained / 1e9:.3g}B trained"
    by_tokens, searched = rows_by_tokens(config), ROWS not in outcome.asked.held.keys
    samples = f"{a_step(config)} {'rows' if by_tokens else 'samples'}"
    if by_tokens and searched:
        samples = f"{config.training.batch_size} / micro_batch_size rows"
    yield (
        f"plan of {outcome.asked.named}: {machine}, {formats}, {samples} a step, {total / 1e9:.3g}B parameters, {share}"
    )
    yield f"data          {outcome.samples}{_longest(outcome)}"
    kept = outcome.asked.held.keys
    if kept:
        values = ", ".join(_value(outcome, key) for key in kept)
        yield f"kept          {values}; {_freeing(kept)}"
    for note in outcome.notes:
        yield f"note          {note}"
    found = outcome.found
    limit = f"{machine.limit_bytes / GIB:.1f} GiB ({machine.memory_bytes / GIB:.1f} less {machine.reserve:.0%} reserve)"
    yield (
        f"searched      {found.scored:,} layouts of parts scored, {found.fit:,} pairs fit, {outcome.seconds:.1f} s; "
        f"limit {limit}"
    )


def _freeing(kept: Collection[str]) -> str:
    """How to have these searched too: free=all leaves alone what would change the batch."""
    named = f"free={ROWS}" if set(kept) == {ROWS} else "free=KEY,… or free=all"
    return f"{named} searches {'it' if len(kept) == 1 else 'them'} too"


def _longest(outcome: Outcome) -> str:
    best = outcome.best or outcome.found.tight
    if best is None:
        return ""
    worst = best.found.loads.worst
    where = ""
    if worst.step is not None and outcome.table is not None:
        samples = ", ".join(map(str, worst.samples[:4])) + (", …" if len(worst.samples) > 4 else "")
        where = f" (step {worst.step + 1}, samples {samples})"
    return f"; longest row: {worst.tokens:,} tokens{where}"


def _value(outcome: Outcome, key: str) -> str:
    section, _, leaf = key.partition(".")
    value = getattr(getattr(outcome.config, section), leaf)
    if leaf == "recompute" and value is None:
        return f"{section}.activation_checkpointing=true ({key})"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def table_lines(outcome: Outcome, most: int | None = SHOWN) -> list[str]:
    """The best layouts, a line each. most: None for all."""
    shown = outcome.found.candidates[:most]
    if not shown:
        return []
    names = [name for name in (DECODER, VISION) if name in parts(outcome.config)]
    rows = [[*_HEAD, *names, "recompute", "loses by"]]
    best = shown[0]
    for number, one in enumerate(shown, 1):
        found, used = one.found, outcome.used(one)
        doubt = "" if outcome.sure(one) else "?"
        figures = [
            f"{number}",
            f"{found.step_s:.3g}",
            gib(found.peak.total),
            f"{gib(one.margin_bytes)}{doubt}",
            f"{found.tokens_s / outcome.machine.count:,.0f}",
            f"{used['total']:.0%}" if used else "-",
            f"{found.micro_batches}×{one.settings['training.micro_batch_size']}",
        ]
        layouts = [layout_text(one.settings, name) for name in names]
        if one.settings.get("cluster.collocate") is False:
            own = [one.settings[f"{name}.num_actors"] for name in names]
            layouts = [f"{text} ({n} device{'s' * (n > 1)})" for text, n in zip(layouts, own)]
        recompute = " | ".join(_short(one.settings[f"{name}.recompute"]) for name in names)
        rows.append([*figures, *layouts, recompute, loses_by(found, best.found) if number > 1 else "-"])
    return _laid_out(rows)


def gib(size: float) -> str:
    """Bytes in GiB, with two digits below one."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2f}"


def _laid_out(rows: list[list[str]]) -> list[str]:
    figures = aligned([row[: len(_HEAD)] for row in rows], 1)
    texts = aligned([row[len(_HEAD) :] for row in rows], len(rows[0]))
    return [f"{left}  {right}".rstrip() for left, right in zip(figures, texts, strict=True)]


def layout_text(settings: Mapping[str, Any], name: str) -> str:
    """A part's layout in words: data 4 × tensor 2, zero 3 (fsdp)."""
    degrees = [(axis, settings.get(f"{name}.{axis}") or 1) for axis in reversed(DEGREES)]
    shown = " × ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "one device"
    if settings.get(f"{name}.expert", 1) > 1:
        shown += f", expert {settings[f'{name}.expert']}"
    stage = settings.get(f"{name}.zero_stage", 0)
    engine = " fsdp" if stage and settings.get(f"{name}.zero_engine") == "fsdp" else ""
    norms = ", sharded norms" if settings.get(f"{name}.sequence_sharded_norms") else ""
    return f"{shown}{f', zero {stage}{engine}' if stage else ''}{norms}"


def _short(recompute: str) -> str:
    """A recompute as its key has it; a long one by its kinds and how many layers have them."""
    if len(recompute) <= _WIDE:
        return recompute
    counts: dict[str, int] = {}
    for run in recompute.split(","):
        kind, _, layers = run.partition(":")
        first, _, last = layers.partition("-")
        counts[kind] = counts.get(kind, 0) + int(last or first) - int(first) + 1
    return " + ".join(f"{count} {kind}" for kind, count in counts.items())


def refused_lines(outcome: Outcome, everything: bool) -> Iterator[str]:
    """Layouts that do not fit, with the single change with which they would, and what the run's checks refuse."""
    for one in outcome.large:
        over = -one.candidate.margin_bytes / GIB
        change = f"{one.change} fits" if one.change else "no single change fits"
        names = [name for name in (DECODER, VISION) if name in parts(outcome.config)]
        layout = " | ".join(layout_text(one.candidate.settings, name) for name in names)
        recompute = " | ".join(_short(one.candidate.settings[f"{name}.recompute"]) for name in names)
        total = one.candidate.found.peak.total / GIB
        yield f"does not fit  {layout}, recompute {recompute}: {total:.1f} GiB, {over:.1f} over; {change}"
    for refused in refusals(outcome.found, len(outcome.found.refused) if everything else _REFUSED):
        yield f"refused       {' '.join(refused.reason.split())}"


def sure_line(outcome: Outcome) -> str:
    """What a forecast's own errors are."""
    best = outcome.best
    doubt = ""
    if best is not None and not outcome.sure(best):
        ranks = [rank for rank, one in enumerate(outcome.found.candidates, 1) if outcome.sure(one)]
        first = f", the first by more is {ranks[0]}" if ranks else ", none by more"
        doubt = f"; a margin with ? is within that error: whether it fits, a run has to show{first}"
    seconds = f"seconds are from a data sheet: ±{SECONDS_ERROR:.0%} (--measure)"
    if outcome.machine.measured:
        seconds = "seconds are by rates of this machine, measured"
    return f"sure?         bytes are counted: ±{BYTES_ERROR:.0%}{doubt}; {seconds}"


def nothing_lines(outcome: Outcome) -> Iterator[str]:
    """Where no layout fits: the smallest memory that would do, and single changes with which one fits."""
    smallest = outcome.ways.smallest
    if smallest is None:
        return
    need, have = memory_needed(outcome, smallest), outcome.machine.memory_bytes / GIB
    yield (
        f"nothing fits  the least that a layout takes is {smallest.found.peak.total / GIB:.2f} GiB, with the reserve "
        f"of {outcome.machine.reserve:.0%} {need:.2f} GiB a device (here {have:.2f}): {whole_layout(outcome, smallest)}"
    )
    if outcome.changes:
        yield f"it would with {' or '.join(outcome.changes)}"
    else:
        yield "it would with no single change of the keys that are held, states (state_bytes, host_moments) or devices"


def memory_needed(outcome: Outcome, one: Candidate) -> float:
    """GiB of a device that has room for a layout and the reserve."""
    return one.found.peak.total / (1 - outcome.machine.reserve) / GIB


def whole_layout(outcome: Outcome, one: Candidate) -> str:
    """All parts of a layout in words."""
    names = [name for name in (DECODER, VISION) if name in parts(outcome.config)]
    texts = [
        f"{name} {layout_text(one.settings, name)}, recompute {_short(one.settings[f'{name}.recompute'])}"
        for name in names
    ]
    return "; ".join(texts)


def memory_lines(outcome: Outcome, one: Candidate) -> Iterator[str]:
    """By kind, at the fullest moment of the fullest device; and each stage's other moments."""
    taken = {name: one.found.peak.taken.get(name, 0.0) for name in NAMES}
    kinds = "  ".join(f"{name} {gib(size)}" for name, size in taken.items() if size >= 0.005 * GIB)
    reserve = outcome.machine.memory_bytes - outcome.machine.limit_bytes
    total = one.found.peak.total
    yield f"memory of 1   {kinds}  = {gib(total)} GiB, at {one.found.peak.name}; reserve {gib(reserve)}"
    for name in one.found.fullest:
        moments = "  ".join(f"{moment.name} {gib(moment.total)}" for moment in one.found.memory[name].others)
        yield f"  {name:12}{moments} GiB, of its process alone"


def way_lines(outcome: Outcome) -> Iterator[str]:
    """Fewest devices, time, longest sample, largest rows, smallest memory."""
    ways, machine, best = outcome.ways, outcome.machine, outcome.best
    if ways.devices is not None:
        count = ways.devices.plan.graph.device_count()
        doubt = "" if outcome.sure(ways.devices) else " (inside its error of the limit)"
        took = f"{ways.devices.found.step_s:.3g} s a step, {gib(ways.devices.found.peak.total)} GiB{doubt}"
        yield f"fewest        {count} device{'s' * (count > 1)}: {took}: {whole_layout(outcome, ways.devices)}"
    else:
        yield f"fewest        more than {8 * machine.count} devices"
    hours, samples = outcome.asked.request.hours, outcome.samples_of_epoch
    if hours is not None:
        wanted = f"{samples:,} samples in {hours:g} h"
        if ways.in_time is None:
            yield f"in time       {wanted}: not on {8 * machine.count} devices either"
        else:
            count = ways.in_time.plan.graph.device_count()
            yield f"in time       {wanted}: {count} device{'s' * (count > 1)}, {ways.in_time.found.step_s:.3g} s a step"
    if best is not None:
        worst = best.found.loads.worst
        more = "more than " * (ways.longest >= MOST_TOKENS // 2)
        yield (
            f"longest row   {more}{ways.longest:,} tokens with the layout of 1, recomputing more where it may (now: "
            f"{worst.tokens:,})"
        )
        size = best.settings["training.micro_batch_size"]
        most = f"{ways.rows:,} samples of the longest row's length (now {size})"
        if rows_by_tokens(outcome.config):
            most = f"{ways.rows / size:.3g} × the longest row (now 1)"
        yield f"micro-batch   room for {most}; a larger batch takes more micro-batches, not memory"
    if ways.smallest is not None:
        need = memory_needed(outcome, ways.smallest)
        yield f"least memory  {need:.2f} GiB a device: {whole_layout(outcome, ways.smallest)}"


def need_lines(outcome: Outcome, one: Candidate) -> Iterator[str]:
    """Nodes, an epoch, readers, memory of hosts, checkpoints."""
    machine, needs = outcome.machine, outcome.needs
    if machine.nodes > 1:
        crossed = crossing(one.plan, machine.node)
        axes = "; ".join(f"{name}: {', '.join(own)}" for name, own in crossed.items()) or "none"
        yield f"nodes         {machine.nodes}; axes whose groups go over several of them: {axes}"
    yield _epoch_line(outcome, one)
    if needs is None:
        return
    encoded = outcome.samples.encoded_bytes * samples_a_step(outcome.space, one) / one.found.step_s
    read = f", {encoded / 1e6:.1f} MB/s of files" if encoded else ""
    yield (
        f"readers       data.num_workers={needs.readers} (assumed: a process prepares {PIXELS_S / 1e6:.0f} million "
        f"pixels a second){read}"
    )
    yield (
        f"hosts         {gib(needs.host_bytes)} GiB a node (assumed: 3 GiB a rank, 1 a reader), of these "
        f"{gib(needs.shared_bytes)} in shared memory (/dev/shm, with cluster.transport=shared_memory)"
    )
    steps = max(1, round(needs.interval_s / one.found.step_s))
    yield (
        f"checkpoints   {gib(needs.checkpoint_bytes)} GiB each; save every {seconds_text(needs.interval_s)} "
        f"({steps:,} steps; assumed: {SAVED_BYTES_S / 1e9:.0f} GB/s a node, "
        f"a failure every {FAILURE_HOURS:,} device-hours)"
    )


def _epoch_line(outcome: Outcome, one: Candidate) -> str:
    each, count = samples_a_step(outcome.space, one), outcome.samples_of_epoch
    if count is None:
        return f"an epoch      {each / one.found.step_s:,.1f} samples a second; samples=N says how long N of them take"
    hours = count / each * one.found.step_s / 3600
    return (
        f"an epoch      {hours:.2f} h, {hours * outcome.machine.count:.1f} device-hours for {count:,} samples "
        f"({each / one.found.step_s:,.1f} a second)"
    )
