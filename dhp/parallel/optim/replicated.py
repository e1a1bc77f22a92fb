"""Optimizer without sharding; sums gradients in buckets during backward."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dhp.core.parameters import COMPENSATION, EXACT_STATES, FACTORS, FORMS, MASTER, STATE_KINDS, StateForm
from dhp.core.state import StateSink, StateSource
from dhp.core.torch_private import add_each, copy_each, norms_of
from dhp.core.tracing import COLLECTIVE, span
from dhp.core.wrapping import call_weakly
from dhp.parallel.comm import begin_sum, sum_in_place
from dhp.parallel.expert.expert_shares import summed_over
from dhp.parallel.optim.base import (
    STEP,
    Formats,
    Rates,
    cast_parameters,
    clipped_step,
    exact_dtype,
    read_step,
    saved_master,
    step_for,
    steps_taken,
)
from dhp.parallel.optim.chunked_adamw import ChunkedAdamW, ChunkExtent, new_states
from dhp.parallel.optim.value_ranges import PlacedOptimizer, held_blocks
from dhp.parallel.tensor.slices import as_dtensors, cut_of, owned_parameters, partial_over

BUCKET_BYTES = 32 << 20
ALONE_BYTES = 256 << 20  # where no sum waits to begin: fewer copies


class Bucket:
    """Consecutive parameters whose gradients are summed over the ranks in one message."""

    def __init__(self, over: dist.ProcessGroup | None, group: dist.ProcessGroup | None):
        """over: further ranks of a sum. group: those of it; None: all replicas."""
        self.over, self.group = over, group
        self.members: list[int] = []
        self.sizes: list[int] = []
        self.arrived: set[int] = set()  # places of members whose gradients are not in the sums yet
        self.drop()

    def open(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Take memory for the sums, not yet written."""
        own = [parameters[member] for member in self.members]
        self.flat = own[0].detach().new_empty(sum(self.sizes), dtype=dtype)
        self.sums = [part.view(p.shape) for part, p in zip(self.flat.split(self.sizes), own, strict=True)]
        self.unwritten = set(range(len(own)))

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients that have arrived to their sums, in few kernels, and drop them."""
        own = {place: parameters[self.members[place]] for place in self.arrived}
        first = [place for place in own if place in self.unwritten]  # zeros would be written and read for nothing
        later = [place for place in own if place not in self.unwritten]
        for places, join in ((first, copy_each), (later, add_each)):
            if places:
                join([self.sums[place] for place in places], [_gradient_of(own[place]) for place in places])
        self.unwritten.difference_update(first)
        for parameter in own.values():
            parameter.grad = None
        self.arrived.clear()

    def fill(self) -> Tensor:
        """All sums, with zeros where no gradient came."""
        for place in self.unwritten:
            self.sums[place].zero_()
        self.unwritten.clear()
        return self.flat

    def drop(self) -> None:
        """Give the sums' memory back."""
        self.flat: Tensor | None = None
        self.sums: list[Tensor] = []
        self.begun: dist.Work | None = None
        self.whole = False  # all of the step's gradients are in the sums


