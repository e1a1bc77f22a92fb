"""The peer AutoSP: DeepSpeed's sequence parallelism of the tower and of the decoder, on the model of `peers`.

Of the tower its `UlyssesSPViTAttention`: ranks hold their patches and gather all of them before each attention, which
each rank computes whole. Of the decoder its `DistributedAttention`, DeepSpeed-Ulysses (Jacobs et al. 2023, section 3).
`auto_wrap_model_for_sp` of DeepSpeed 0.19.8 finds no tower attention in a Qwen2.5-VL and leaves decoders to its user;
what it would put in is put in here, and what it lacks is added: the gather's gradient (its own has none, so nothing
below an attention would learn from other ranks' patches), and the ranks' shares of patches, tokens and targets."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.queues import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from dhp.cluster.host import keep_freed_memory
from dhp.core.tracing import take_sent
from dhp.data.sample.sample import Sample
from dhp.models.load import load_part
from dhp.parallel.attention.segment_plan import SegmentPlan, plan_segments
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.recompute.saved_tensors import SavedTensors
from dhp.parallel.tensor.loss import token_loss_sum
from dhp.parallel.traffic import count_collectives
from experiments.layouts.links import enter
from experiments.layouts.work import Run

ATTENTION = "deepspeed_ulysses"


class SplitObjective(nn.Module):
    """The model with its sequences split over all ranks; Σ token losses of the rank's own rows of the decoder."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        join_deepspeed()
        split_tower(model.model.visual)
        split_decoder(model.model.language_model)

    def forward(self, inputs: dict[str, Tensor], factor: float) -> Tensor:
        """A scalar. factor: that the sum is multiplied by."""
        named = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        hidden = self.model.model(**named, use_cache=False).last_hidden_state[0]
        labels = F.pad(inputs["labels"][0, 1:], (0, 1), value=-100)
        targets = _row_slice(labels, 0, value=-100)
        wanted = targets != -100
        return factor * F.cross_entropy(self.model.lm_head(hidden[wanted]), targets[wanted], reduction="sum")


def join_deepspeed() -> None:
    """Let DeepSpeed use the processes' group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for inference only
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)


def split_tower(tower: nn.Module) -> None:
    """Blocks and projector on the rank's own patches; what comes out is gathered. Patches are a multiple of the ranks'
    number times the four that the projector takes together."""
    import deepspeed.sequence.autosp_vit as autosp

    autosp.dist = SimpleNamespace(**vars(autosp.dist) | {"all_gather": gather_with_gradient})
    for block in tower.blocks:
        block.attn = _Rows(autosp.UlyssesSPViTAttention(_Batch(block.attn), dist.group.WORLD, has_cls_token=False))
    tower.blocks[0].register_forward_pre_hook(lambda _, given: (_row_slice(given[0], 0), *given[1:]))
    tower.merger.register_forward_hook(
        lambda *given: wait_tensor(all_gather_single_autograd(given[-1], 0, dist.group.WORLD))
    )


def split_decoder(decoder: nn.Module) -> None:
    """Layers on the rank's own tokens, behind which there are as many zeros as make all ranks' shares equal."""
    from deepspeed.sequence.layer import DistributedAttention

    ulysses = DistributedAttention(_attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> Any:
        rows = (states.transpose(1, 2).contiguous() for states in (query, key, value))
        return ulysses(*rows, 0, None, named["scaling"]), None

    def share(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        own = {
            "inputs_embeds": _row_slice(named["inputs_embeds"], 1),
            "position_ids": _row_slice(named["position_ids"], -1),
        }
        return given, named | own

    AttentionInterface.register(ATTENTION, attend)
    decoder.config._attn_implementation_internal = ATTENTION
    decoder.register_forward_pre_hook(share, with_kwargs=True)


def gather_with_gradient(into: list[Tensor], own: Tensor, group: Any = None) -> None:
    """What `dist.all_gather` does, and for numbers that carry gradients, with them. Shares are equally long."""
    if not own.is_floating_point():
        dist.all_gather(into, own, group=group)
        return
    whole = wait_tensor(all_gather_single_autograd(own, 0, group))
    into[:] = whole.chunk(len(into))


class _Rows(nn.Module):
    """[patches, width], as the library's blocks have them, for what takes [batch, patches, width]."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return self.inner(hidden_states[None], **named)[0]


