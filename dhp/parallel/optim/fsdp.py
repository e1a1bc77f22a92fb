"""Shards states by torch's FSDP2, beside tensor parallelism.

Methods as of `dhp.parallel.optim.replicated.Replicated` and `dhp.parallel.optim.zero.ZeroSharded`. Zhao et
al. 2023, "PyTorch FSDP"; ZeRO's stages 2 and 3 (Rajbhandari et al. 2020). Each layer is a unit, and all else one:
embedding, norms, head.

Facts this adapter stands on, each with a canary test: FSDP divides gradients by its ranks unless it is given a factor
of 1, and forced to sum (a scaling sum fails on gloo); weights are gathered around a module's forward, so the
computation of a part, which takes the head's weight from outside, runs as the root's forward; the local tensor of a
sharded parameter keeps its memory from step to step, so an optimizer may hold it; a sharded parameter's hooks run
behind each gradient."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dhp.core.parameters import EXACT_STATES, FACTORS, FORMS, MASTER, STATE_KINDS, StateForm
from dhp.core.state import StateSink, StateSource
from dhp.core.torch_private import MeshPlacement, ShardingMesh
from dhp.core.wrapping import call_weakly
from dhp.parallel.comm import sum_in_place
from dhp.parallel.expert.expert_shares import summed_over
from dhp.parallel.optim.base import (
    STEP,
    Formats,
    Rates,
    clipped_step,
    exact_dtype,
    read_step,
    saved_master,
    step_for,
    steps_taken,
    widen,
)
from dhp.parallel.optim.chunked_adamw import ChunkedAdamW, ChunkExtent, new_states
from dhp.parallel.optim.replicated import MakeOptimizer, sum_of_squares
from dhp.parallel.optim.value_ranges import Computation, HeldBlock, PlacedOptimizer, held_blocks, shard_rows
from dhp.parallel.tensor.slices import AdapterCut, cut_of, owned_parameters, partial_over


class _Shard:
    """This rank's rows of one parameter: the optimizer's weight, on FSDP's memory, and its extent."""

    def __init__(self, name: str, owner: nn.Module, own: str, mesh: DeviceMesh):
        """mesh: of the ranks over which the parameter is cut by rows."""
        parameter = owner.get_parameter(own)
        self.name, self.trained = name, parameter.requires_grad
        cut = cut_of(owner, own)
        self.cut: AdapterCut | None = None if cut is None or all(p.is_replicate() for p in cut.placements) else cut
        self.partial = partial_over(owner, own)
        self.shape = tuple(parameter.shape if self.cut is None else self.cut.shape)
        self.slice_shape, self.held = parameter.shape, shard_rows(parameter.shape, mesh)
        self.blocks: Sequence[HeldBlock] = held_blocks(self.held, parameter.shape, self.cut)

    def adopt(self, parameter: Tensor, sums: torch.dtype) -> None:
        """Take the parameter that FSDP has made, to sum its gradients in `sums`."""
        self.parameter = parameter
        self.weight = nn.Parameter(parameter.detach().to_local(), requires_grad=self.trained)
        self.weight.grad_dtype = None
        self.narrow_sum: Tensor | None = None
        if sums != self.weight.dtype and self.trained:
            parameter.register_post_accumulate_grad_hook(partial(call_weakly(self._add), sums))

    def _add(self, sums: torch.dtype, parameter: Tensor) -> None:
        """Take a micro-batch's gradient over, which FSDP widens to the weight's format where it was sent in `sums`."""
        gradient, parameter.grad = parameter.grad.to_local(), None
        if self.narrow_sum is None:
            self.narrow_sum = gradient.to(sums)
        else:
            self.narrow_sum += gradient.to(sums)

    def summed(self) -> Tensor | None:
        """This rank's rows of the summed gradient, if there is one."""
        if self.narrow_sum is not None:
            return self.narrow_sum
        return None if self.parameter.grad is None else self.parameter.grad.to_local()

    def drop(self) -> None:
        """Forget the gradient."""
        self.weight.grad = self.parameter.grad = self.narrow_sum = None

    def rows(self, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """This rank's values, block by block, and where each begins in the whole parameter."""
        for here, offset in self.blocks:
            yield values[here], offset


class FullySharded:
    """Every rank of `mesh` keeps its rows of the optimizer's state and of the gradients. With stage 3 it keeps its rows
    of the weights too: they are gathered for each layer's forward and backward; with stage 2, once a step.

    layers: of the module, each of which is gathered as one.

    tensor_rank: this rank's number among those that hold other slices.

    dtype: in which weights are gathered. The module's parameters come in `exact_dtype(dtype)`, or in a narrower format
    that it holds exactly, as files have them, and are master weights in `exact_dtype(dtype)` once they are cut. What is
    not trained has no master weight, and is cut in `dtype`.

    The module comes on the host: a layer at a time is widened, moved to the mesh's device and cut there, so that
    neither the host nor any device ever holds the part in float32."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        mesh: DeviceMesh,
        tensor_rank: int,
        stage: int,
        dtype: torch.dtype = torch.float32,
        form: StateForm = FORMS[EXACT_STATES],
    ):
        self._replicas, self._writes_whole, self._stage = mesh.get_group(), tensor_rank == 0, stage
        self._dtype, self._cast = dtype, dtype != exact_dtype(dtype)
        self._formats = Formats.of(form, dtype)
        owned, copies = owned_parameters(module), summed_over(module)
        self._shards = [
            _Shard(name, owner, own, copies.get(id(owner.get_parameter(own)), mesh)) for name, owner, own in owned
        ]
        self._root = Computation(module)
        _shard_fully(self._root, layers, mesh, copies, stage, dtype, self._formats.sums)
        for shard, (_, owner, own) in zip(self._shards, owned, strict=True):
            shard.adopt(owner.get_parameter(own), self._formats.sums)
        self._trained = [shard for shard in self._shards if shard.trained]
        self.optimizer = make_optimizer((shard.name, shard.weight) for shard in self._trained)
        if isinstance(self.optimizer, ChunkedAdamW):
            self.optimizer.extents = {shard.weight: ChunkExtent(shard.shape, shard.blocks) for shard in self._trained}
        if isinstance(self.optimizer, PlacedOptimizer):
            for shard in self._trained:
                ranks = self._replicas if shard.cut is None else dist.group.WORLD
                self.optimizer.place(shard.weight, shard.held, shard.slice_shape, shard.cut, ranks)
        self._summed = False
        self._tied: tuple[str, bool] | None = None

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor that `compute` makes of the module, run as the root's forward, around which weights are whole."""
        return self._root(compute=compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients, summed over the replicas layer by layer while backward runs. All of them together."""
        loss.backward()

    def rest(self) -> None:
        """Free weights that were gathered for a backward: none follows the forwards so far."""
        for unit in _units(self._root):
            unit.reshard()

    def norm_sq(self) -> float:
        """Squared L2 norm of the whole part's gradient, the same on every rank."""
        self._take_sums()
        counted = [shard for shard in self._trained if not self._is_others(shard)]
        groups = [None if shard.cut is None else shard.cut.tensor_ranks for shard in counted]
        found = torch.zeros((), dtype=torch.float64)
        for ranks in dict.fromkeys(groups):
            own = [shard.weight.grad for shard, group in zip(counted, groups, strict=True) if group is ranks]
            of_ranks = sum_of_squares(own)
            found = found + (of_ranks if ranks is None else sum_in_place(of_ranks, ranks))
        return float(sum_in_place(found, self._replicas))

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner counts it in the norm and saves it."""
        self._tied = (name, owns)

    def tied_gradient(self) -> Tensor:
        """This rank's rows of the summed gradient of the tied weight, before the other's are added."""
        self._take_sums()
        return self._tied_shard().weight.grad

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's rows of the tied weight's gradient: the same rows, since both are cut alike."""
        self._take_sums()
        weight = self._tied_shard().weight
        # Not in place: the other stage may still be reading this rank's own share.
        weight.grad = weight.grad + gradient.to(weight.grad)

    def gradient_bytes(self) -> int:
        """Bytes of the step's gradients now, beyond what is there between steps."""
        found = (shard.summed() for shard in self._trained)
        return sum(gradient.nbytes for gradient in found if gradient is not None)

    def step(self, rates: Rates, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `rates`, drop the gradients."""
        self._take_sums()
        clipped_step(self.optimizer, [shard.weight.grad for shard in self._trained], rates, coefficient)
        self.drop()

    def drop(self) -> None:
        """Forget the step's gradients, and what was gathered of the weights."""
        for shard in self._trained:
            shard.drop()
        self._summed = False
        if self._stage == 2:
            for unit in _units(self._root):
                unit.reshard()

    def save_weights(self, sink: StateSink) -> None:
        """Hand over this rank's rows of the weights, in the format in which the module computes."""
        for shard in self._shards:
            if self._is_others(shard):
                continue
            self._hand_over(sink, shard, shard.name, shard.weight.detach().to(self._dtype))

    def save_state(self, sink: StateSink) -> None:
        """Hand over this rank's rows of the optimizer's state."""
        sink.add_once(STEP, steps_taken(self.optimizer))
        for shard in self._trained:
            if self._is_others(shard):
                continue
            state = self.optimizer.state.get(shard.weight, {})
            kinds = {MASTER: shard.weight.detach()} if self._cast else {}
            kinds |= {kind: state[kind] for kind in STATE_KINDS if kind in state}
            for kind, values in kinds.items():
                if kind in FACTORS:
                    sink.add(f"{shard.name}.{kind}", values)
                else:
                    self._hand_over(sink, shard, f"{shard.name}.{kind}", values)

    def load_state(self, source: StateSource) -> None:
        """Take back what an optimizer of any layout saved; the weights of the same checkpoint are in the module."""
        step, saved = read_step(source), frozenset(source.names)
        for shard in self._trained:
            for rows, offset in shard.rows(shard.weight.detach()):
                read = partial(source.block, offset=offset, shape=tuple(rows.shape))
                master = saved_master(shard.name, rows, saved, read)
                if master is not None:
                    rows.copy_(master)
            if step:
                state = new_states(self.optimizer, shard.weight)
                for kind, values in state.items():
                    if kind in FACTORS:
                        values.copy_(source.whole(f"{shard.name}.{kind}"))
                    for rows, offset in () if kind in FACTORS else shard.rows(values):
                        rows.copy_(source.block(f"{shard.name}.{kind}", offset, tuple(rows.shape)))
                self.optimizer.state[shard.weight] = {STEP: step_for(self.optimizer, shard.weight, step), **state}

    def _tied_shard(self) -> _Shard:
        return next(shard for shard in self._trained if shard.name == self._tied[0])

    def _is_others(self, shard: _Shard) -> bool:
        return self._tied is not None and self._tied == (shard.name, False)

    def _hand_over(self, sink: StateSink, shard: _Shard, name: str, values: Tensor) -> None:
        if shard.cut is None and not self._writes_whole:
            return  # all tensor ranks hold the same
        for rows, offset in shard.rows(values):
            sink.add_block(name, rows, offset, shard.shape)

    def _take_sums(self) -> None:
        """The optimizer's gradients are the sums over the replicas, and over tensor ranks where each has a part."""
        if self._summed:
            return
        self._summed = True
        for shard in self._trained:
            gradient = shard.summed()
            zeros = lambda held: torch.zeros_like(held, dtype=self._formats.sums)
            shard.weight.grad = zeros(shard.weight) if gradient is None else gradient
            if shard.partial is not None:
                sum_in_place(shard.weight.grad, shard.partial)


class FrozenShards(FullySharded):
    """The same of a stage that trains nothing: its weights alone are cut, and gathered for each layer.

    passes: gradients go through the stage to earlier ones. Where none do, no activations are saved."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        mesh: DeviceMesh,
        tensor_rank: int,
        dtype: torch.dtype,
        passes: bool,
    ):
        module.requires_grad_(False)
        super().__init__(module, layers, lambda named: None, mesh, tensor_rank, 3, dtype)
        self._passes = passes

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """As `FullySharded`, under no_grad where no gradients pass."""
        with torch.set_grad_enabled(self._passes and torch.is_grad_enabled()):
            return super().forward(compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Send gradients through; a micro-batch may have no tensor that requires any."""
        if loss.requires_grad:
            loss.backward()

    def norm_sq(self) -> float:
        """0: frozen weights do not count."""
        return 0.0

    def step(self, rates: Rates, coefficient: float) -> None:
        """Nothing is updated."""

    def save_state(self, sink: StateSink) -> None:
        """Hand over that no step was taken."""
        sink.add_once(STEP, torch.tensor(0.0))

    def load_state(self, source: StateSource) -> None:
        """There is none."""


def _shard_fully(
    root: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    copies: Mapping[int, DeviceMesh],
    stage: int,
    dtype: torch.dtype,
    sums: torch.dtype,
) -> None:
    exact = exact_dtype(dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != exact else None, reduce_dtype=sums, cast_forward_inputs=False
    )
    # A layer stays one unit, whose experts are gathered together with the rest of it, from other ranks. Parameters of
    # the same ranks have to have one object that says so.
    meshes = {other: ShardingMesh(other, shard_mesh_dim=0) for other in copies.values()}
    place = lambda parameter: (
        MeshPlacement(Shard(0), meshes[copies[id(parameter)]]) if id(parameter) in copies else None
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, shard_placement_fn=place if copies else None)
    for layer in layers:
        widen(layer, exact, dtype)
        shard(layer, reshard_after_forward=stage == 3)
    widen(root, exact, dtype)
    shard(root, reshard_after_forward=False)
    for unit in _units(root):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if stage == 2:
        root.set_reshard_after_backward(False)


def _units(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
