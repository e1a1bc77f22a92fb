"""DeepSpeed's ZeRO behind an engine's methods, with each rank's partitions."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.core.parameters import MASTER, MOMENTS, PERSISTENT_ELEMENTS
from dhp.core.state import StateSink, StateSource
from dhp.core.torch_private import scale_each
from dhp.parallel.comm import sum_in_place
from dhp.parallel.deepspeed import import_deepspeed
from dhp.parallel.optim.base import STEP, Rates, read_step, saved_master, set_rates, step_for, steps_taken
from dhp.parallel.optim.replicated import MakeOptimizer
from dhp.parallel.optim.value_ranges import Computation


class Range(NamedTuple):
    """Consecutive elements of a parameter that are in this rank's partition: `count` of them, from `start` on in the
    parameter and from `here` on in the partition."""

    name: str
    shape: tuple[int, ...]
    start: int
    here: int
    count: int


class Partitions(ABC):
    """This rank's share of one DeepSpeed optimizer. names: of the parameters, by id."""

    divides = 1  # what the engine divides gradients by, so that they must be multiplied by it

    def __init__(self, optimizer: Any, names: Mapping[int, str]):
        self._optimizer, self._names = optimizer, names

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside, which holds the moments of each tensor of `masters`."""
        return self._optimizer.optimizer

    def masters(self) -> Iterator[tuple[Tensor, list[Range]]]:
        """The optimizer's flat float32 weights, and which elements of which parameters they are."""
        for group, weights in enumerate(self._flat_masters()):
            yield weights, list(self._ranges(group, weights.numel()))

    def gradients(self) -> list[Tensor]:
        """The step's reduced gradients of this rank's elements, in any cut; padding is zero."""
        return [gradient for group in self._group_gradients() for gradient in group]

    def gradients_by_name(self) -> Iterator[tuple[Range, int, Tensor]]:
        """The same by parameter: a range, how far into it the elements begin, and the elements, flat, to read or to
        write to."""
        for gradients, (_, ranges) in zip(self._group_gradients(), self.masters(), strict=True):
            begins = list(accumulate((gradient.numel() for gradient in gradients), initial=0))
            for own in ranges:
                for gradient, begin in zip(gradients, begins):
                    first, last = max(own.here, begin), min(own.here + own.count, begin + gradient.numel())
                    if first < last:
                        yield own, first - own.here, gradient.view(-1)[first - begin : last - begin]

    @abstractmethod
    def spread(self) -> None:
        """Give the module the weights of `masters`. All ranks together."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the step's gradients."""

    def leftovers(self) -> list[Tensor]:
        """Gradients that a step leaves behind, to be zeroed before the next one sees them."""
        return []

    @abstractmethod
    def _group_gradients(self) -> list[list[Tensor]]:
        """The gradients that make up each flat tensor of `masters`, one after another."""

    @abstractmethod
    def _flat_masters(self) -> Sequence[Tensor]: ...

    @abstractmethod
    def _ranges(self, group: int, size: int) -> Iterator[Range]: ...

    def _cut(self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], size: int) -> Iterator[Range]:
        """Ranges of parameters that follow one another in a flat tensor, of which ranks hold `size` each."""
        begin = size * dist.get_rank()
        for parameter, offset in zip(parameters, offsets, strict=True):
            first, last = max(begin, offset), min(begin + size, offset + parameter.numel())
            if first < last:
                name, shape = self._names[id(parameter)], tuple(parameter.shape)
                yield Range(name, shape, first - offset, first - begin, last - first)


class FlatPartitions(Partitions):
    """Stages 1 and 2 of `DeepSpeedZeroOptimizer`: all parameters of a group in one flat tensor, cut in equal parts."""

    def _group_gradients(self) -> list[list[Tensor]]:
        kept = self._optimizer.averaged_gradients
        return [list(kept[group]) for group in range(len(self._flat_masters()))]

    def spread(self) -> None:
        self._optimizer.update_lp_params()

    def drop(self) -> None:
        self._optimizer.zero_grad()
        # Gradients in another format than the module's are added to what is there.
        for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.single_partition_of_fp32_groups

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        inner = self._optimizer
        return self._cut(inner.round_robin_bit16_groups[group], inner.round_robin_bit16_offsets[group], size)


class Bf16Partitions(Partitions):
    """Stage 1 in 16 bits, `BF16_Optimizer`: cut as above, but each rank accumulates the gradients of all elements."""

    def _group_gradients(self) -> list[list[Tensor]]:
        return [[gradient] for gradient in self._optimizer.fp32_groups_gradient_flat_partition]

    def spread(self) -> None:
        self._optimizer.update_lp_params()

    def drop(self) -> None:
        self._optimizer.zero_grad()

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.fp32_groups_flat_partition

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        parameters = self._optimizer.bf16_groups[group]
        ends = torch.tensor([0, *(parameter.numel() for parameter in parameters)]).cumsum(0).tolist()
        return self._cut(parameters, ends[:-1], size)


