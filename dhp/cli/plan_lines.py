"""A plan as text: memory of the best layout, other ways, and what the run needs beside its devices."""

from __future__ import annotations

from collections.abc import Iterator

from dhp.cli.plan_data import seconds_text
from dhp.cli.plan_outcome import Outcome
from dhp.cli.plan_table import gib, memory_needed, whole_layout
from dhp.config.devices import GIB
from dhp.trainer.forecast.candidates import Candidate
from dhp.trainer.forecast.freed import rows_by_tokens
from dhp.trainer.forecast.memory import NAMES
from dhp.trainer.forecast.needs import FAILURE_HOURS, PIXELS_S, SAVED_BYTES_S, crossing
from dhp.trainer.forecast.ways import MOST_TOKENS, samples_a_step


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
