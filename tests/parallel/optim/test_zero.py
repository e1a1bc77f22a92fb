"""DeepSpeed's ZeRO, and canaries of what it does."""

import copy
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.checkpoint.shard_reader import ShardReader, load_shards, read_shards
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.parallel.optim import zero
from dhp.parallel.optim.value_ranges import Computation
from dhp.parallel.optim.zero import ZeroSharded
from tests.parallel.conftest import RunOnRanks
from tests.parallel.optim.test_replicated import MICRO, STEPS, data, make_net, make_optimizer, plain, rate

STAGES = [1, 2, 3]
FORMATS = ["float32", "bfloat16"]


def make_update(stage: int, dtype: str = "float32", net: nn.Module | None = None) -> tuple[ZeroSharded, nn.Module]:
    net = net or make_net()
    return ZeroSharded(net, make_optimizer, stage, getattr(torch, dtype)), net


def run_step(update: ZeroSharded, net: nn.Module, step: int, dtype: str = "float32", overlap: bool = False) -> None:
    """Forward and backward of a step's micro-batches; with `overlap` all forwards before the first backward."""
    inputs = [tuple(t.to(getattr(torch, dtype)) for t in data(step, m, dist.get_rank())) for m in range(MICRO)]
    forward = lambda m: (update.forward(lambda: net(inputs[m][0])) * inputs[m][1]).sum()
    losses = [forward(m) for m in range(MICRO)] if overlap else None
    for m in range(MICRO):
        update.backward(losses[m] if losses else forward(m), last=m == MICRO - 1)


def masters(net: nn.Module) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(p).clone() for p in net.parameters()]


def _train(stage: int, dtype: str, bucket: int | None = None) -> tuple[list[float], list[Tensor]]:
    with patch.object(zero, "BUCKET_ELEMENTS", bucket or zero.BUCKET_ELEMENTS):
        update, net = make_update(stage, dtype)
    norms = []
    for step in range(STEPS):
        run_step(update, net, step, dtype, overlap=stage < 3)
        norms.append(update.norm_sq())
        update.step(rate(step), 0.3 if step % 2 else 1.0)
    return norms, masters(net)