class _Batch(_Rows):
    """The other way around."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return self.inner(hidden_states[0], **named)[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    states = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(*states, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)


def _row_slice(states: Tensor, axis: int, value: float = 0) -> Tensor:
    ranks, axis = dist.get_world_size(), axis % states.ndim
    short = -states.shape[axis] % ranks
    padding = [0, 0] * (states.ndim - 1 - axis) + [0, short]
    return F.pad(states, padding, value=value).chunk(ranks, axis)[dist.get_rank()]


PLAIN_ATTENTION = "flash_all_segments"
LEARNING_RATE = 1e-4
Inputs = dict[str, Tensor]


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...]) -> SegmentPlan:
    return plan_segments(lengths, torch.device("cpu"))


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, **named: Any) -> Any:
    """transformers' attention interface: every segment of `cu_seq_lens_q` in one call."""
    plan = _plan(tuple(named["cu_seq_lens_q"].diff().tolist()))
    return attend_segments(*(s[0].transpose(0, 1) for s in (query, key, value)), plan, scaling)[None], None


class Objective(nn.Module):
    """The model and its loss as one module: Σ token losses of the given rows."""

    def __init__(self, model: nn.Module, split_head: bool):
        super().__init__()
        self.model, self._split_head = model, split_head

    def forward(self, inputs: Inputs, factor: float) -> Tensor:
        """A scalar. factor: that the sum is multiplied by."""
        named = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        hidden = self.model.model(**named, use_cache=False).last_hidden_state[:, :-1]
        targets = inputs["labels"][:, 1:]
        wanted = targets != -100
        if self._split_head:
            return token_loss_sum(self.model.lm_head, hidden[wanted], targets[wanted], factor=factor)
        return factor * F.cross_entropy(self.model.lm_head(hidden[wanted]), targets[wanted], reduction="sum")


def load(model_name: str, tensor: int = 1) -> nn.Module:
    """The plain model, on `tensor` ranks by transformers' own plan."""
    AttentionInterface.register(PLAIN_ATTENTION, attend)
    mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tensor",)) if tensor > 1 else None
    model = load_part(model_name, (), torch.float32, mesh)  # nothing left out: transformers' model, plan and loading
    model.model.visual.config._attn_implementation_internal = PLAIN_ATTENTION
    return model.train()


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's AdamW; one for sharded and one for whole parameters, since its fused loops refuse a mixture."""
    sharded = [p for p in module.parameters() if isinstance(p, DTensor)]
    whole = [p for p in module.parameters() if not isinstance(p, DTensor)]
    return [torch.optim.AdamW(group, lr=LEARNING_RATE) for group in (sharded, whole) if group]


@dataclass(frozen=True)
class Step:
    """run: rows of all samples, target tokens of all → this rank's loss. model: whose weights are there anyway."""

    model: nn.Module
    run: Callable[[list[Inputs], int], Tensor]

    def __call__(self, rows: list[Inputs], targets: int) -> Tensor:
        return self.run(rows, targets)


def plain(model_name: str) -> Step:
    """One process."""
    objective = Objective(load(model_name), split_head=False)
    return _stepper(objective, adamw(objective), lambda rows: rows, 1)


def ddp(model_name: str) -> Step:
    """PyTorch DDP: each rank the whole model and its share of the samples."""
    objective = nn.parallel.DistributedDataParallel(Objective(load(model_name), split_head=False))
    return _stepper(objective, adamw(objective), _own, dist.get_world_size())


def fsdp2(model_name: str) -> Step:
    """PyTorch FSDP2: each layer's and block's weights cut and gathered as one, the rest at the root; each rank its
    share of the samples."""
    objective = Objective(load(model_name), split_head=False)
    model = objective.model.model
    for layer in (*model.visual.blocks, *model.language_model.layers):
        fully_shard(layer)
    fully_shard(objective)
    for unit in objective.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # a sum with a factor fails on gloo
    summed = _stepper(objective, adamw(objective), _own, 1)
    return Step(objective, lambda rows, targets: summed(rows, targets) * dist.get_world_size())  # as a mean's share