class Gradients:
    """Sums of the gradients of `parameters`, in `dtype`, over micro-batches and over the ranks of `group`.

    partial: by a parameter's id, further ranks over which its gradients are summed. others: by a parameter's id, the
    ranks over which they are summed in the place of `group`.

    overlap: the sum of a bucket over the ranks begins as soon as its last gradient is there, not when all are.

    exclusive: no computation after backward begins before the sums are done. Ranks of two parts that share GPUs need
    it: a sum needs all GPUs at once, and spins on those that have come to it while the other part computes on the rest.

    With one rank and parameters in `dtype`, gradients stay where autograd accumulates them and nothing is copied."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        partial_over: Mapping[int, dist.ProcessGroup],
        overlap: bool = True,
        exclusive: bool = False,
        others: Mapping[int, dist.ProcessGroup] = MappingProxyType({}),
    ):
        self._parameters, self._dtype, self._group = parameters, dtype, group
        self._partial, self._overlap, self._exclusive = partial_over, overlap, exclusive
        self._sums: list[Tensor] = []
        self._reducing = self._unfinished = self._added = False
        self._next = 0  # the bucket whose sum over the ranks begins next
        self._direct = dist.get_world_size(group) == 1 and all(p.dtype == dtype for p in parameters)
        self._buckets: list[Bucket] = []
        if not self._direct:
            limit = BUCKET_BYTES if dist.get_world_size(group) > 1 or others else ALONE_BYTES
            self._buckets = cut_into_buckets(parameters, dtype, partial_over, others, limit)
            take = call_weakly(self._take)
            for bucket in self._buckets:
                for place, index in enumerate(bucket.members):
                    parameters[index].register_post_accumulate_grad_hook(partial(take, bucket, place))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of `loss`; with `last`, begin to sum what has accumulated over the ranks. Without
        a last one they are summed when they are asked for."""
        self._reducing, self._added = last and self._overlap, True
        loss.backward()
        self._reducing = False
        for bucket in self._buckets:
            if bucket.arrived:
                self._add(bucket)
        if last:
            self._begin_all()
            if self._exclusive:
                self._finish()

    def local(self) -> list[Tensor]:
        """The summed gradient of each parameter; zero where there is none.

        Waits for the sums. `backward` does not: what it hands to the other part need not wait for them."""
        self._finish()
        if self._direct:
            return self._sums
        sums = {index: own for bucket in self._buckets for index, own in zip(bucket.members, bucket.sums)}
        return [sums[index] for index in range(len(sums))]

    def nbytes(self) -> int:
        """Memory that the step's gradients take."""
        direct = (parameter.grad for parameter in self._parameters if self._direct)
        found = [*direct, *(bucket.flat for bucket in self._buckets)]
        return sum(gradient.nbytes for gradient in found if gradient is not None)

    def drop(self) -> None:
        """Forget the step's gradients, and give their memory back."""
        self._finish()
        self._sums, self._next = [], 0
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.drop()

    def _take(self, bucket: Bucket, place: int, parameter: nn.Parameter) -> None:
        """Called when autograd has finished a parameter's gradient, which waits for those of its bucket."""
        bucket.arrived.add(place)
        if len(bucket.arrived) == len(bucket.members):
            self._add(bucket)
            bucket.whole = self._reducing
            while self._reducing and self._next < len(self._buckets) and self._buckets[self._next].whole:
                self._begin_next()

    def _add(self, bucket: Bucket) -> None:
        if bucket.flat is None:
            bucket.open(self._parameters, self._dtype)
        bucket.add(self._parameters)

    def _begin_next(self) -> None:
        """Begin the sum of the next bucket, in the order of the buckets: all ranks must send the same one next."""
        bucket = self._buckets[self._next]
        self._next += 1
        if bucket.flat is None:
            bucket.open(self._parameters, self._dtype)
        values = bucket.fill()
        if bucket.over is not None:
            sum_in_place(values, bucket.over)
        bucket.begun = begin_sum(values, self._group if bucket.group is None else bucket.group)

    def _begin_all(self) -> None:
        """Begin the sums that need no other sum before them."""
        self._unfinished = True
        while self._next < len(self._buckets) and self._buckets[self._next].over is None:
            self._begin_next()

    def _finish(self) -> None:
        if not (self._unfinished or self._added):
            return
        self._unfinished = self._added = False
        if self._direct:
            self._sums = [_gradient_of(parameter) for parameter in self._parameters]
            for parameter, part in zip(self._parameters, self._sums, strict=True):
                if id(parameter) in self._partial:
                    sum_in_place(part, self._partial[id(parameter)])
            return
        with span("sums of gradients", COLLECTIVE):
            while self._next < len(self._buckets):
                self._begin_next()
            for bucket in self._buckets:
                if bucket.begun is not None:
                    bucket.begun.wait()


def cut_into_buckets(
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    partial_over: Mapping[int, dist.ProcessGroup],
    others: Mapping[int, dist.ProcessGroup],
    limit: int,
) -> list[Bucket]:
    """Buckets in the order of backward, each with one kind of sum, of at most `limit` bytes or one parameter.

    Those with a sum over further ranks come last, where waiting for it holds nothing up; a bucket comes where its last
    member does."""
    order = sorted(reversed(range(len(parameters))), key=lambda index: id(parameters[index]) in partial_over)
    last: dict[Bucket, int] = {}  # by bucket, the place of its last member
    filling: dict[tuple[int, int], Bucket] = {}  # by kind of sum
    for place, index in enumerate(order):
        over, group = partial_over.get(id(parameters[index])), others.get(id(parameters[index]))
        size = parameters[index].numel()
        bucket = filling.get((id(over), id(group)))
        if bucket is None or (sum(bucket.sizes) + size) * dtype.itemsize > limit:
            bucket = filling[id(over), id(group)] = Bucket(over, group)
        bucket.members.append(index)
        bucket.sizes.append(size)
        last[bucket] = place
    return sorted(last, key=last.__getitem__)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]  # of named parameters


