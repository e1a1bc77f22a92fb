"""A tensor from a vision to a text actor, and what saving costs a step beside torch's distributed checkpoint."""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dhp.batch.reader import make_reader
from dhp.cluster.cluster import Cluster
from dhp.core.dispatch import Call, per_rank
from dhp.core.graph import NCCL, OBJECT_STORE, SHARED_MEMORY, forward_way
from dhp.core.parameters import ParameterGroup
from dhp.core.tracing import BACKWARD, FORWARD, Span
from dhp.engine.stage import ShareSaver
from dhp.parallel.optim.base import make_adamw
from dhp.parallel.optim.replicated import Replicated
from dhp.plan.batches import feed_settings
from experiments.overhead.__main__ import ENGINES, configure, dhp_step, graph_of, settings_by_stage
from experiments.pair import as_batch, join_alone, make_pair
from experiments.small import layout_of, started, wait_for

MEGABYTES, STEPS = 64, 3
PIXELS = 1024 * 14 * 14  # of an image, so that 16 of them are 16k patches


class Giver:
    """A vision rank whose output is ready."""

    def __init__(self) -> None:
        self.tensor = torch.ones(MEGABYTES << 18)
        self.copy = torch.empty_like(self.tensor).copy_(self.tensor)

    def forward_step(self, _micro_batch: int) -> Tensor:
        """Hand the tensor over."""
        self.tensor[0] += 1
        return self.tensor

    def memcpy_s(self) -> float:
        """Seconds of one copy into memory that was written to before."""
        begin = time.perf_counter()
        self.copy.copy_(self.tensor)
        return time.perf_counter() - begin

    def optimizer_step(self) -> None:
        """The step has ended."""


class Taker:
    """A text rank."""

    def forward_step(self, _micro_batch: int, tensor: Tensor) -> float:
        """Something of what came."""
        return float(tensor[0])


