"""DeepSpeed's ZeRO behind the verbs a trainer needs: backward, norm, scale and step, drop.

Facts this adapter stands on, each with a canary test: the engine divides gradients by the number of ranks, so the
scalar handed to it is multiplied by that number and sums stay sums; `backward` takes scalars only, so a gradient
that comes from another process enters as `(output * gradient).sum()`; its own clipping must be off, because the
joint norm over all parts is not known inside one engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.parallel.state import MASTER, MOMENTS, STEP, StateSink, StateSource, steps_taken
from dhp.parallel.update import MakeOptimizer


class Range(NamedTuple):
    """Consecutive elements of a parameter that lie in this rank's partition: `count` of them, from `start` on in the
    parameter and from `here` on in the partition."""

    name: str
    shape: tuple[int, ...]
    start: int
    here: int
    count: int


class ZeroSharded:
    """ZeRO stage 1: every rank keeps all parameters and 1/ranks of the optimizer state (Rajbhandari et al. 2020)."""

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, stage: int = 1):
        self._ranks = dist.get_world_size()
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._engine = _initialize(module, make_optimizer([p for p in module.parameters() if p.requires_grad]), stage)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; with `last`, the step's final micro-batch, sum them over all ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)
        if not last:
            # Between micro-batches the engine only wants its micro-step counted; nothing is updated.
            self._engine.step()

    def norm_sq(self) -> float:
        """Squared L2 norm of the whole part's gradient, the same on every rank."""
        return float(self._engine.optimizer.scaled_global_norm()) ** 2

    def step(self, lr: float, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `lr`, drop the gradients."""
        optimizer = self._engine.optimizer
        if coefficient != 1.0:
            for gradients in optimizer.averaged_gradients.values():
                torch._foreach_mul_(list(gradients), coefficient)
        for group in optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()

    def drop(self) -> None:
        """Forget the step's gradients."""
        self._engine.optimizer.zero_grad()

    # DeepSpeed's own checkpoints are pickled and refuse another number of ranks, so state is taken out of the engine:
    # its flat float32 copy of this rank's share of the weights, and Adam's moments of the same shape.

    def save_state(self, sink: StateSink) -> None:
        """Hand over this rank's partition, cut at the borders of parameters."""
        inner = self._engine.optimizer.optimizer
        sink.add(STEP, steps_taken(inner))
        for weights, ranges in self._partitions():
            state = inner.state.get(weights, {})
            parts = {MASTER: weights} | {kind: state[kind] for kind in MOMENTS if state}
            for name, shape, start, here, count in ranges:
                for kind, flat in parts.items():
                    sink.add_flat(f"{name}.{kind}", flat[here : here + count], start, shape)

    def load_state(self, source: StateSource) -> None:
        """Take back what `save_state` handed over. All ranks together: weights are gathered at the end."""
        optimizer, step = self._engine.optimizer, source.whole(STEP)
        for weights, ranges in self._partitions():
            state = {kind: torch.zeros_like(weights) for kind in MOMENTS if step}
            for name, _, start, here, count in ranges:
                for kind, flat in ({MASTER: weights.detach()} | state).items():
                    flat[here : here + count].copy_(source.flat(f"{name}.{kind}", start, count))
            if step:
                optimizer.optimizer.state[weights] = {STEP: step.clone(), **state}
        optimizer.update_lp_params()

    def _partitions(self) -> Iterator[tuple[Tensor, list[Range]]]:
        """This rank's flat weights of each parameter group, and which elements of which parameters they are."""
        optimizer = self._engine.optimizer
        for group, weights in enumerate(optimizer.single_partition_of_fp32_groups):
            begin = optimizer.partition_size[group] * dist.get_rank()
            ranges = []
            parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                first, last = max(begin, offset), min(begin + weights.numel(), offset + parameter.numel())
                if first < last:
                    name, shape = self._names[id(parameter)], tuple(parameter.shape)
                    ranges.append(Range(name, shape, first - offset, first - begin, last - first))
            yield weights, ranges


def _initialize(module: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> Any:
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # every worker sees its own device alone, so it is always the first
    import deepspeed  # takes seconds, and only ZeRO parts need it

    # On CPU, DeepSpeed would compile shared-memory kernels for its inference all-reduce, which training never
    # calls: half a minute and a C++ compiler for nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_scatter": True, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