class ScatteredPartitions(Partitions):
    """Stage 3, `DeepSpeedZeroOptimizer_Stage3`: each parameter cut in equal parts, a rank's parts in a flat tensor."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]):
        super().__init__(optimizer, names)
        self.divides = dist.get_world_size()

    def _group_gradients(self) -> list[list[Tensor]]:
        sizes = [weights.numel() for weights in self._flat_masters()]
        return [[gradient] for gradient in self._optimizer.grad_partitions_flat_buffer.split(sizes)]

    def weights(self) -> Iterator[tuple[Tensor, list[Range]]]:
        """As `masters`, in the module's own format: what parameters are gathered from."""
        for group, weights in enumerate(self._optimizer.fp16_partitioned_groups_flat):
            yield weights, list(self._ranges(group, weights.numel()))

    def spread(self) -> None:
        for group in range(len(self._flat_masters())):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def drop(self) -> None:
        self._optimizer.zero_grad()
        self._optimizer.averaged_gradients = {}

    def leftovers(self) -> list[Tensor]:
        # A parameter that the next step does not use would be updated with this step's gradient.
        return [self._optimizer.grad_partitions_flat_buffer]

    def _flat_masters(self) -> Sequence[Tensor]:
        return self._optimizer.fp32_partitioned_groups_flat

    def _ranges(self, group: int, size: int) -> Iterator[Range]:
        here = 0
        for parameter in self._optimizer.fp16_groups[group]:
            held = parameter.partition_numel()
            start = held * dist.get_rank()
            count = min(held, parameter.ds_numel - start)
            if count > 0:
                yield Range(self._names[id(parameter)], tuple(parameter.ds_shape), start, here, count)
            here += held


def partitions_of(optimizer: Any, names: Mapping[int, str]) -> Partitions:
    """The partitions of this DeepSpeed optimizer."""
    kinds = {
        "DeepSpeedZeroOptimizer": FlatPartitions,
        "BF16_Optimizer": Bf16Partitions,
        "DeepSpeedZeroOptimizer_Stage3": ScatteredPartitions,
    }
    return kinds[type(optimizer).__name__](optimizer, names)


# Gradients reduced in one message, for which memory is there whether or not there are as many; DeepSpeed's own 5e8 take
# 2 GB of each device.
BUCKET_ELEMENTS = 1 << 26
NORM_CHUNK = 1 << 24  # elements of a gradient that are squared in float64 at a time


