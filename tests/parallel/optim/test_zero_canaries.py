"""A canary for each behaviour of the pinned DeepSpeed that dhp relies on, or refuses a configuration for."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.parallel.optim import zero
from dhp.parallel.optim.value_ranges import Computation
from tests.parallel.conftest import RunOnRanks
from tests.parallel.optim.test_replicated import data, make_net, make_optimizer
from tests.parallel.optim.test_zero import make_update

STAGES = [1, 2, 3]


def summed_norm_sq(micro_batches: int) -> float:
    """Of the gradients summed over all ranks and micro-batches."""
    net = make_net()
    for m in range(micro_batches):
        for rank in range(dist.get_world_size()):
            x, gradient = data(0, m, rank)
            (net(x) * gradient).sum().backward()
    return sum(float(p.grad.double().square().sum()) for p in net.parameters())


def close(found: float, wanted: float) -> bool:
    return abs(found / wanted - 1) < 1e-5


def _settings(stage: int) -> dict[str, Any]:
    update, net = make_update(stage)
    x, _ = data(0, 0, dist.get_rank())
    found: dict[str, Any] = {"clipping": update._engine.gradient_clipping()}
    try:
        update.backward(update.forward(lambda: net(x)), last=True)
    except AssertionError as error:
        found["non-scalar"] = str(error)
    import deepspeed

    found["builds nothing"] = deepspeed.comm.comm.cdb.shm_comm_op is None
    found["loads no compiler"] = "torch._inductor.compile_fx" not in sys.modules
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_no_clipping_no_compiler_and_scalars_only(stage: int, on_ranks: RunOnRanks) -> None:
    for found in on_ranks(_settings, 2, stage):
        assert found["clipping"] == 0.0
        assert "scalar" in found["non-scalar"]
        assert found["builds nothing"] and found["loads no compiler"]


def _averaged(stage: int, dtype: str) -> bool:
    update, net = make_update(stage, dtype)
    update._engine.gradient_average = update._engine.optimizer.gradient_average = True
    update._partitions.divides = 1
    x, gradient = (t.to(getattr(torch, dtype)) for t in data(0, 0, 0))  # the same on both ranks
    update.backward((update.forward(lambda: net(x)) * gradient).sum(), last=True)
    own = make_net().to(getattr(torch, dtype))
    (own(x) * gradient).sum().backward()
    return close(update.norm_sq(), sum(float(p.grad.double().square().sum()) for p in own.parameters()))


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")])
def test_left_alone_the_engine_averages_over_ranks(stage: int, dtype: str, on_ranks: RunOnRanks) -> None:
    assert all(on_ranks(_averaged, 2, stage, dtype))


def _interleaved(stage: int) -> tuple[float, float]:
    update, net = make_update(stage)
    inputs = [data(0, m, dist.get_rank()) for m in range(2)]
    outputs = [update.forward(lambda x=x: net(x)) for x, _ in inputs]
    for m, (output, (_, gradient)) in enumerate(zip(outputs, inputs, strict=True)):
        update.backward((output * gradient).sum(), last=m == 1)
    return update.norm_sq(), summed_norm_sq(2)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_flights_at_a_time_are_exact_below_stage_three(stage: int, on_ranks: RunOnRanks) -> None:
    assert all(close(*norms) for norms in on_ranks(_interleaved, 2, stage))


def test_stage_three_loses_a_micro_batch_when_two_are_in_flight(on_ranks: RunOnRanks) -> None:
    """Without a word: this is why it wants the sequential schedule."""
    for found, wanted in on_ranks(_interleaved, 2, 3):
        assert abs(found / wanted - 1) > 0.1


def _beside_the_engine() -> tuple[float, float]:
    update, net = make_update(3)
    for m in range(2):
        x, gradient = data(0, m, dist.get_rank())
        update.backward((net(x) * gradient).sum(), last=m == 1)
    return update.norm_sq(), summed_norm_sq(2)


def test_stage_three_counts_micro_batches_by_the_engines_forward(on_ranks: RunOnRanks) -> None:
    """A forward of the module itself overwrites the gradients: this is why `forward` is one of the verbs."""
    for found, wanted in on_ranks(_beside_the_engine, 2):
        assert abs(found / wanted - 1) > 0.1


class _HeadUsedFromOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(7, 5), nn.Linear(5, 3, bias=False)


def _head_outside() -> list[tuple[int, ...]]:
    module = _HeadUsedFromOutside()
    with patch.object(zero, "PERSISTENT_ELEMENTS", 0):
        update, _ = make_update(3, net=module)
    shapes = []

    def use(x: Tensor) -> Tensor:
        hidden = module.body(x)
        shapes.append(tuple(module.head.weight.shape))
        return hidden @ module.head.weight.T

    for step in range(3):
        x, gradient = data(step, 0, dist.get_rank())
        shapes.append(tuple(module.head.weight.shape))
        update.backward((update.forward(lambda x=x: use(x)) * gradient).sum(), last=True)
        update.step(1e-3, 1.0)
    return shapes


def test_stage_three_gathers_a_weight_that_is_used_outside_its_modules_forward(on_ranks: RunOnRanks) -> None:
    for shapes in on_ranks(_head_outside, 2):
        assert shapes == [(0,), (3, 5)] * 3  # between steps, and inside `forward`


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("inv_freq", 1 / 10000 ** torch.arange(0, 1, 0.1), persistent=False)


def _buffers(stage: int) -> Tensor:
    module = _Rotary()
    make_update(stage, "bfloat16", module)
    return module.inv_freq


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_leaves_buffers_alone(stage: int, on_ranks: RunOnRanks) -> None:
    for buffer in on_ranks(_buffers, 2, stage):
        assert buffer.dtype == torch.float32 and torch.equal(buffer, _Rotary().inv_freq)


def _masters_of_the_engine(stage: int) -> bool:
    net = make_net()
    optimizer = make_optimizer(list(net.parameters()))
    engine = zero._initialize(Computation(net), optimizer, stage, torch.bfloat16)
    from deepspeed.utils import safe_get_full_fp32_param

    masters = [safe_get_full_fp32_param(p) for p in engine.module.module.parameters()]
    return all(torch.equal(m, m.bfloat16().float()) for m in masters)


@pytest.mark.parametrize("stage", STAGES)
def test_the_engines_own_masters_begin_rounded(stage: int, on_ranks: RunOnRanks) -> None:
    """This is why they are set anew."""
    assert all(on_ranks(_masters_of_the_engine, 2, stage))
