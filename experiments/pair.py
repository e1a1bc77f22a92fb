"""One vision and one text stage, made by hand: their graph, their settings, and a step's data as they take it."""

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers.utils import logging

from dhp.config.layout import read_choices
from dhp.config.schema import Config, PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.batch import Batch, StepData
from dhp.core.dispatch import PerRank, spread
from dhp.core.graph import Edge, Node, StageGraph, StageSpec
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.family import Family
from dhp.step.schedule import Action, Backward, Forward
from dhp.step.stages import RankGroup

VISION, TEXT = "vision", "text"
ONE = Degrees()


def make_pair(
    vision: Degrees = ONE,
    text: Degrees = ONE,
    tower_layers: int = 1,
    layers: int = 1,
    tensors: tuple[str, ...] = ("embeddings",),
    collocate: bool = True,
    vision_trains: bool = True,
) -> StageGraph:
    """The whole tower and the whole decoder. collocate: on the same devices, from the first one on."""
    first = 0 if collocate else vision.world
    tower = StageSpec(VISION, VISION, (range(tower_layers),), vision, vision_trains, range(vision.world))
    decoder = StageSpec(TEXT, TEXT, (range(layers),), text, True, range(first, first + text.world))
    return StageGraph((tower, decoder), (Edge(Node(VISION), Node(TEXT), tensors, vision_trains),))


def pair_of(
    family: Family, vision: Degrees = ONE, text: Degrees = ONE, collocate: bool = True, vision_trains: bool = True
) -> StageGraph:
    """`make_pair` for a model."""
    depths = len(family.tower.layers.kinds), len(family.decoder.layers.kinds)
    return make_pair(vision, text, *depths, family.tower.tensors, collocate, vision_trains)


def settings_of(
    graph: StageGraph,
    stage: str,
    model: str,
    update: OptimizerSettings,
    recompute: str = "none",
    deterministic: bool = False,
    objective: str = "sft",
    **changes: Any,
) -> StageSettings:
    """Of one stage: float32 on a CPU, packed rows, all of it trained, nothing cut. recompute: as a part's key says it;
    changes: of any other setting, or of the part's section."""
    spec = graph.stage(stage)
    given: dict[str, Any] = {"device": "cpu", "recompute": read_choices(recompute, len(spec.layers))}
    of_stage = {key: value for key, value in changes.items() if key in StageSettings.__dataclass_fields__}
    of_part = {key: value for key, value in changes.items() if key not in of_stage}
    section = replace(PartConfig(model_name=model, zero_engine="deepspeed"), **of_part)
    config = Config(training=TrainingConfig(objective=objective, deterministic=deterministic), **{spec.part: section})
    return StageSettings(config=config, spec=spec, graph=graph, update=update, **given | of_stage)


def as_batch(data: StepData, put: Callable[[Any], Any] = lambda value: value) -> Batch:
    """What `dhp.step.step.train_step` takes. put: a value → what the groups are called with, as `ray.put`."""
    work = {part: [[put(shard) for shard in row] for row in rows] for part, rows in data.work.items()}
    return Batch(put(data.info), work, data.routes)


class Here(RankGroup):
    """A stage's ranks in this process, one after another, where nothing else takes time."""

    def __init__(self, *trainers: Any):
        self.size, self._trainers = len(trainers), trainers

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """As `dhp.step.stages.RankGroup`, with values for refs."""
        method = method if isinstance(method, str) else method.__name__
        given, counts = spread(arguments, self.size), spread((returns,), self.size)
        found = []
        for rank, (count,) in enumerate(counts):
            result = self._run(rank, method, given[rank])
            found.append([] if count == 0 else list(result) if isinstance(result, tuple) else [result])
        return found

    def _run(self, rank: int, method: str, given: tuple[Any, ...]) -> Any:
        return getattr(self._trainers[rank], method)(*given)


PASSES: Mapping[str, type[Forward] | type[Backward]] = {"forward_step": Forward, "backward_step": Backward}


class TimedHere(Here):
    """Ranks of a stage whose CPU seconds are written down. seconds: of each pass of a step, by rank. others: of all
    else that a rank did in it, its update above all."""

    def __init__(self, stage: str, *trainers: Any):
        super().__init__(*trainers)
        self._stage = stage
        self.begin()

    def begin(self) -> None:
        """A step."""
        self.seconds: dict[tuple[Action, int], float] = {}
        self.others = [0.0] * self.size

    def _run(self, rank: int, method: str, given: tuple[Any, ...]) -> Any:
        begin = time.process_time()
        found = super()._run(rank, method, given)
        took = time.process_time() - begin
        if method in PASSES:
            self.seconds[PASSES[method](Node(self._stage, given[1]), given[0]), rank] = took
        else:
            self.others[rank] += took
        return found


def keep_freed_memory() -> None:
    """As allocators of GPUs do, so that no action pays for another's new pages. For glibc."""
    library = ctypes.CDLL(None)
    library.mallopt(-4, 0)  # M_MMAP_MAX: no mapping for a tensor
    library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing goes back


@contextmanager
def join_alone() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_ranks(ranks: int, task: Callable[..., Any], *given: Any) -> Any:
    """What rank 0's `task(*given)` answers, when so many processes have run it together."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (ranks, str(Path(folder) / "store"), task, given, answers), nprocs=ranks)
    return answers.get()


def _run(rank: int, ranks: int, store: str, task: Callable[..., Any], given: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.environ.update(LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = task(*given)
    if rank == 0:
        answers.put(found)
    dist.barrier()  # the others may still need this rank
    dist.destroy_process_group()
