"""The actor that reads the data: each step decoded once, its pieces handed out as refs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp.cluster.clock import Reading, offset_ns, read_clock
from dhp.cluster.nodes import own_node
from dhp.cluster.paths import require_paths
from dhp.cluster.process import named_errors, redirect_output
from dhp.cluster.watch import Watched, fetch
from dhp.spans import DATA, Span, keep_spans, span, take_spans

WHO = "the dataset actor"


class _Reader:
    """Every method runs under the actor's name, so that whatever it raises says where it comes from."""

    def __init__(self, log_dir: str | None, threads: int, trace: bool):
        import torch

        redirect_output(log_dir, "data")
        torch.set_num_threads(threads)
        self._feed: Any = None
        if trace:
            keep_spans()

    def open(self, factory: Callable[..., Any], arguments: tuple[Any, ...], needs: Mapping[str, str]) -> None:
        """Make the feed. Not in the constructor: Ray turns an exception there into an actor's death."""
        with named_errors(WHO, "opening the datasets"):
            require_paths(WHO, needs)
            self._feed = factory(*arguments)

    def describe(self, attribute: str) -> Any:
        """A value of the feed, such as its steps per epoch."""
        with named_errors(WHO, attribute):
            return getattr(self._feed, attribute)

    def step(self, step: int) -> tuple[Any, ...]:
        """Info, then every vision input, then every text input, micro-batch by micro-batch: one object each."""
        with named_errors(WHO, _reading(step)), span(_reading(step), DATA):
            data = self._feed.step(step)
        pieces = [piece for side in (data.vision, data.text) for micro_batch in side for piece in micro_batch]
        return data.info, *pieces

    def take_spans(self) -> list[Span]:
        """What was read when since the last time, if the run is traced."""
        return take_spans()

    def read_clock(self) -> Reading:
        """The clock of these spans."""
        return read_clock()


class DatasetActor:
    """`next(step)` submits a step's reading and returns refs at once; pixels never pass through the driver.

    It runs on the driver's node, where the paths of the datasets were checked and the user sees them.
    """

    size = 1

    def __init__(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        shape: tuple[int, int, int],
        threads: int = 1,
        log_dir: str | None = None,
        needs: Mapping[str, str] | None = None,
        trace: bool = False,
    ):
        """shape: micro-batches, vision ranks, text data replicas. log_dir: None leaves what it prints to Ray.
        needs: paths that must exist on its node, by configuration key. trace: keep spans.
        """
        self._micro_batches, self._vision_ranks, self._replicas = shape
        # Not soft: Ray 2.60 puts a soft one without resources anywhere. The driver's node lives as long as the driver.
        beside = NodeAffinitySchedulingStrategy(own_node(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": beside}
        self._actor = ray.remote(_Reader).options(**options).remote(log_dir, threads, trace)
        self._watched: list[Watched] = []
        self._watch("opening the datasets", self._actor.open.remote(factory, arguments, dict(needs or {})))

    def describe(self, attribute: str, timeout_s: float) -> Any:
        """A value of the feed, waited for; raises as `wait_all` does."""
        return fetch(Watched(WHO, attribute, self._actor.describe.remote(attribute)), timeout_s)

    def next(self, step: int) -> tuple[Any, list[list[Any]], list[list[Any]]]:
        """Refs of one step (0-based): info, vision[m][v], text[m][d]."""
        count = 1 + self._micro_batches * (self._vision_ranks + self._replicas)
        info, *pieces = self._actor.step.options(num_returns=count, name=f"data.step_{step}").remote(step)
        self._watch(_reading(step), info)
        cut = self._micro_batches * self._vision_ranks
        return info, _rows(pieces[:cut], self._vision_ranks), _rows(pieces[cut:], self._replicas)

    def take_spans_async(self) -> list[Any]:
        """The ref of what it read when, as `ActorGroup.take_spans_async` has one for each rank."""
        return [self._actor.take_spans.remote()]

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to its clock to get this process's, nanoseconds."""
        return [offset_ns(lambda: ray.get(self._actor.read_clock.remote(), timeout=timeout_s))]

    def take_watched(self) -> list[Watched]:
        """The calls submitted since the last time, for `wait_all`."""
        taken, self._watched = self._watched, []
        return taken

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor, no_restart=True)

    def _watch(self, what: str, ref: Any) -> None:
        self._watched.append(Watched(WHO, what, ref, self._actor._actor_id.hex()))


def _reading(step: int) -> str:
    return f"reading step {step + 1}"


def _rows(refs: list[Any], width: int) -> list[list[Any]]:
    return [refs[start : start + width] for start in range(0, len(refs), width)]