def assert_same(found: list[tuple[list[float], list[Tensor]]], norms: list[float], weights: list[Tensor]) -> None:
    for found_norms, of_rank in found:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for mine, theirs in zip(of_rank, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_sums_over_ranks_and_micro_batches_equal_one_process(stage: int, ranks: int, on_ranks: RunOnRanks) -> None:
    assert_same(on_ranks(_train, ranks, stage, "float32"), *plain(ranks))


def plain_bfloat16(ranks: int) -> tuple[list[float], list[Tensor]]:
    """As `plain`: each gradient in 16 bits, everything else in float32."""
    exact = make_net()
    optimizer = make_optimizer(exact.parameters())
    norms = []
    for step in range(STEPS):
        net = copy.deepcopy(exact).to(torch.bfloat16)
        for p in exact.parameters():
            p.grad = torch.zeros_like(p)
        for m in range(MICRO):
            for rank in range(ranks):
                x, gradient = (t.to(torch.bfloat16) for t in data(step, m, rank))
                net.zero_grad()
                (net(x) * gradient).sum().backward()
                for p, rounded in zip(exact.parameters(), net.parameters(), strict=True):
                    p.grad += rounded.grad
        norms.append(sum(float((p.grad.double() ** 2).sum()) for p in exact.parameters()))
        for p in exact.parameters():
            p.grad *= 0.3 if step % 2 else 1.0
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return norms, [p.detach() for p in exact.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_rounds_nothing_but_weights_activations_and_each_gradient(
    stage: int, ranks: int, on_ranks: RunOnRanks
) -> None:
    """To the limits of float32: a master, a sum over micro-batches or over ranks in 16 bits is off by 1e-3."""
    assert_same(on_ranks(_train, ranks, stage, "bfloat16"), *plain_bfloat16(ranks))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_larger_than_a_bucket(stage: int, dtype: str, on_ranks: RunOnRanks) -> None:
    expected = plain(2) if dtype == "float32" else plain_bfloat16(2)
    assert_same(on_ranks(_train, 2, stage, dtype, 16), *expected)


def _not_a_number(stage: int, dtype: str) -> float:
    update, net = make_update(stage, dtype)
    x, gradient = (t.to(getattr(torch, dtype)) for t in data(0, 0, dist.get_rank()))
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    update.backward((update.forward(lambda: net(x)) * gradient).sum(), last=True)
    return update.norm_sq()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_broken_gradient_on_one_rank_breaks_the_norm_on_all(stage: int, dtype: str, on_ranks: RunOnRanks) -> None:
    """DeepSpeed's own norm of a group is -1 then, whose square would pass for a healthy 1."""
    assert not any(math.isfinite(norm_sq) for norm_sq in on_ranks(_not_a_number, 2, stage, dtype))


def _with_a_dropped_step(stage: int, dtype: str) -> bool:
    norms = []
    for dropped in (False, True):
        update, net = make_update(stage, dtype)
        if dropped:
            run_step(update, net, 1, dtype)
            update.norm_sq()
            update.drop()
        run_step(update, net, 0, dtype)
        norms.append(update.norm_sq())
    return norms[0] == norms[1]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_dropped_step_leaves_nothing_behind(stage: int, dtype: str, on_ranks: RunOnRanks) -> None:
    assert all(on_ranks(_with_a_dropped_step, 2, stage, dtype))


class _SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def _unused_in_the_second_step(stage: int, dtype: str) -> tuple[float, float]:
    update, net = make_update(stage, dtype, _SometimesUsed())
    x, gradient = (t.to(getattr(torch, dtype)) for t in data(0, 0, 0))
    norms = []
    for both in (True, False):
        update.backward((update.forward(lambda both=both: net(x, both)) * gradient).sum(), last=True)
        norms.append(update.norm_sq())
        update.step(0.0, 1.0)
    return norms[0], norms[1]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_a_step_does_not_use_keeps_no_gradient_of_the_one_before(
    stage: int, dtype: str, on_ranks: RunOnRanks
) -> None:
    for both, one in on_ranks(_unused_in_the_second_step, 2, stage, dtype):
        assert one == pytest.approx(both / 2, rel=1e-5)  # both layers get the same gradient


def _resumed(folder: str, stage: int, dtype: str) -> list[bool]:
    """Two steps, saved; then two more by the same update and by one that begins with what was saved."""
    update, net = make_update(stage, dtype)
    for step in range(2):
        run_step(update, net, step, dtype)
        update.step(rate(step), 1.0)
    weights, state = (ShardWriter(Path(folder) / name, dist.get_rank()) for name in ("weights", "state"))
    update.save_weights(weights)
    update.save_state(state)
    for writer in (weights, state):
        writer.write()
    dist.barrier()
    again = make_net()
    torch.nn.init.zeros_(next(again.parameters()))
    load_shards(dict(again.named_parameters()), Path(folder) / "weights")
    resumed, _ = make_update(stage, dtype, again)
    resumed.load_state(ShardReader(Path(folder) / "state"))
    for step in range(2, 4):
        for one, module in ((update, net), (resumed, again)):
            run_step(one, module, step, dtype)
            one.step(rate(step), 1.0)
    return [torch.equal(mine, theirs) for mine, theirs in zip(masters(again), masters(net), strict=True)]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_update_goes_on_bit_for_bit(stage: int, dtype: str, tmp_path: Path, on_ranks: RunOnRanks) -> None:
    assert all(all(same) for same in on_ranks(_resumed, 3, str(tmp_path), stage, dtype))
    weights, state = read_shards(tmp_path / "weights"), read_shards(tmp_path / "state")
    assert {name: w.shape for name, w in weights.items()} == {n: p.shape for n, p in make_net().named_parameters()}
    for name, weight in weights.items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(state[f"{name}.master"].to(weight.dtype), weight)
        assert {state[f"{name}.{kind}"].shape for kind in ("exp_avg", "exp_avg_sq")} == {weight.shape}


def _first_masters(stage: int) -> list[Any]:
    update, net = make_update(stage, "bfloat16")
    return [masters(net), {p.dtype for p in net.parameters()}]


@pytest.mark.parametrize("stage", STAGES)
def test_masters_begin_as_the_weights_that_were_loaded_not_as_their_rounding(stage: int, on_ranks: RunOnRanks) -> None:
    for found, formats in on_ranks(_first_masters, 2, stage):
        assert formats == {torch.bfloat16}
        assert all(
            torch.equal(mine, given.detach()) for mine, given in zip(found, make_net().parameters(), strict=True)
        )


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
