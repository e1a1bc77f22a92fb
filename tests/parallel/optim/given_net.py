"""A net whose weights get the gradients that it is given, trained by any optimizer in any layout or in one process."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.checkpoint.shard_reader import ShardReader, load_shards
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.core.parameters import ParameterGroup
from dhp.parallel.optim.base import StageOptimizer
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.optim.replicated import MakeOptimizer, Replicated
from dhp.parallel.tensor.slices import as_dtensors, cut_of, use_local_slices
from tests.helpers.rows import on_demand

SHAPES = {
    "layers.0.weight": (7, 6),
    "layers.1.weight": (5,),
    "layers.2.weight": (8, 6),
    "layers.3.weight": (4, 8),
    "layers.4.weight": (3, 4, 5),
    "layers.5.weight": (8,),
    "layers.6.weight": (2, 9),  # fewer rows than ranks
    "layers.7.weight": (1, 5),  # as well, where two ranks share the rows too
}
CUTS = {
    "layers.2.weight": _StridedShard(0, split_factor=2),
    "layers.3.weight": Shard(1),
    "layers.4.weight": Shard(2),
    "layers.5.weight": Shard(0),
}
FAST = ParameterGroup("fast", 2e-2, 0.0, 0)  # of layer 0
REST = ParameterGroup("rest", 1e-2, 0.1, 0)


class Layout(NamedTuple):
    """zero_stage 0: `Replicated`, else `FullySharded`; tensor: ranks that cut the weights of `CUTS`."""

    zero_stage: int
    ranks: int
    tensor: int = 1


LAYOUTS = (Layout(0, 1), Layout(0, 2), Layout(0, 2, 2), Layout(2, 2), Layout(3, 3), Layout(3, 4, 2))
SOME_LAYOUTS = [one if one in (Layout(0, 2, 2), Layout(3, 4, 2)) else on_demand(one) for one in LAYOUTS]
_PAIRS = [(one, one) for one in LAYOUTS] + list(zip(LAYOUTS, LAYOUTS[1:]))
_FAST = [(Layout(0, 2, 2), Layout(0, 2, 2)), (Layout(0, 2, 2), Layout(2, 2)), (Layout(3, 3), Layout(3, 4, 2))]
RESUMED = [pair if pair in _FAST else pytest.param(*pair, marks=pytest.mark.grid) for pair in _PAIRS]


def group_of(name: str) -> ParameterGroup:
    return FAST if name.startswith("layers.0") else REST


class _Gives(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self, name: str, mesh: Any, dtype: torch.dtype):
        super().__init__()
        whole = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(SHAPES[name][0]), dtype=dtype)
        cut = mesh is not None and name in CUTS
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [CUTS[name]]) if cut else whole)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Net(nn.Module):
    def __init__(self, mesh: Any = None, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(_Gives(name, mesh, dtype) for name in SHAPES)

    def loss(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([layer(own) for layer, own in zip(self.layers, gradients, strict=True)]).sum()


def gradient(name: str, step: int, replica: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + SHAPES[name][0])
    return torch.randn(SHAPES[name], generator=generator, dtype=dtype)


def rates(step: int) -> dict[ParameterGroup, float]:
    return {of: of.learning_rate / (step + 1) for of in (FAST, REST)}


def coefficient(step: int) -> float:
    return 0.3 if step % 2 else 1.0


class Rank:
    """One rank's net and optimizer. alone: each part of a weight is updated as if it were whole, which is a mistake."""

    def __init__(self, layout: Layout, make: MakeOptimizer, resumed: str | None, alone: bool, dtype: torch.dtype):
        replicas = dist.get_world_size() // layout.tensor
        self.mesh = init_device_mesh("cpu", (replicas, layout.tensor), mesh_dim_names=("data", "tensor"))
        self.net = Net(self.mesh["tensor"] if layout.tensor > 1 else None, dtype)
        use_local_slices(self.net)
        if resumed is not None:
            load_shards(as_dtensors(self.net), Path(resumed) / "weights")
        self.optimizer = self._optimizer(layout, make, dtype)
        if alone:
            self.optimizer.optimizer.shared.clear()
        if resumed is not None:
            self.optimizer.load_state(ShardReader(Path(resumed) / "states"))

    def _optimizer(self, layout: Layout, make: MakeOptimizer, dtype: torch.dtype) -> StageOptimizer:
        if not layout.zero_stage:
            return Replicated(self.net, make, self.mesh["data"].get_group(), dtype)
        own, tensor_rank = list(self.net.layers), self.mesh.get_local_rank("tensor")
        return FullySharded(self.net, own, make, self.mesh["data"], tensor_rank, layout.zero_stage, dtype)

    def _own(self, step: int) -> Iterator[Tensor]:
        replicas, replica = self.mesh["data"].size(), self.mesh.get_local_rank("data")
        for name, layer in zip(SHAPES, self.net.layers, strict=True):
            cut, held = cut_of(layer, "weight"), layer.weight.dtype
            whole = gradient(name, step, 0, held) if not replica else torch.zeros(SHAPES[name], dtype=held)
            if replicas > 1:  # the sum over the replicas is the one gradient
                noise = gradient(name, step, 1, held)
                whole = whole + (noise if not replica else -noise if replica == 1 else 0 * noise)
            yield whole if cut is None else distribute_tensor(whole, cut.mesh, cut.placements).to_local()

    def train(self, steps: range) -> None:
        for step in steps:
            given = list(self._own(step))
            self.optimizer.backward(self.optimizer.forward(partial(self.net.loss, given)), True)
            self.optimizer.norm_sq()
            self.optimizer.step(rates(step), coefficient(step))

    def save(self, folder: Path) -> None:
        weights, states = (ShardWriter(folder / name, dist.get_rank()) for name in ("weights", "states"))
        self.optimizer.save_weights(weights)
        self.optimizer.save_state(states)
        weights.write()
        states.write()


def train(
    layout: Layout,
    make: MakeOptimizer,
    steps: range,
    folder: str,
    resumed: str | None = None,
    alone: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    """What each rank runs."""
    rank = Rank(layout, make, resumed, alone, dtype)
    rank.train(steps)
    rank.save(Path(folder))


def train_plain(make: Callable[[Net], list[torch.optim.Optimizer]], steps: range) -> dict[str, Tensor]:
    """Weights after steps of the library's own optimizers of whole tensors."""
    net = Net()
    optimizers = make(net)
    for step in steps:
        for name, parameter in net.named_parameters():
            parameter.grad = gradient(name, step, 0) * coefficient(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates(step)[group["group"]]
            optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def read(folder: Path, kind: str = "weights") -> dict[str, Tensor]:
    """Whole tensors, by name. kind: weights or states."""
    found = ShardReader(folder / kind)
    return {name: found.whole(name) for name in found.names}


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest one, as a share of what a weight has moved by."""
    start = {name: parameter.detach() for name, parameter in Net().named_parameters()}
    return max(float((found[name] - expected[name]).norm() / (expected[name] - start[name]).norm()) for name in SHAPES)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, values in expected.items() if not torch.equal(found[name], values)]
