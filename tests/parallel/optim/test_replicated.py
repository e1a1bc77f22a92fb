"""The update of replicas against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.parallel.optim.replicated import Replicated
from dhp.parallel.tensor.slices import as_dtensors, cut_of, use_local_slices
from tests.helpers.ranks import run_on_ranks

MICRO, STEPS = 3, 4


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def rate(step: int) -> float:
    """Never the one that the optimizer was made with."""
    return 1e-2 / (step + 2)


def data(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)


def _train() -> tuple[list[float], list[Tensor]]:
    net, rank = make_net(), dist.get_rank()
    update = Replicated(net, make_optimizer, dist.group.WORLD)
    norms = []
    for step in range(STEPS):
        inputs = [data(step, m, rank) for m in range(MICRO)]
        outputs = [net(x) for x, _ in inputs]  # all forwards before the first backward: flights overlap
        for m, (output, (_, gradient)) in enumerate(zip(outputs, inputs, strict=True)):
            update.backward((output * gradient).sum(), last=m == MICRO - 1)
        norms.append(update.norm_sq())
        update.step(rate(step), 0.3 if step % 2 else 1.0)
    return norms, [p.detach().clone() for p in net.parameters()]


def plain(ranks: int) -> tuple[list[float], list[Tensor]]:
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for m in range(MICRO):
            for rank in range(ranks):
                x, gradient = data(step, m, rank)
                (net(x) * gradient).sum().backward()
        norms.append(sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()))
        for p in net.parameters():
            p.grad *= 0.3 if step % 2 else 1.0
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return norms, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_ranks_and_micro_batches_equal_one_process(ranks: int) -> None:
    norms, weights = plain(ranks)
    for found_norms, found in run_on_ranks(_train, ranks):
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for mine, theirs in zip(found, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


class _Split(nn.Module):
    """A weight in each way that tensor ranks hold one, and one that not every data replica uses."""

    def __init__(self, mesh: DeviceMesh | None):
        super().__init__()
        torch.manual_seed(0)
        ways = {"rows": Shard(0), "columns": Shard(1), "fused": _StridedShard(0, split_factor=2), "same": Replicate()}
        for name, placement in ways.items():
            whole = torch.randn(8, 6)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement]) if mesh else whole))
        self.plain, self.sometimes = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))


def _gradient_of(name: str, replica: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * replica)
    return torch.randn(like.shape, generator=generator)


class _Gives(torch.autograd.Function):
    """A scalar whose gradient by the parameter is what it is told."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def _split_update() -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module, replica, tensor = _Split(mesh["tensor"]), mesh.get_local_rank("data"), mesh["tensor"]
    use_local_slices(module)
    update = Replicated(module, make_optimizer, mesh["data"].get_group())
    shares = []
    for name, parameter in module.named_parameters():
        cut = cut_of(module, name)
        gradient = _gradient_of(name, replica, parameter if cut is None else torch.empty(cut.shape))
        if cut is not None:
            gradient = distribute_tensor(gradient, tensor, cut.placements).to_local()
        if name != "sometimes" or replica == 0:
            shares.append(_Gives.apply(parameter, gradient))
    update.backward(torch.stack(shares).sum(), last=True)
    norm_sq = update.norm_sq()
    update.step(0.1, 0.5)
    whole = lambda p: p.full_tensor() if isinstance(p, DTensor) else p
    return norm_sq, {name: whole(p.detach()) for name, p in as_dtensors(module).items()}


def test_weights_split_in_any_way_are_summed_measured_and_updated_as_whole_ones() -> None:
    module = _Split(None)
    for name, parameter in module.named_parameters():
        replicas = (0,) if name == "sometimes" else (0, 1)
        parameter.grad = sum(_gradient_of(name, replica, parameter) for replica in replicas)
    expected = sum(float(p.grad.double().square().sum()) for p in module.parameters())
    optimizer = make_optimizer(module.parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    for parameter in module.parameters():
        parameter.grad *= 0.5
    optimizer.step()
    for norm_sq, weights in run_on_ranks(_split_update, 4):
        assert norm_sq == pytest.approx(expected, rel=1e-6)
        for name, weight in module.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=1e-6, msg=name)


def _not_a_number() -> float:
    net = make_net()
    update = Replicated(net, make_optimizer, dist.group.WORLD)
    x, gradient = data(0, 0, dist.get_rank())
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    update.backward((net(x) * gradient).sum(), last=True)
    return update.norm_sq()


def test_a_broken_gradient_on_one_rank_breaks_the_norm_on_all() -> None:
    assert not any(math.isfinite(norm_sq) for norm_sq in run_on_ranks(_not_a_number, 2))


def _gradient_bytes(dtype: torch.dtype) -> list[int]:
    net = make_net()
    update = Replicated(net, make_optimizer, dist.group.WORLD, dtype)
    found = [update.gradient_bytes()]
    update.backward(sum(p.float().square().sum() for p in net.parameters()), last=True)
    found.append(update.gradient_bytes())
    update.norm_sq()
    update.step(1e-3, 1.0)
    return [*found, update.gradient_bytes()]


@pytest.mark.parametrize("ranks, dtype", [(1, torch.float32), (1, torch.bfloat16), (2, torch.float32)])
def test_what_gradients_take_is_told_while_they_are_there(ranks: int, dtype: torch.dtype) -> None:
    whole = 4 * sum(p.numel() for p in make_net().parameters())  # float32, whatever the module computes in
    assert run_on_ranks(_gradient_bytes, ranks, dtype) == [[0, whole, 0]] * ranks


def _finished_after_backward(exclusive: bool) -> list[bool]:
    """Whether the sums over the ranks are done when backward returns."""
    net = make_net()
    update = Replicated(net, make_optimizer, dist.group.WORLD, exclusive=exclusive)
    x, gradient = data(0, 0, dist.get_rank())
    update.backward((net(x) * gradient).sum(), last=False)
    unfinished = [update._gradients._unfinished]
    update.backward((net(x) * gradient).sum(), last=True)
    return [*unfinished, update._gradients._unfinished]


def test_exclusive_sums_are_done_when_backward_returns() -> None:
    assert run_on_ranks(_finished_after_backward, 2, True) == [[False, False]] * 2
    assert run_on_ranks(_finished_after_backward, 2, False) == [[False, True]] * 2