class ZeroSharded:
    """ZeRO over all ranks (Rajbhandari et al. 2020). Every rank keeps 1/ranks of the optimizer's state; from stage 2 on
    of the gradients, and with stage 3 of the weights, which are gathered for each module's forward and backward.

    The module's parameters are float32. With another `dtype` it computes in that, with float32 master weights that
    begin as those parameters, and float32 sums of gradients over micro-batches and ranks. Stage 3 takes one
    micro-batch at a time, backward before the next forward: interleaved ones silently give wrong gradients."""

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        stage: int = 1,
        dtype: torch.dtype = torch.float32,
        saves_frozen: bool = True,
    ):
        """saves_frozen: weights that nothing trains are saved too."""
        self._module = module
        self._tied: tuple[str, bool] | None = None
        self._shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        cast = dtype != torch.float32
        exact = {name: parameter.detach() for name, parameter in module.named_parameters() if cast}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        # Weights that nothing trains are in no partition of the optimizer; stage 3 would hide them from a save.
        frozen = [(n, p) for n, p in module.named_parameters() if saves_frozen and not p.requires_grad]
        self._frozen = {name: parameter.detach().to(dtype, copy=True) for name, parameter in frozen}
        optimizer = make_optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self._engine = _initialize(Computation(module), optimizer, stage, dtype)
        self._partitions = partitions_of(self._engine.optimizer, names)
        if cast:
            self._set_masters(exact)

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """The tensor that `compute` makes of the module, run as the engine's forward.

        There alone stage 3 gathers parameters, also those that are used outside of their module's own forward, as the
        head's weight is by the loss."""
        return self._engine(compute=compute)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients; with `last`, the step's final micro-batch, sum them over all ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            # Between micro-batches the engine only wants its micro-step counted; nothing is updated.
            self._engine.step()
        elif self._partitions.divides != 1:
            scale_each(self._partitions.gradients(), float(self._partitions.divides))

    def rest(self) -> None:
        """Weights are where they were."""

    def norm_sq(self) -> float:
        """Squared L2 norm of the whole part's gradient, the same on every rank."""
        gradients = self._partitions.gradients()
        if self._tied is not None:
            found = self._partitions.gradients_by_name()
            gradients = [gradient for own, _, gradient in found if not self._is_others(own.name)]
        chunks = [torch.zeros(1, device=self._engine.device)]
        chunks += [chunk for gradient in gradients for chunk in gradient.flatten().split(NORM_CHUNK)]
        # In float64, because a partition may be one tensor of billions of elements.
        norms = torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks])
        return float(sum_in_place((norms * norms).sum(), dist.group.WORLD))

    def tie(self, name: str, owns: bool) -> None:
        """The parameter `name` is another stage's too. The owner counts it in the norm and saves it."""
        self._tied = (name, owns)

    def tied_gradient(self) -> Tensor:
        """The summed gradient of the tied weight, whole, before the other's is added: the stages' partitions cut it at
        different places."""
        whole = torch.zeros(self._shapes[self._tied[0]].numel(), device=self._engine.device)
        for own, begin, gradient in self._partitions.gradients_by_name():
            if own.name == self._tied[0]:
                whole[own.start + begin :][: len(gradient)] = gradient
        return sum_in_place(whole, dist.group.WORLD).view(self._shapes[self._tied[0]])

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's gradient of the tied weight, whole."""
        flat = gradient.flatten()
        for own, begin, held in self._partitions.gradients_by_name():
            if own.name == self._tied[0]:
                held += flat[own.start + begin :][: len(held)].to(held)

    def gradient_bytes(self) -> int:
        """As `Replicated.gradient_bytes`. The engine keeps most buffers between steps, and does not report them."""
        return 0

    def step(self, rates: Rates, coefficient: float) -> None:
        """Scale the gradients by `coefficient`, take one optimizer step at `rates`, drop the gradients."""
        if coefficient != 1.0:
            scale_each(self._partitions.gradients(), coefficient)
        set_rates(self._engine.optimizer.param_groups, rates)
        self._engine.step()
        self._clear()

    def drop(self) -> None:
        """Forget the step's gradients."""
        self._partitions.drop()
        self._clear()

    # DeepSpeed's own checkpoints are pickled and refuse another number of ranks, so state is taken out of the engine:
    # its flat float32 copy of this rank's share of the weights, and Adam's moments of the same shape.

    def save_weights(self, sink: StateSink) -> None:
        """Hand over the weights as the module has them; with stage 3 this rank's share, ungathered."""
        if not isinstance(self._partitions, ScatteredPartitions):
            for name, parameter in self._module.named_parameters():
                if not self._is_others(name):
                    sink.add(name, parameter)
            return
        for name, parameter in self._frozen.items():
            if not self._is_others(name):
                sink.add(name, parameter)
        for weights, ranges in self._partitions.weights():
            for name, shape, start, here, count in ranges:
                if not self._is_others(name):
                    sink.add_flat(name, weights[here : here + count], start, shape)

    def save_state(self, sink: StateSink) -> None:
        """Hand over this rank's partition of the optimizer's state, cut at the borders of parameters."""
        inner = self._partitions.optimizer
        sink.add_once(STEP, steps_taken(inner))
        for weights, ranges in self._partitions.masters():
            state = inner.state.get(weights, {})
            parts = {MASTER: weights} | {kind: state[kind] for kind in MOMENTS if state}
            for name, shape, start, here, count in ranges:
                for kind, flat in parts.items() if not self._is_others(name) else ():
                    sink.add_flat(f"{name}.{kind}", flat[here : here + count], start, shape)

    def load_state(self, source: StateSource) -> None:
        """Take back what an optimizer of any layout saved; the weights of the same checkpoint are in the module. All
        ranks together: weights are gathered at the end."""
        inner, step, saved = self._partitions.optimizer, read_step(source), frozenset(source.names)
        for weights, ranges in self._partitions.masters():
            state = {kind: torch.zeros_like(weights) for kind in MOMENTS if step}
            for name, _, start, here, count in ranges:
                read = partial(source.flat, start=start, count=count)
                own = weights.detach()[here : here + count]
                master = saved_master(name, own, saved, read)
                if master is not None:
                    own.copy_(master)
                for kind, flat in state.items():
                    flat[here : here + count].copy_(read(f"{name}.{kind}"))
            if step:
                inner.state[weights] = {STEP: step_for(inner, weights, step), **state}
        self._partitions.spread()

    def _is_others(self, name: str) -> bool:
        return self._tied is not None and self._tied == (name, False)

    def _clear(self) -> None:
        for tensor in self._partitions.leftovers():
            tensor.zero_()

    def _set_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Begin with the float32 weights that were given, not with their rounding, which is all the engine saw."""
        for weights, ranges in self._partitions.masters():
            for name, _, start, here, count in ranges:
                weights.detach()[here : here + count].copy_(exact[name].flatten()[start : start + count])


def _initialize(module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, dtype: torch.dtype) -> Any:
    deepspeed = import_deepspeed()
    # Its 16-bit optimizer prints memory.
    with redirect_stdout(io.StringIO()):
        config = _configuration(stage, dtype, sum(p.numel() for p in module.parameters() if p.requires_grad))
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    # Where the average is taken differs: in the engine, or in its optimizer.
    engine.gradient_average = engine.optimizer.gradient_average = False
    return engine


def _configuration(stage: int, dtype: torch.dtype, trained: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {
            "enabled": dtype == torch.bfloat16,
            "immediate_grad_update": True,  # each gradient is added to its float32 sum as soon as it is there
            "check_grad_overflow": False,  # a step with a broken norm is refused by the code that knows the joint norm
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "reduce_scatter": True,
            "overlap_comm": False,
            "reduce_bucket_size": min(BUCKET_ELEMENTS, max(1, trained)),
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }
