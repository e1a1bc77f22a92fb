"""Both updates, plain and ZeRO, against one process; and a canary for each behaviour of DeepSpeed we rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.parallel.update import Replicated
from dhp.parallel.zero import ZeroSharded
from tests.helpers.ranks import run_on_ranks

MICRO, STEPS = 3, 4


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def data(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)


def _train(kind: str) -> tuple[list[float], list[Tensor]]:
    net, rank = make_net(), dist.get_rank()
    update = ZeroSharded(net, make_optimizer) if kind == "zero" else Replicated(net, make_optimizer, dist.group.WORLD)
    norms = []
    for step in range(STEPS):
        inputs = [data(step, m, rank) for m in range(MICRO)]
        outputs = [net(x) for x, _ in inputs]  # all forwards before the first backward: flights overlap
        for m, (output, (_, gradient)) in enumerate(zip(outputs, inputs, strict=True)):
            update.backward((output * gradient).sum(), last=m == MICRO - 1)
        norms.append(update.norm_sq())
        update.step(1e-2, 0.3 if step % 2 else 1.0)
    return norms, [p.detach().clone() for p in net.parameters()]


def _plain(ranks: int) -> tuple[list[float], list[Tensor]]:
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
        optimizer.step()
    return norms, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["zero", "replicated"])
def test_sums_over_ranks_and_micro_batches_equal_one_process(kind: str, ranks: int) -> None:
    norms, weights = _plain(ranks)
    for found_norms, found in run_on_ranks(_train, ranks, kind):
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for mine, theirs in zip(found, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def _zero_engine() -> tuple[Any, nn.Module]:
    net = make_net()
    return ZeroSharded(net, make_optimizer)._engine, net


def _canaries() -> dict[str, Any]:
    engine, net = _zero_engine()
    x, gradient = data(0, 0, dist.get_rank())
    found: dict[str, Any] = {"clipping": engine.gradient_clipping(), "operators": engine.optimizer.overlap_comm}
    try:
        engine.backward(net(x))
    except AssertionError as error:
        found["non-scalar"] = str(error)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward((net(x) * gradient).sum(), scale_wrt_gas=False)
    own = make_net()
    (own(x) * gradient).sum().backward()
    total = [p.grad.clone() for p in own.parameters()]
    for t in total:
        dist.all_reduce(t)
    norm_sq = sum(float((t / dist.get_world_size()).pow(2).sum()) for t in total)
    found["divides by ranks"] = abs(float(engine.optimizer.scaled_global_norm()) ** 2 / norm_sq - 1) < 1e-5
    import deepspeed

    found["builds nothing"] = deepspeed.comm.comm.cdb.shm_comm_op is None
    return found


def test_deepspeed_behaves_as_the_adapter_assumes() -> None:
    for found in run_on_ranks(_canaries, 2):
        assert found["clipping"] == 0.0
        assert "scalar" in found["non-scalar"]
        assert found["divides by ranks"]
        assert found["builds nothing"]
