"""A run's share of Ray: session, reservation, both groups and the dataset actor, all ended together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
import torch
from ray.util.placement_group import remove_placement_group

from dhp.cluster.actor_group import ActorGroup
from dhp.cluster.dataset_actor import DatasetActor
from dhp.cluster.placement import plan_placement, reserve
from dhp.cluster.runtime import LOCAL, cluster_gpus, ray_session
from dhp.cluster.worker import GroupSettings
from dhp.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """What to start: actors of each part, on which devices, under which limits."""

    actors: Mapping[str, int]
    collocate: bool
    device: str
    address: str
    threads: int | None
    start_timeout_s: float
    step_timeout_s: float
    log_dir: str


class Cluster:
    """Entered, it has reserved its resources and created its actors; left, nothing of it runs any more."""

    groups: dict[str, ActorGroup]
    device: str

    def __init__(self, layout: Layout):
        self._layout = layout
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        layout = self._layout
        if layout.device == "cuda" and layout.address == LOCAL:
            choose_device("cuda", torch.cuda.device_count())  # known without starting Ray
        with ExitStack() as stack:  # whatever fails in here takes down what stands already
            bundles = max(layout.actors.values()) if layout.collocate else sum(layout.actors.values())
            stack.enter_context(ray_session(layout.address, cpus=max(bundles, os.cpu_count() or 1)))
            gpus = cluster_gpus()
            self.device = choose_device(layout.device, gpus)
            plan = plan_placement(layout.actors, layout.collocate, gpus if self.device == "cuda" else 0.0)
            reserved = reserve(plan, layout.start_timeout_s)
            stack.callback(remove_placement_group, reserved)
            backend = choose_backend(self.device, plan.gpus_per_bundle)
            self.groups = {}
            for part, slots in plan.slots.items():
                group = ActorGroup(self._settings(part, len(slots), backend), slots, reserved)
                stack.callback(group.stop)
                self.groups[part] = group
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def dataset_actor(self, factory: Callable[..., Any], *arguments: Any, shape: tuple[int, int, int]) -> DatasetActor:
        """The actor that reads the data, ended with the cluster."""
        actor = DatasetActor(factory, *arguments, shape=shape, log_dir=self._layout.log_dir)
        self._stack.callback(actor.stop)
        return actor

    def values(self, refs: Sequence[Any]) -> list[Any]:
        """The values behind refs of finished calls."""
        return ray.get(list(refs))

    def describe(self) -> str:
        """One line: how many actors of each part, where."""
        actors = " and ".join(f"{count} {part}" for part, count in self._layout.actors.items())
        where = "sharing devices" if self._layout.collocate else "each on a device of its own"
        return f"{actors} actors on {self.device}, {where}"

    def _settings(self, part: str, size: int, backend: str) -> GroupSettings:
        layout = self._layout
        # Parts take turns, so the threads of one group are what the cores can carry.
        cores = os.cpu_count() or 1
        return GroupSettings(
            part=part,
            size=size,
            backend=backend,
            threads=layout.threads or max(1, cores // max(layout.actors.values())),
            timeout_s=max(layout.step_timeout_s, layout.start_timeout_s),
            log_dir=layout.log_dir,
            loopback=layout.address == LOCAL,
        )


def choose_device(asked: str, gpus: float) -> str:
    """cpu or cuda. Raises ConfigError when cuda is asked for and there is no GPU."""
    if asked == "auto":
        return "cuda" if gpus else "cpu"
    if asked == "cuda" and not gpus:
        raise ConfigError("cluster.device=cuda, but there is no GPU; set cluster.device=cpu or auto")
    return asked


def choose_backend(device: str, gpus_per_bundle: float) -> str:
    """nccl where every rank of a group has a GPU of its own; gloo otherwise, with a warning on GPUs."""
    if device == "cpu":
        return "gloo"
    if gpus_per_bundle >= 1.0:
        return "nccl"
    warnings.warn(
        f"ranks of one group share a GPU ({gpus_per_bundle:g} GPU each), which NCCL refuses: collectives go through "
        "gloo and host memory. Correct, but slow; use as many GPUs as ranks for real runs",
        stacklevel=2,
    )
    return "gloo"
