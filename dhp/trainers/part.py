"""What both trainers share: the device, the update of one part, and saving it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dhp.base.byte_counter import take_sent
from dhp.base.errors import PartFailed
from dhp.base.messages import Choices, DeviceInfo, PartReport, StepInfo
from dhp.checkpoint.folder import OPTIMIZER, RANDOM
from dhp.checkpoint.random_state import load_random_state, save_random_state
from dhp.checkpoint.shards import ShardReader, ShardWriter, load_shards
from dhp.config.recompute import read_choices
from dhp.models.family import LayerParts
from dhp.parallel.activation.checkpointing import RecomputedLayers
from dhp.parallel.activation.meter import Meter
from dhp.parallel.comm.mesh import build_mesh, replicas_mesh
from dhp.parallel.comm.traffic import count_collectives, trace_collectives
from dhp.parallel.fused import fuse_elementwise
from dhp.parallel.optimizer.fsdp import FullySharded
from dhp.parallel.optimizer.precision import exact_dtype
from dhp.parallel.optimizer.replicated import MakeOptimizer, Replicated
from dhp.parallel.optimizer.zero import ZeroSharded
from dhp.parallel.speed import describe_device
from dhp.parallel.tensor.local_shards import all_laid_out
from dhp.trainers.optimizer import clip_coefficient, learning_rate_at, make_adamw
from dhp.trainers.settings import PartSettings, UpdateSettings

Update = Replicated | ZeroSharded | FullySharded
DEEPSPEED = "deepspeed"  # a zero_engine; the other is fsdp


class Part:
    """One rank's half of the work after gradients exist: norm, clip, step, save."""

    def __init__(self, settings: PartSettings):
        torch.manual_seed(settings.seed)
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan, tens of milliseconds, for each new length
        self.settings = settings
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.master_dtype = exact_dtype(self.dtype)
        self.device = torch.device(settings.device)
        self.mesh: DeviceMesh = build_mesh(settings.device, settings.degrees)
        self.rank = dist.get_rank()
        count_collectives()
        if settings.trace:
            trace_collectives()

    def adopt(self, model: nn.Module, layers: LayerParts) -> None:
        """Take the part, loaded in `master_dtype`: put it on the device and give it its optimizer.

        Raises CheckpointError when the checkpoint to continue from is incomplete or of another model.
        """
        self.model = model.to(self.device)
        resumed = None if self.settings.resume_from is None else Path(self.settings.resume_from)
        if resumed is not None:
            load_shards(all_laid_out(model), resumed)
        fused = fuse_elementwise(model, self.device, self.dtype, dist.group.WORLD)
        if fused:
            print(f"{self.settings.part}: fused kernels, proved on this device, for {fused}", flush=True)
        self.meter = Meter(model, self.device, layers.kinds) if self.settings.measure else None
        choices = read_choices(self.settings.recompute, len(layers.kinds))
        self.layers = None
        if self.meter is not None or set(choices) != {"none"}:
            self.layers = RecomputedLayers(model, layers, choices, self.meter)
        self._layers_path = layers.path
        self.update = self._shard_states(model)
        if resumed is not None:
            self.update.load_state(ShardReader(resumed / OPTIMIZER))
            load_random_state(resumed / RANDOM, self.rank)
        take_sent()  # what it took to get here belongs to no step

    def _shard_states(self, model: nn.Module) -> Update:
        """The optimizer of the part, with as much of its states on this rank as zero_stage leaves there."""
        settings, make = self.settings, optimizer_maker(self.settings.update)
        if not settings.zero_stage:
            group = replicas_mesh(self.mesh).get_group()
            return Replicated(model, make, group, self.dtype, exclusive=settings.exclusive_sums)
        if settings.zero_engine == DEEPSPEED:
            return ZeroSharded(model, make, settings.zero_stage, self.dtype)
        return FullySharded(
            model,
            list(model.get_submodule(self._layers_path)),
            make,
            replicas_mesh(self.mesh),
            self.mesh.get_local_rank("tensor"),
            settings.zero_stage,
            self.dtype,
        )

    def measure_norm(self, active: bool) -> float:
        """Squared norm of this part's whole gradient, the same on all its ranks; 0 for a part without gradients."""
        self._norm_sq = self.update.norm_sq() if active else 0.0
        if not active and self.device.type == "cuda":
            # Whoever handed over to this part writes to that memory again once it has the answer.
            torch.cuda.current_stream().synchronize()
        return self._norm_sq

    def finish_step(
        self, info: StepInfo, other_norms_sq: Iterable[float], loss: float | None, active: bool
    ) -> PartReport:
        """Clip by the joint norm of this part, as last measured, and the others; take the optimizer step, report.

        A part without gradients in this step (`active` false: no image, or no target token) is left as it is,
        as plain torch leaves parameters whose gradient is None.
        Raises PartFailed when the joint norm is not finite: such a step would destroy the weights.
        """
        settings = self.settings.update
        norm, coefficient = clip_coefficient([self._norm_sq, *other_norms_sq], settings.max_grad_norm)
        lr = learning_rate_at(
            info.step, settings.total_steps, settings.learning_rate, settings.warmup_steps, settings.lr_scheduler_type
        )
        if not math.isfinite(norm):
            raise PartFailed(
                f"the gradient norm of step {info.step + 1} is {norm}; the step was not taken. "
                "Lower training.learning_rate, set training.max_grad_norm, or look at the step's data with "
                f"`python -m dhp inspect batch step={info.step + 1}`."
            )
        usage = None
        if self.meter is not None:
            usage = self.meter.take(self.layers.choices, self.update.gradient_bytes())
        if active:
            self.update.step(lr, coefficient)
        else:
            self.update.drop()
        return PartReport(self.rank, loss, norm, lr, self._peak_memory(), take_sent(), usage)

    def metered_forward(self, rows: int) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch of `rows` patches or tokens."""
        return nullcontext() if self.meter is None else self.meter.forward(rows)

    def metered_backward(self) -> AbstractContextManager[None]:
        """Around the backward pass of a micro-batch."""
        return nullcontext() if self.meter is None else self.meter.backward()

    def set_recompute(self, choices: Choices) -> None:
        """What each layer recomputes from the next forward on. For parts that measure."""
        self.layers.choose(choices)

    def describe_device(self, measure: bool) -> DeviceInfo:
        """What this rank computes on. measure: and how fast it is, where it is no GPU."""
        return describe_device(self.device, self.dtype, measure)

    def save(self, folder: str) -> tuple[str, ...]:
        """Write this rank's share of the part below `folder`: weights, optimizer state, random state.

        What several ranks hold alike, the first of them writes. Names of the files of weights.
        """
        names = self._write(folder)
        take_sent()  # saving belongs to no step
        return names

    def _write(self, folder: str) -> tuple[str, ...]:
        save_random_state(Path(folder) / RANDOM, self.rank)
        if not self.settings.zero_stage and self.rank >= self.settings.degrees.tensor:
            return ()  # the first replica writes what all of them hold
        state = ShardWriter(Path(folder) / OPTIMIZER, self.rank)
        self.update.save_state(state)
        state.write()
        weights = ShardWriter(Path(folder), self.rank)
        self.update.save_weights(weights)
        return weights.write()

    def _peak_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved()  # what other processes on the device cannot have
        torch.cuda.reset_peak_memory_stats()
        return peak


def optimizer_maker(settings: UpdateSettings) -> MakeOptimizer:
    """AdamW as configured, for whatever parameters an update hands it."""
    return partial(
        make_adamw,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