def handoff(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each transport of a tensor alone, then of whole steps. nccl goes by gloo here."""
    transports = (SHARED_MEMORY, OBJECT_STORE, NCCL)
    for transport in transports:
        yield handed_over(transport, given.rounds or 15)
    for transport in transports:
        yield share_of_step(transport, min(given.rounds or STEPS, STEPS))


def handed_over(transport: str, rounds: int) -> dict[str, Any]:
    """From the moment when the tensor is ready in one actor until the other one's method begins with it."""
    passed, copied = [], []
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(
            layout_of(make_pair(), folder, threads=os.cpu_count(), transport=transport, trace=True)
        ) as cluster:
            vision, text = cluster.groups["vision"], cluster.groups["text"]
            vision.start(Giver)
            text.start(Taker)
            cluster.link()
            sends = per_rank([((forward_way(0), (0,)),)]) if cluster.linked else None
            for number in range(rounds + 2):
                (sent,) = vision.execute_in_turn_async(Call("forward_step", (0,), 1, sends))
                (value,) = text.execute_all_async("forward_step", 0, *sent)
                vision.execute_all_async("optimizer_step", returns=0)
                (memcpy,) = vision.execute_all_async("memcpy_s")
                wait_for((vision, text))
                if ray.get(value[0]) != number + 2.0:
                    raise AssertionError(f"round {number} received the tensor of another round")
                found = _spans(cluster.groups)
                begin, end = _last(found["text"], FORWARD).start_ns, _last(found["vision"], FORWARD).end_ns
                passed.append((begin - end) / 1e9)
                copied.append(ray.get(memcpy[0]))
                del sent, value, memcpy  # the object store gives memory back when nobody refers to it
    ratio = median(p / c for p, c in zip(passed[2:], copied[2:], strict=True))
    row = {"transport": transport, "megabytes": MEGABYTES, "memcpy_s": median(copied[2:])}
    return row | {"handoff_s": median(passed[2:]), "ratio": ratio, "rounds": rounds}


def share_of_step(transport: str, rounds: int) -> dict[str, Any]:
    """At 16k patches a step: the time between one part's end and the other's begin, there and back, over the step's."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), 1, [f"data.min_pixels={PIXELS}", f"data.max_pixels={int(PIXELS * 1.1)}"])
        feed, graph = make_reader(feed_settings(config)), graph_of(config)
        shares, steps, patches = [], [], []
        own = {"threads": os.cpu_count(), "transport": transport, "trace": True}
        with started(graph, ENGINES, settings_by_stage(config, graph), **own) as stages:
            groups = {name: stage.group for name, stage in stages.items()}
            for number in range(rounds + 1):
                data = feed.step(number)
                batch = as_batch(data, ray.put)
                _spans(groups)
                begin = time.perf_counter()
                dhp_step(graph, stages, batch, 1)
                steps.append(time.perf_counter() - begin)
                shares.append(sum(_gaps(_spans(groups))) / steps[-1])
                patches.append(data.info.vision_tokens)
    row = {"transport": transport, "patches": median(patches[1:]), "step_s": median(steps[1:])}
    return row | {"transfer_share": median(shares[1:]), "rounds": rounds}


def _spans(groups: Mapping[str, Any]) -> dict[str, list[Span]]:
    return {name: ray.get(group.take_spans_async()[0]) for name, group in groups.items()}


def _last(found: list[Span], kind: str) -> Span:
    return [span for span in found if span.kind == kind][-1]


def _gaps(found: Mapping[str, list[Span]]) -> Iterator[float]:
    for kind, sender, receiver in ((FORWARD, "vision", "text"), (BACKWARD, "text", "vision")):
        yield (_last(found[receiver], kind).start_ns - _last(found[sender], kind).end_ns) / 1e9


WIDTH = 1024
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Saved:
    """stall_s: until the caller may change what is saved; done_s: until it is on the disk."""

    stall_s: float
    done_s: float


def checkpoint(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of medians over the rounds, without each way's first save, in which memory is new."""
    torch.set_num_threads(1)
    with join_alone(), tempfile.TemporaryDirectory() as folder:
        yield {"kind": "save"} | measure_saving(given.mb, given.rounds or 5, Path(folder))


def measure_saving(megabytes: int, rounds: int, parent: Path) -> dict[str, Any]:
    """Seconds of dhp's own save of a rank and of torch's, in turn, each waiting and in the background."""
    module, optimizer = make_state(megabytes)
    state = state_dict(module, optimizer)
    saver = ShareSaver(0, 0, True, True, {}, None, pinned=False)
    options = dict.fromkeys(
        ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"), False
    )
    stager = DefaultStager(StagingOptions(**options))
    ways: dict[str, Callable[[Path], Saved]] = {
        "dhp": lambda folder: save_share(saver, optimizer, folder, False),
        "dhp_background": lambda folder: save_share(saver, optimizer, folder, True),
        "torch": lambda folder: save_torch(state, folder, None),
        "torch_async": lambda folder: save_torch(state, folder, stager),
    }
    found: dict[str, list[Saved]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, save in ways.items():
            folder = parent / f"{name}-{number}"
            folder.mkdir()
            found[name].append(save(folder))
            shutil.rmtree(folder)
    row: dict[str, Any] = {"mb": round(sum(t.nbytes for t in state.values()) / 1e6)}
    for name, saves in found.items():
        row |= {f"{name}_stall_s": round(median(one.stall_s for one in saves[1:]), 3)}
        row |= {f"{name}_done_s": round(median(one.done_s for one in saves[1:]), 3), f"{name}_first": asdict(saves[0])}
    row["done_ratio"] = round(row["dhp_done_s"] / row["torch_done_s"], 2)
    row["stall_ratio"] = round(row["dhp_background_stall_s"] / row["torch_async_stall_s"], 2)
    row["background_done_ratio"] = round(row["dhp_background_done_s"] / row["torch_async_done_s"], 2)
    return row


def make_state(megabytes: int) -> tuple[nn.Module, Replicated]:
    """A module, and its optimizer after one step: weights and both moments together so many megabytes."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    group = ParameterGroup("all", 1e-3, 0.0, 0)
    make = lambda named: make_adamw(named, lambda _: group, (0.9, 0.999), 1e-8)
    optimizer = Replicated(module, make, dist.group.WORLD)
    optimizer.backward(module(torch.randn(4, WIDTH)).square().mean(), last=True)
    optimizer.norm_sq()
    optimizer.step({"all": 1e-3}, 1.0)
    return module, optimizer


def state_dict(module: nn.Module, optimizer: Replicated) -> dict[str, Tensor]:
    """The same tensors, as torch's checkpoint takes them."""
    found = {name: weight.detach() for name, weight in module.named_parameters()}
    for name, master in zip(optimizer._names, optimizer._masters, strict=True):
        found |= {f"{name}.{kind}": optimizer.optimizer.state[master][kind] for kind in STATES}
    return found


def save_share(saver: ShareSaver, optimizer: Replicated, folder: Path, background: bool) -> Saved:
    """dhp's own save of a rank."""
    begun = time.perf_counter()
    saver.save(optimizer, folder / "part", background)
    stall = time.perf_counter() - begun
    saved = saver.saved(wait=True)
    assert saved.error is None, saved.error
    done = time.perf_counter() - begun
    return Saved(stall if background else done, done)


def save_torch(state: dict[str, Tensor], folder: Path, stager: DefaultStager | None) -> Saved:
    """torch's distributed checkpoint, its files down to the disk. stager: of copies whose memory is kept, for a save
    behind the caller; None: it waits."""
    begun, stall = time.perf_counter(), None
    if stager is None:
        dcp.save(state, checkpoint_id=folder)
    else:
        future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        if hasattr(future, "staging_completion"):
            future.staging_completion.result()
        stall = time.perf_counter() - begun
        (future.upload_completion if hasattr(future, "upload_completion") else future).result()
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    done = time.perf_counter() - begun
    return Saved(done if stall is None else stall, done)