class Replicated:
    """Gradients summed over `group`, of experts over the ranks that hold the same ones; parameters that are slices
    (`dhp.parallel.tensor.slices`) are cut over their own mesh.

    dtype: what the module is to compute in. Its parameters come in `exact_dtype(dtype)`; where that is another
    format, they become the optimizer's master weights and the module gets rounded copies, or, with a form of states
    that has compensations, halves of them."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup,
        dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        exclusive: bool = False,
        form: StateForm = FORMS[EXACT_STATES],
    ):
        self._formats = Formats.of(form, dtype)
        masters = [p.detach() for p in module.parameters() if p.requires_grad]
        self._cast = dtype != exact_dtype(dtype)
        if self._cast:
            cast_parameters(module, dtype)
        self._module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        layouts = as_dtensors(module)
        self._layouts = [layouts[name].detach() for name in self._names]
        # Without a cast, or as halves, the optimizer's weights share the parameters' memory and keep gradients of their
        # own, of any format.
        own = self._parameters if self._formats.halved else masters
        self._masters = [nn.Parameter(values.detach()) for values in own]
        self.optimizer = make_optimizer(zip(self._names, self._masters))
        self._hold(module, masters)
        found = [(owner.get_parameter(own), partial_over(owner, own)) for _, owner, own in owned_parameters(module)]
        parts = {id(parameter): over for parameter, over in found if over is not None}
        self._tied: tuple[str, bool] | None = None
        self._summed = False
        others = {number: mesh.get_group() for number, mesh in summed_over(module).items()}
        self._gradients = Gradients(self._parameters, self._formats.sums, group, parts, overlap, exclusive, others)

    def _hold(self, module: nn.Module, masters: Sequence[Tensor]) -> None:
        """Let the optimizer know which elements its weights are, and what they lack of the `masters`."""
        for weight in self._masters:
            weight.grad_dtype = None
        owners = {name: (owner, own) for name, owner, own in owned_parameters(module)}
        if isinstance(self.optimizer, PlacedOptimizer):
            for name, layout, weight in zip(self._names, self._layouts, self._masters, strict=True):
                cut, shape = cut_of(*owners[name]), weight.shape
                if cut is not None and _mesh_of(layout) is not None:
                    self.optimizer.place(weight, range(shape[0]), shape, cut, cut.holders)
        if not isinstance(self.optimizer, ChunkedAdamW):
            return
        for name, weight, master in zip(self._names, self._masters, masters, strict=True):
            cut, shape = cut_of(*owners[name]), weight.shape
            if shape:
                whole = shape if cut is None else cut.shape
                self.optimizer.extents[weight] = ChunkExtent(tuple(whole), held_blocks(range(shape[0]), shape, cut))
            if weight.dtype != master.dtype:
                self.optimizer.hold_halves(weight, master)

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor that `compute` returns."""
        return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; with `last`, the step's final micro-batch, begin to sum them over the group."""
        self._gradients.backward(loss, last)

    def rest(self) -> None:
        """Nothing to free: weights are not gathered."""

    def norm_sq(self) -> float:
        """Squared L2 norm of the whole part's summed gradient, the same on every rank."""
        self._take_sums()
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for name, layout, master in zip(self._names, self._layouts, self._masters, strict=True):
            if not self._is_others(name):
                by_mesh.setdefault(_mesh_of(layout), []).append(master.grad)
        total = sum_of_squares(by_mesh.pop(None, []))
        for mesh, gradients in by_mesh.items():
            own = sum_of_squares(gradients)
            for group in mesh.get_all_groups() if mesh is not None else ():
                sum_in_place(own, group)
            total = total + own
        return float(total)

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner counts it in the norm and saves it."""
        self._tied = (name, owns)

    def tied_gradient(self) -> Tensor:
        """The summed gradient of the tied weight on this rank, before the other's is added."""
        self._take_sums()
        return self._masters[self._names.index(self._tied[0])].grad

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's share of the tied weight's gradient."""
        self._take_sums()
        master = self._masters[self._names.index(self._tied[0])]
        # Not in place: the other stage may still be reading this rank's own share.
        master.grad = master.grad + gradient.to(master.grad)

    def gradient_bytes(self) -> int:
        """Bytes of the step's gradients now, beyond what is there between steps."""
        return self._gradients.nbytes()

    def step(self, rates: Rates, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `rates`, drop the gradients."""
        self._take_sums()
        clipped_step(self.optimizer, [master.grad for master in self._masters], rates, coefficient)
        self._round()
        self.drop()

    def drop(self) -> None:
        """Forget the step's gradients."""
        for master in self._masters:
            master.grad = None
        self._gradients.drop()
        self._summed = False

    def _take_sums(self) -> None:
        """The optimizer's gradients are the sums; there are none where no micro-batch went backward."""
        if self._summed:
            return
        self._summed = True
        for master, gradient in zip(self._masters, self._gradients.local()):
            master.grad = gradient

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights as the module has them. Ranks that share parameters by slices call it together."""
        for name, weight in as_dtensors(self._module).items():
            if not self._is_others(name):
                sink.add(name, weight)

    def save_state(self, sink: StateSink) -> None:
        """Hand over the optimizer's state. Ranks that share parameters by slices call it together."""
        sink.add_once(STEP, steps_taken(self.optimizer))
        for name, layout, master in zip(self._names, self._layouts, self._masters, strict=True):
            if self._is_others(name):
                continue
            state = self.optimizer.state.get(master, {})
            kinds = {MASTER: master.detach()} if self._cast and COMPENSATION not in state else {}
            kinds |= {kind: state[kind] for kind in (COMPENSATION, *STATE_KINDS) if kind in state}
            for kind, values in kinds.items():
                sink.add(f"{name}.{kind}", values if kind in FACTORS else _as_dtensor_like(layout, values))

    def load_state(self, source: StateSource) -> None:
        """Take back what an optimizer of any layout saved; the weights of the same checkpoint are in the module."""
        named, saved = list(zip(self._names, self._layouts, strict=True)), frozenset(source.names)
        for (name, layout), weight in zip(named, self._masters, strict=True):
            read = partial(source.like, held=layout)
            master = saved_master(name, weight.detach(), saved, read)
            if master is not None:
                self._take_master(weight, master)
        self._round()
        step = read_step(source)
        if not step:
            return
        for (name, layout), master in zip(named, self._masters, strict=True):
            states = new_states(self.optimizer, master)
            for kind, values in states.items():
                saved_as = f"{name}.{kind}"
                values.copy_(source.whole(saved_as) if kind in FACTORS else source.like(saved_as, layout))
            self.optimizer.state[master] |= {STEP: step_for(self.optimizer, master, step), **states}

    def _is_others(self, name: str) -> bool:
        return self._tied is not None and self._tied == (name, False)

    @torch.no_grad()
    def _take_master(self, weight: nn.Parameter, master: Tensor) -> None:
        if COMPENSATION in self.optimizer.state.get(weight, ()):
            self.optimizer.hold_halves(weight, master)
        else:
            weight.copy_(master)

    @torch.no_grad()
    def _round(self) -> None:
        """Give the module the master weights, rounded to what it computes in."""
        if self._cast and not self._formats.halved:
            copy_each([parameter.detach() for parameter in self._parameters], self._masters)


def _as_dtensor_like(layout: Tensor, local: Tensor) -> Tensor:
    """This rank's values of something that is sharded as `layout` is."""
    if not isinstance(layout, DTensor):
        return local
    mesh, placements = layout.device_mesh, layout.placements
    return DTensor.from_local(local, mesh, placements, shape=layout.shape, stride=layout.stride())


def _mesh_of(layout: Tensor) -> DeviceMesh | None:
    """The mesh over which a parameter's elements differ between ranks, or None when all hold the same."""
    # Not `is_shard`, which denies the interleaved slices of fused weights (`StridedShard`).
    if isinstance(layout, DTensor) and not all(placement.is_replicate() for placement in layout.placements):
        return layout.device_mesh
    return None


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Squared L2 norm of all elements together, a scalar in float64; 0 of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)  # squares of 16-bit sums are not rounded to 16 bits
    norms = torch.stack(norms_of(tensors, wide)).double()
    return (norms * norms).sum()
