"""AdamW on replicas: rates, clipping, chunks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler

from dhp.core.errors import ConfigError
from dhp.core.parameters import COMPENSATION, FORMS, MOMENTS, SUM, ParameterGroup
from dhp.parallel.optim import chunked_adamw
from dhp.parallel.optim.base import clip_coefficient, clipped_step, join_master, make_adamw, step_for
from dhp.parallel.optim.chunked_adamw import ChunkedAdamW, ChunkExtent, make_chunked_adamw
from dhp.parallel.optim.learning_rates import KINDS, RateCurve, learning_rate_at
from dhp.parallel.optim.replicated import Replicated
from dhp.parallel.optim.value_ranges import HeldBlock
from dhp.parallel.tensor.slices import as_dtensors, cut_of, use_local_slices
from tests.helpers.ranks import run_on_ranks
from tests.parallel.optim.plain_states import PlainStates

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


ADAMW_STEPS, NAME, DECAY, BETAS, EPS, SEED = 5, "layer.weight", 0.1, (0.9, 0.999), 1e-8, 3
NARROW = [form for form in FORMS if form != 18]


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gradient(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))


def optimizer_of(weights: dict[str, nn.Parameter], form: int) -> ChunkedAdamW:
    for weight in weights.values():
        weight.grad_dtype = None
    return make_chunked_adamw(
        weights.items(), lambda _: ParameterGroup("text", 1e-2, DECAY, 0), BETAS, EPS, FORMS[form], SEED
    )


def held(master: Tensor, form: int) -> tuple[nn.Parameter, ChunkedAdamW]:
    """A weight as the form keeps it."""
    halves = FORMS[form].compensated
    weight = nn.Parameter(master.to(torch.bfloat16) if halves else master.clone())
    optimizer = optimizer_of({NAME: weight}, form)
    if halves:
        optimizer.hold_halves(weight, master)
    return weight, optimizer


def states_of(weight: nn.Parameter, optimizer: ChunkedAdamW) -> list[Tensor]:
    state = optimizer.state[weight]
    own = weight.detach()
    return [join_master(own, state[COMPENSATION]) if COMPENSATION in state else own, *(state[kind] for kind in MOMENTS)]


def plain_adamw(form: int, shape: tuple[int, ...], coefficient: float) -> list[Tensor]:
    states = PlainStates(NAME, start(shape), FORMS[form], SEED)
    for step in range(ADAMW_STEPS):
        rounded = gradient(step, shape).to(getattr(torch, FORMS[form].format(SUM)))
        states.step(rounded.float() * coefficient, 1e-2 / (step + 1), DECAY, BETAS, EPS)
    return [states.master, *states.moments]


def train(weight: nn.Parameter, optimizer: ChunkedAdamW, form: int, rows: slice, coefficient: float) -> None:
    for step in range(ADAMW_STEPS):
        whole = gradient(step, (9, 5) if weight.ndim == 2 else tuple(weight.shape))
        weight.grad = (whole[rows] if weight.ndim else whole).to(getattr(torch, FORMS[form].format(SUM)))
        clipped_step(optimizer, [weight.grad], 1e-2 / (step + 1), coefficient)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("coefficient", [1.0, 0.3])
@pytest.mark.parametrize("shape", [(9, 5), (7,), ()])
def test_steps_of_a_plain_process(
    form: int, coefficient: float, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_adamw, "CHUNK_ELEMENTS", 10)  # two rows of five
    weight, optimizer = held(start(shape), form)
    train(weight, optimizer, form, slice(None), coefficient)
    for found, expected in zip(states_of(weight, optimizer), plain_adamw(form, shape, coefficient), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("form", NARROW)
def test_rows_of_a_rank_are_those_of_the_whole(form: int) -> None:
    expected = plain_adamw(form, (9, 5), 1.0)
    for rows in (slice(0, 4), slice(4, 9), slice(9, 9)):
        weight, optimizer = held(start((9, 5))[rows], form)
        optimizer.extents[weight] = ChunkExtent(
            (9, 5), [HeldBlock((slice(0, rows.stop - rows.start), slice(0, 5)), (rows.start, 0))]
        )
        train(weight, optimizer, form, rows, 1.0)
        for found, whole in zip(states_of(weight, optimizer), expected, strict=True):
            assert torch.equal(found, whole[rows])


def test_rows_drawn_as_if_they_were_the_first_ones_are_other_rows() -> None:
    expected, rows = plain_adamw(12, (9, 5), 1.0), slice(4, 9)
    weight, optimizer = held(start((9, 5))[rows], 12)
    train(weight, optimizer, 12, rows, 1.0)
    assert not torch.equal(states_of(weight, optimizer)[1], expected[1][rows])


@pytest.mark.parametrize(("form", "tolerance"), [(16, 1e-6), (12, 2e-4), (10, 2e-4)])
def test_weights_are_near_those_of_torchs_adamw(form: int, tolerance: float) -> None:
    """Moments of 8 bits' precision move an update by some of its 2⁻⁸, updates are up to 1e-2."""
    weight, optimizer = held(start((9, 5)), form)
    train(weight, optimizer, form, slice(None), 1.0)
    exact = nn.Parameter(start((9, 5)))
    torchs = torch.optim.AdamW([exact], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(ADAMW_STEPS):
        exact.grad = gradient(step, (9, 5)).to(getattr(torch, FORMS[form].format(SUM))).float()
        torchs.param_groups[0]["lr"] = 1e-2 / (step + 1)
        torchs.step()
    difference = (states_of(weight, optimizer)[0] - exact.detach()).abs().max()
    assert float(difference) < tolerance
    assert float((exact.detach() - start((9, 5))).abs().max()) > 50 * tolerance


def test_a_weight_without_a_gradient_stays_as_it_is() -> None:
    weight, optimizer = held(start((9, 5)), 12)
    before = [values.clone() for values in (weight.detach(), optimizer.state[weight][COMPENSATION])]
    optimizer.step()
    for old, new in zip(before, (weight.detach(), optimizer.state[weight][COMPENSATION]), strict=True):
        assert torch.equal(old, new)
    assert MOMENTS[0] not in optimizer.state[weight]


def after(fused: bool, coefficients: list[float], ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.AdamW(weights, lr=1.0, fused=fused)
    for step, coefficient in enumerate(coefficients):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        if ours:
            clipped_step(optimizer, [w.grad for w in weights], 0.01 * (step + 1), coefficient)
            assert not hasattr(optimizer, "grad_scale")
            continue
        for weight in weights:
            weight.grad *= coefficient
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.step()
    return weights


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_scaled_and_the_rate_is_set(fused: bool) -> None:
    coefficients = [0.3, 1.0, 0.01]
    for found, wanted in zip(after(fused, coefficients, True), after(False, coefficients, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_an_optimizer_without_parameters_takes_no_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    clipped_step(torch.optim.AdamW([weight], fused=True), [], 0.1, 0.5)
    assert weight.tolist() == [1.0, 1.0]


def test_counts_of_steps_lie_where_the_optimizer_looks_for_them() -> None:
    weight = nn.Parameter(torch.ones(2, device="meta"))
    step = torch.tensor(3.0)
    plain, fused = torch.optim.AdamW([weight]), torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert step_for(plain, weight, step).device.type == "cpu"
    assert step_for(fused, weight, step).device.type == "meta"
    copy = step_for(plain, weight, step)
    copy += 1  # as an optimizer does
    assert float(step) == 3.0


PEAK = 3e-3
LENGTHS = [(20, 5), (20, 0), (7, 7), (1, 0), (3, 10)]  # of the run, of the warm-up


def reference_rates(name: str, total: int, warmup: int, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs
    )
    return taken(optimizer, scheduler, total)


def taken(optimizer: Any, scheduler: Any, total: int) -> list[float]:
    rates = []
    for _ in range(total + 2):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def own_rates(warmup: int, curve: RateCurve) -> list[float]:
    return [learning_rate_at(step, PEAK, warmup, curve) for step in range(curve.total_steps + 2)]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_rates_equal_transformers_at_every_step(kind, total, warmup):
    assert own_rates(warmup, RateCurve(kind, total)) == reference_rates(kind, total, warmup)


@pytest.mark.parametrize("cycles", [1, 2, 3])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_restarts_equal_transformers(cycles, total, warmup):
    own = own_rates(warmup, RateCurve("cosine_with_restarts", total, cycles=cycles))
    assert own == reference_rates("cosine_with_restarts", total, warmup, num_cycles=cycles)


@pytest.mark.parametrize("lowest", [3e-4, PEAK, 0.0])
@pytest.mark.parametrize(("total", "warmup"), LENGTHS)
def test_a_cosine_with_a_lowest_rate_equals_transformers(lowest, total, warmup):
    own = own_rates(warmup, RateCurve("cosine", total, lowest / PEAK))
    assert own == reference_rates("cosine_with_min_lr", total, warmup, min_lr=lowest)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    named = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr=lowest)
    assert own == taken(optimizer, named, total)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("lowest", [0.0, 0.1])
@pytest.mark.parametrize(("total", "warmup", "decay"), [(20, 5, 4), (20, 0, 20), (20, 5, 0), (7, 3, 4), (1, 0, 1)])
def test_warmup_stable_decay_equals_transformers(decay_type, lowest, total, warmup, decay):
    own = own_rates(warmup, RateCurve("warmup_stable_decay", total, lowest, decay_steps=decay, decay_type=decay_type))
    how = {"num_decay_steps": decay, "decay_type": decay_type, "min_lr_ratio": lowest}
    assert own == reference_rates("warmup_stable_decay", total, warmup, **how)


def test_the_lowest_rate_of_schedules_that_have_none_in_transformers():
    assert own_rates(0, RateCurve("linear", 4, 0.5)) == pytest.approx(
        [PEAK * s for s in (1, 0.875, 0.75, 0.625, *[0.5] * 2)]
    )
    again = own_rates(0, RateCurve("cosine_with_restarts", 4, 0.5, cycles=2))
    assert again == pytest.approx([PEAK * share for share in (1, 0.75, 1, 0.75, 0.5, 0.5)])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="lr_scheduler_type=polynomial.*constant, linear, cosine"):
        learning_rate_at(0, 1.0, 0, RateCurve("polynomial", 1))
    assert len(KINDS) == 5


GROUP = ParameterGroup("text", 1e-3, 0.01, 0)


def test_adamw_is_torchs_own_with_one_group():
    model = torch.nn.Linear(3, 2)
    optimizer = make_adamw(model.named_parameters(), lambda _: GROUP, [0.9, 0.999], 1e-8)
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults == plain.defaults
    (group,), (plain_group,) = optimizer.param_groups, plain.param_groups
    assert {key: group[key] for key in plain_group} == plain_group and group["group"] == GROUP


def test_a_slice_takes_the_same_steps_as_in_the_whole_whatever_the_threads():
    random = torch.Generator().manual_seed(0)
    whole, *gradients = torch.randn(4, 517, 13, generator=random)
    results = []
    for threads, rows in ((1, slice(None)), (2, slice(None)), (1, slice(3, 400))):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        weight = whole[rows].clone().requires_grad_()
        optimizer = make_adamw([("weight", weight)], lambda _: GROUP, [0.9, 0.999], 1e-8)
        for gradient in gradients:
            weight.grad = gradient[rows].clone()
            optimizer.step()
        torch.set_num_threads(before)
        results.append(weight.detach())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0][3:400], results[2])


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_two_parts_equals_clipping_them_together(max_norm):
    torch.manual_seed(0)
    parts = [[torch.randn(4, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)] for _ in range(2)]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for part in parts for grad in part]
    for parameter, grad in zip(parameters, (grad for part in parts for grad in part)):
        parameter.grad = grad.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    norm, coefficient = clip_coefficient([sum(float(g.square().sum()) for g in part) for part in parts], max_norm)

    assert norm == pytest.approx(float(expected_norm), rel=1e-14)
    for parameter, grad in zip(parameters, (grad for part in parts for grad in part)):
        torch.testing.assert_close(parameter.grad, grad * coefficient, rtol=1e-14, atol=0)


@pytest.mark.parametrize("max_norm", [None, 0, 0.0])
def test_no_clipping(max_norm):
    assert clip_coefficient([9.0, 16.0], max_norm) == (5.0, 1.0)


def test_the_order_of_the_parts_does_not_change_the_norm():
    parts = [1e16, 1.0, 1.0, 3.0]
    assert clip_coefficient(parts, 1.0) == clip_coefficient(parts[::-1], 1.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_gradients_show_as_in_torch(broken):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([broken], dtype=torch.float64)
    expected_norm = float(torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    norm, coefficient = clip_coefficient([broken], 1.0)
    assert str(norm) == str(expected_norm)
    assert str(broken * coefficient) == str(parameter.grad.item())