def tensor_parallel(model_name: str) -> Step:
    """transformers' tensor parallelism: the decoder split, the tower on every rank alike."""
    objective = Objective(load(model_name, dist.get_world_size()), split_head=True)
    return _stepper(objective, adamw(objective), lambda rows: rows, 1)


def zero3(model_name: str) -> Step:
    """DeepSpeed ZeRO-3: weights, gradients and optimizer split, each rank its share of the samples."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for inference only
    objective = Objective(load(model_name), split_head=False)
    (optimizer,) = adamw(objective)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**31 - 1,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, config=config, dist_init_required=False)

    def step(rows: list[Inputs], targets: int) -> Tensor:
        loss = sum(engine(row, dist.get_world_size() / targets) for row in _own(rows))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Step(objective, step)


def sequence_parallel(model_name: str) -> Step:
    """DeepSpeed's AutoSP: each rank its share of every sample's patches and tokens, gradients summed by DDP."""
    objective = nn.parallel.DistributedDataParallel(SplitObjective(load(model_name)))
    return _stepper(objective, adamw(objective), lambda rows: rows, dist.get_world_size())


PEERS = {
    "plain": plain, "ddp": ddp, "fsdp2": fsdp2, "transformers-tp": tensor_parallel, "deepspeed-zero3": zero3,
    "deepspeed-autosp": sequence_parallel,
}  # fmt: skip


def _own(rows: list[Inputs]) -> list[Inputs]:
    return rows[dist.get_rank() :: dist.get_world_size()]


def _stepper(
    objective: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    own: Callable[[list[Inputs]], list[Inputs]],
    mean: int,
) -> Step:
    """mean: by how many ranks the gradients will be divided."""

    def step(rows: list[Inputs], targets: int) -> Tensor:
        loss = sum(objective(row, mean / targets) for row in own(rows))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Step(objective, step)


def inputs_of(sample: Sample) -> Inputs:
    """One sample as the model's arguments."""
    return {
        "input_ids": torch.from_numpy(sample.input_ids)[None],
        "labels": torch.from_numpy(sample.labels)[None],
        "mm_token_type_ids": torch.from_numpy(sample.mm_token_type_ids)[None],
        "pixel_values": torch.cat([torch.from_numpy(p) for p in sample.pixels]),
        "image_grid_thw": torch.tensor(sample.grids),
    }


def serve_peer(
    rank: int, ranks: int, store: str, kind: str, model: str, batches: Mapping[str, Sequence[Sample]], steps: int,
    measure: bool, apart: bool, answers: SimpleQueue,
) -> None:  # fmt: skip
    """On each rank: `steps` steps of every batch after one that does not count; rank 0 answers with a `Run` of each.

    measure: bytes instead of time. apart: each rank on a host of its own, see `links`."""
    if apart:
        enter(rank)
    torch.set_num_threads((os.cpu_count() or 1) // ranks)
    keep_freed_memory()
    os.environ.update(LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if measure:
        count_collectives()
    step = PEERS[kind](model)
    found: dict[str, Run] = {}
    for size, samples in batches.items():
        rows, targets = [inputs_of(s) for s in samples], sum(s.target_tokens for s in samples)
        if measure:
            found[size] = _measured(step, rows, targets)
        else:
            ran = [_timed(step, rows, targets) for _ in range(steps + 1)]
            found[size] = Run(tuple(seconds for seconds, _ in ran[1:]), ran[-1][1])
    if rank == 0:
        answers.put(found)
    dist.barrier()  # the others may still need this rank
    dist.destroy_process_group()


def _timed(step: Step, rows: list[Inputs], targets: int) -> tuple[float, float]:
    dist.barrier()
    begin = time.perf_counter()
    loss = step(rows, targets)
    dist.barrier()
    return time.perf_counter() - begin, float(loss)


def _measured(step: Step, rows: list[Inputs], targets: int) -> Run:
    """A step in which what autograd keeps and what is sent are counted."""
    saved = SavedTensors(step.model)
    take_sent()
    with saved.counting():
        loss = step(rows, targets)
    sums = torch.tensor([float(sum(take_sent().values())), float(loss)], dtype=torch.float64)
    peak = torch.tensor([saved.take_peak()])
    dist.all_reduce(sums)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    sent, total = sums.tolist()
    return Run((), total / dist.get_world_size(), int(peak), int(sent))  # equal losses, or shares times their number
