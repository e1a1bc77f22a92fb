"""Estimates needs beside devices: readers, host memory, checkpoint room."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, sqrt

from dhp.config.parts import DECODER, encoders, parts
from dhp.config.schema import PartConfig
from dhp.config.steps import micro_batches
from dhp.core.axes import AXES
from dhp.core.graph import StageSpec
from dhp.core.parameters import BFLOAT16, FORMS, MOMENTS, SUM
from dhp.models.family import VISION
from dhp.models.flops import EVERYTHING, OPERATIONS, MatmulShare, TrainedShare, VisionWork
from dhp.models.shape import hidden_matrices, states_of
from dhp.plan.batches import passes_of
from dhp.plan.bench.machine import Machine
from dhp.plan.count.counted_model import Counted
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.run_plan import RunPlan
from dhp.plan.search.candidates import Candidate

# Assumed of hosts, where nothing was measured.
PIXELS_S = 2.5e7  # that one process decodes, resizes and normalizes in a second
PATCH_PIXELS = 14 * 14
SAMPLE_S = 2e-3  # of a sample's text: chat template, tokens
PROCESS_BYTES = 3 << 30  # of a rank: Python, PyTorch, CUDA's libraries
READER_BYTES = 1 << 30  # of a process that reads
SAVED_BYTES_S = 2e9  # that a node writes to where checkpoints are
FAILURE_HOURS = 50_000  # of one device between two failures: of 16,384 GPUs, published, there were 419 in 54 days
AHEAD = 2  # micro-batches that lie in shared memory between two stages, and batches that are read ahead


@dataclass(frozen=True)
class Needs:
    """readers: processes (data.num_workers). host_bytes: of the fullest node; shared_bytes: of these, shared memory.

    checkpoint_bytes: of one checkpoint. save_s: that writing it takes. interval_s: the best time between two, by
    Young's formula, √(2 · save_s · failure_s); failure_s: expected between two failures of the run."""

    readers: int
    host_bytes: float
    shared_bytes: float
    checkpoint_bytes: float
    save_s: float
    interval_s: float
    failure_s: float


def needs_of(one: Candidate, counted: Counted, machine: Machine, samples: float) -> Needs:
    """samples: of a step."""
    found, nodes = one.found, machine.nodes
    loads, count = found.loads, found.micro_batches
    pixels = loads.pictures.patches * count * PATCH_PIXELS
    readers = max(1, ceil((pixels / PIXELS_S + samples * SAMPLE_S) / found.step_s))
    # A pass's pixels (2 bytes a value, 3 colours) and features, twice as one is handed on while one is used.
    handed = AHEAD * loads.passed.patches * PATCH_PIXELS * 3 * 2 + AHEAD * loads.step_tokens / count * 64
    processes = sum(stage.degrees.world for stage in one.plan.graph.stages)
    moments = sum(one.found.memory[s.name].states.host * s.degrees.world for s in one.plan.graph.stages)
    batch = AHEAD * pixels * 3 * 4
    host = (processes * PROCESS_BYTES + moments) / nodes + readers * READER_BYTES + batch + handed
    saved = checkpoint_bytes(one.plan, counted)
    host += saved / nodes if one.plan.config.training.save_in_background else 0  # copies that are written behind steps
    save_s = saved / (SAVED_BYTES_S * nodes)
    failure_s = FAILURE_HOURS * 3600 / machine.count
    return Needs(readers, host, handed, saved, save_s, sqrt(2 * save_s * failure_s), failure_s)


def checkpoint_bytes(plan: RunPlan, counted: Counted) -> float:
    """Weights, and the optimizer's state of what is trained."""
    sections, optimizer = parts(plan.config), plan.config.training.optimizer
    matrices = hidden_matrices({one.name: one.shape for one in counted.parameters}, plan.family)
    found = 0.0
    for one in counted.parameters:
        if one.part in sections:
            each, whole = states_of(optimizer, one.shape, one.name in matrices)
            trained = one.used and plan.rules.trains(one.name)
            size, state = _kept_bytes(sections[one.part], trained)
            found += one.size * (size + state * each) + state * whole
    return found


def _kept_bytes(section: PartConfig, trained: bool) -> tuple[int, int]:
    """Bytes of a parameter, with its master weight, and of a number of the optimizer's averages of it."""
    size = VALUE_BYTES[section.dtype]
    if not trained:
        return size, 0
    if section.dtype == BFLOAT16:
        form = {piece.kind: piece.nbytes for piece in FORMS[section.state_bytes].pieces}
        return sum(nbytes for kind, nbytes in form.items() if kind not in (SUM, *MOMENTS)), form[MOMENTS[0]]
    return size, size


def crossing(plan: RunPlan, node: int) -> dict[str, list[str]]:
    """By stage, the axes whose groups have ranks on several nodes."""
    return {stage.name: found for stage in plan.graph.stages if (found := list(_crossing(stage, node)))}


def _crossing(stage: StageSpec, node: int) -> Iterator[str]:
    own, first = stage.degrees, min(stage.devices)
    stride = own.world
    for axis in AXES:
        if axis.within:
            continue
        degree = getattr(own, axis.name)
        stride //= degree
        group = stride * degree
        starts = range(first, first + own.world, group)
        if degree > 1 and any(at // node != (at + stride * (degree - 1)) // node for at in starts):
            yield axis.name


def useful_operations(plan: RunPlan, loads: RunLoads, window: float) -> dict[str, float]:
    """By part, the operations of a mean step that the model needs, whatever is run. window: see `window_length`."""
    passes: Mapping[str, TrainedShare] = passes_of(plan.counted)
    work, text = plan.family.decoder.work, loads.text
    own = passes.get(DECODER, EVERYTHING)
    tokens = loads.step_tokens
    share = tokens / max(1.0, text.tokens)
    done = tokens * work.token * _times(own.layers) + share * text.targets * work.target * _times(own.ending)
    found = {DECODER: OPERATIONS * (done + share * text.pairs / 2 * work.pair * (1 + 2 * own.attention))}
    if VISION in encoders(plan.config) and isinstance(plan.family.tower.work, VisionWork):
        found[VISION] = micro_batches(plan.config) * _of_pictures(plan.family.tower.work, loads, passes, window)
    return found


def _of_pictures(work: VisionWork, loads: RunLoads, passes: Mapping[str, TrainedShare], window: float) -> float:
    own, shown = passes.get(VISION, EVERYTHING), loads.pictures
    done = work.patch * shown.patches * (own.entering.forward + own.entering.weights)
    done += work.token * shown.patches * _times(own.layers)
    seen = work.window_pair * shown.patches * window + work.segment_pair * shown.squares
    done += seen * (1 + 2 * own.attention) + work.embedding * shown.features * _times(own.ending)
    return OPERATIONS * done


def _times(products: MatmulShare) -> float:
    return products.forward + products.inputs + products.weights
