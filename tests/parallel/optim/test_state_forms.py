"""Forms of optimizer states and their rounding."""

from collections.abc import Iterator, Mapping
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
from dhp.core.parameters import COMPENSATION, FORMS, MASTER, MOMENTS, SUM, ParameterGroup
from dhp.parallel.optim.base import (
    StageOptimizer,
    cast_parameters,
    exact_dtype,
    join_master,
    make_adamw,
    saved_master,
    split_master,
    widen,
)
from dhp.parallel.optim.chunked_adamw import (
    ChunkedAdamW,
    HostMoments,
    draw_halves,
    draw_key,
    make_chunked_adamw,
    round_stochastically,
)
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.optim.replicated import Replicated
from dhp.parallel.tensor.slices import as_dtensors, cut_of, use_local_slices
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow, slow_but
from tests.parallel.optim.plain_states import PlainStates

MICRO, SEED, DECAY, BETAS, EPS = 2, 5, 0.1, (0.9, 0.999), 1e-8
SHAPES = {"layers.0.weight": (7, 6), "layers.1.weight": (5,), "layers.2.weight": (8, 6), "layers.3.weight": (4, 8)}
CUTS = {"layers.2.weight": _StridedShard(0, split_factor=2), "layers.3.weight": Shard(1)}


class Layout(NamedTuple):
    """zero_stage 0: `Replicated`, else `FullySharded`; tensor: ranks that cut two of the weights."""

    zero_stage: int
    ranks: int
    tensor: int = 1
    host: bool = False  # moments in host memory


LAYOUTS = (Layout(0, 1), Layout(0, 2), Layout(0, 2, 2), Layout(2, 2), Layout(3, 3), Layout(3, 4, 2))


class _Gives(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self, name: str, mesh: Any):
        super().__init__()
        whole = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name) + SHAPES[name][0]))
        cut = mesh is not None and name in CUTS
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [CUTS[name]]) if cut else whole)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class _Net(nn.Module):
    def __init__(self, mesh: Any = None):
        super().__init__()
        self.layers = nn.ModuleList(_Gives(name, mesh) for name in SHAPES)

    def loss(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([layer(own) for layer, own in zip(self.layers, gradients, strict=True)]).sum()


def gradient(name: str, step: int, micro: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * replica + SHAPES[name][0])
    return torch.randint(-4, 5, SHAPES[name], generator=generator).to(torch.bfloat16)


def rate(step: int) -> float:
    return 1e-2 / (step + 1)


def coefficient(step: int) -> float:
    return 0.3 if step % 2 else 1.0


class _Rank:
    """One rank's net and optimizer."""

    def __init__(self, layout: Layout, nbytes: int, resumed: Path | None = None):
        replicas = dist.get_world_size() // layout.tensor
        self.mesh = init_device_mesh("cpu", (replicas, layout.tensor), mesh_dim_names=("data", "tensor"))
        self.net = _Net(self.mesh["tensor"] if layout.tensor > 1 else None)
        use_local_slices(self.net)
        if resumed is not None:
            load_shards(as_dtensors(self.net), resumed / "weights")
        self.form = FORMS[nbytes]
        self.optimizer = self._optimizer(layout)
        if resumed is not None:
            self.optimizer.load_state(ShardReader(resumed / "states"))

    def _optimizer(self, layout: Layout) -> StageOptimizer:
        group, form, bf16 = lambda _: ParameterGroup("text", 1e-2, DECAY, 0), self.form, torch.bfloat16
        exact = lambda named: make_adamw(named, group, BETAS, EPS)
        narrow = lambda named: make_chunked_adamw(named, group, BETAS, EPS, form, SEED, layout.host)
        make: Any = exact if form.nbytes == 18 and not layout.host else narrow
        if not layout.zero_stage:
            return Replicated(self.net, make, self.mesh["data"].get_group(), bf16, form=form)
        own = list(self.net.layers)
        tensor_rank = self.mesh.get_local_rank("tensor")
        return FullySharded(self.net, own, make, self.mesh["data"], tensor_rank, layout.zero_stage, bf16, form)

    def _own(self, step: int, micro: int) -> Iterator[Tensor]:
        replica = self.mesh.get_local_rank("data")
        for name, layer in zip(SHAPES, self.net.layers, strict=True):
            cut, whole = cut_of(layer, "weight"), gradient(name, step, micro, replica)
            yield whole if cut is None else distribute_tensor(whole, cut.mesh, cut.placements).to_local()

    def train(self, steps: range) -> list[float]:
        """The squared norm of each step's gradient, and bytes of sums in the last."""
        norms = []
        for step in steps:
            for micro in range(MICRO):
                given = list(self._own(step, micro))
                self.optimizer.backward(self.optimizer.forward(partial(self.net.loss, given)), micro == MICRO - 1)
            norms.append(self.optimizer.norm_sq())
            nbytes = self.optimizer.gradient_bytes()
            self.optimizer.step(rate(step), coefficient(step))
        return [*norms, nbytes]

    def save(self, folder: Path) -> None:
        weights, states = (ShardWriter(folder / name, dist.get_rank()) for name in ("weights", "states"))
        self.optimizer.save_weights(weights)
        self.optimizer.save_state(states)
        weights.write()
        states.write()


def _train(layout: Layout, nbytes: int, steps: range, folder: str, resumed: str | None = None) -> list[float]:
    rank = _Rank(layout, nbytes, None if resumed is None else Path(resumed))
    found = rank.train(steps)
    rank.save(Path(folder))
    return found


def _converted(layout: Layout, nbytes: int, folder: str, resumed: str) -> None:
    """Read a checkpoint and write it as this form has it."""
    _Rank(layout, nbytes, Path(resumed)).save(Path(folder))


def read(folder: Path) -> dict[str, list[Tensor]]:
    """Of each parameter the master weight, both moments, and the module's weight."""
    weights, states = ShardReader(folder / "weights"), ShardReader(folder / "states")
    found = {}
    for name in SHAPES:
        weight = weights.whole(name)
        master = saved_master(name, weight, states.names, states.whole)
        found[name] = [master, *(states.whole(f"{name}.{kind}") for kind in MOMENTS), weight]
    return found


def plain(nbytes: int, replicas: int, steps: int) -> tuple[list[float], dict[str, PlainStates]]:
    """Squared norms, and states after the steps."""
    net, form = _Net(), FORMS[nbytes]
    states = {n: PlainStates(n, p.detach(), form, SEED) for n, p in net.named_parameters()}
    norms = []
    for step in range(steps):
        sums = {}
        for name in SHAPES:
            total = torch.zeros(SHAPES[name], dtype=getattr(torch, form.format(SUM)))
            for micro in range(MICRO):
                for replica in range(replicas):
                    total += gradient(name, step, micro, replica)
            sums[name] = total.float()
            states[name].step(sums[name] * coefficient(step), rate(step), DECAY, BETAS, EPS)
        norms.append(sum(float(total.double().square().sum()) for total in sums.values()))
    return norms, states


def assert_equal(found: Mapping[str, list[Tensor]], expected: Mapping[str, list[Tensor]]) -> None:
    for name in SHAPES:
        for mine, theirs in zip(found[name], expected[name], strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


@pytest.mark.parametrize("nbytes", [slow(16), slow(12), 10])
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, Layout(0, 2, 2), Layout(2, 2), Layout(3, 4, 2)), ids=str)
def test_every_layout_has_the_states_of_one_process_to_the_bit(layout: Layout, nbytes: int, tmp_path: Path) -> None:
    steps, replicas = 3, layout.ranks // layout.tensor
    norms, states = plain(nbytes, replicas, steps)
    for *found, nbytes_of_sums in run_on_ranks(_train, layout.ranks, layout, nbytes, range(steps), str(tmp_path)):
        assert found == pytest.approx(norms, rel=1e-6)
        of_one = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * FORMS[nbytes].pieces[2].nbytes
        assert nbytes_of_sums <= of_one and (layout.ranks > 1 or nbytes_of_sums == of_one)
    for name, (master, *moments, weight) in read(tmp_path).items():
        assert torch.equal(master, states[name].master), name
        for mine, theirs in zip(moments, states[name].moments, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
        assert weight.dtype == torch.bfloat16
        nearest = (master - master.to(torch.bfloat16).float()).abs()
        assert torch.equal((master - weight.float()).abs(), nearest), name


@pytest.mark.parametrize("nbytes", [18, 12])
@pytest.mark.parametrize("layout", [Layout(0, 2, host=True), Layout(3, 2, host=True)], ids=str)
def test_moments_in_host_memory_are_the_same_and_go_on_after_a_resume(
    layout: Layout, nbytes: int, tmp_path: Path
) -> None:
    half, resumed = tmp_path / "half", tmp_path / "resumed"
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2), str(half))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2, 4), str(resumed), str(half))
    _, states = plain(nbytes, layout.ranks, 4)
    for name, (master, *moments, _) in read(resumed).items():
        assert torch.equal(master, states[name].master), name
        for mine, theirs in zip(moments, states[name].moments, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


def test_sums_in_16_bits_are_rounded_at_every_addition_and_those_in_32_are_not() -> None:
    """A gradient of 1 added to 256 is nothing in bfloat16."""
    for nbytes, expected in ((16, 256.0), (10, 256.0), (12, 257.0), (18, 257.0)):
        for zero_stage in (0, 3):
            assert run_on_ranks(_summed, 1, Layout(zero_stage, 1), nbytes) == [pytest.approx(expected, rel=1e-6)]


def _summed(layout: Layout, nbytes: int) -> float:
    rank = _Rank(layout, nbytes)
    for micro, value in enumerate((256.0, 1.0)):
        given = [torch.full(shape, value, dtype=torch.bfloat16) for shape in SHAPES.values()]
        rank.optimizer.backward(rank.optimizer.forward(partial(rank.net.loss, given)), micro == 1)
    return (rank.optimizer.norm_sq() / sum(torch.Size(shape).numel() for shape in SHAPES.values())) ** 0.5


@pytest.mark.parametrize("nbytes", slow_but(FORMS, 10))
@pytest.mark.parametrize("layout", [Layout(0, 1), slow(Layout(0, 2, 2)), Layout(3, 2)], ids=str)
def test_a_resumed_run_goes_on_to_the_bit(layout: Layout, nbytes: int, tmp_path: Path) -> None:
    straight, half, resumed = (tmp_path / name for name in ("straight", "half", "resumed"))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(4), str(straight))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2), str(half))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2, 4), str(resumed), str(half))
    assert_equal(read(resumed), read(straight))


@pytest.mark.parametrize("layout", [slow(Layout(0, 1)), Layout(3, 2)], ids=str)
@pytest.mark.parametrize(("was", "now"), [(18, 12), slow(12, 18), slow(16, 10), (10, 16), slow(12, 10), slow(18, 16)])
def test_a_form_is_read_into_another(layout: Layout, was: int, now: int, tmp_path: Path) -> None:
    saved, converted = tmp_path / "saved", tmp_path / "converted"
    run_on_ranks(_train, layout.ranks, layout, was, range(3), str(saved))
    run_on_ranks(_converted, layout.ranks, layout, now, str(converted), str(saved))
    before, after = read(saved), read(converted)
    moments = getattr(torch, FORMS[now].format(MOMENTS[0]))
    for name, (master, *averages, _) in before.items():
        assert torch.equal(after[name][0], master), name  # to the bit, in every form
        for old, new in zip(averages, after[name][1:3], strict=True):
            assert new.dtype == moments and torch.equal(new, old.to(moments)), name


@pytest.mark.parametrize(("nbytes", "kind"), [(18, MASTER), (16, MASTER), (12, COMPENSATION), (10, COMPENSATION)])
def test_pieces_are_named_by_their_kinds(nbytes: int, kind: str, tmp_path: Path) -> None:
    run_on_ranks(_train, 1, Layout(0, 1), nbytes, range(1), str(tmp_path))
    kinds = {kind: FORMS[nbytes].format(kind) for kind in (kind, *MOMENTS)}
    states = ShardReader(tmp_path / "states")
    assert set(states.names) == {"step", *(f"{name}.{kind}" for name in SHAPES for kind in kinds)}
    for name in SHAPES:
        for own, format in kinds.items():
            assert states.whole(f"{name}.{own}").dtype == getattr(torch, format)


def _kept(layout: Layout, nbytes: int) -> list[int]:
    """Bytes of each parameter's states on this rank between steps, sums left out, module's weights counted."""
    rank = _Rank(layout, nbytes)
    rank.train(range(1))
    optimizer = rank.optimizer.optimizer
    seen: dict[int, int] = {}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    held = [*weights, *(v for w in weights for k, v in optimizer.state[w].items() if k != "step")]
    held += [] if isinstance(rank.optimizer, FullySharded) else list(rank.net.parameters())
    for tensor in held:
        seen[tensor.data_ptr()] = tensor.nbytes
    elements = sum(weight.numel() for weight in weights)
    return [sum(seen.values()), elements, int(isinstance(optimizer, ChunkedAdamW))]


@pytest.mark.parametrize("nbytes", FORMS)
def test_a_rank_keeps_the_forms_bytes_and_no_more(nbytes: int) -> None:
    form = FORMS[nbytes]
    sums = torch.empty(0, dtype=getattr(torch, form.format(SUM))).itemsize
    ((held, elements, narrow),) = run_on_ranks(_kept, 1, Layout(0, 1), nbytes)
    assert (held, narrow) == ((nbytes - sums) * elements, nbytes != 18)
    for held, elements, _ in run_on_ranks(_kept, 2, Layout(3, 2), nbytes):  # FSDP2 has no second copy of a weight
        assert held == (nbytes - sums - (0 if form.compensated else 2)) * elements


CPU = torch.device("cpu")
KEY = draw_key(0, "layer.weight", 1)


def drawn(shape: tuple[int, ...], key: int = KEY) -> tuple[Tensor, Tensor]:
    return draw_halves((0,) * len(shape), shape, shape, key, CPU)


def by_hand(index: int, key: int) -> tuple[int, int]:
    """The mixer in whole numbers without a bound."""
    bits = index ^ key
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    bits ^= bits >> 15
    return bits % 2**16, bits >> 16


def test_every_element_has_the_numbers_of_its_place() -> None:
    first, second = drawn((3, 5, 7))
    for index in range(3 * 5 * 7):
        assert (int(first.flatten()[index]), int(second.flatten()[index])) == by_hand(index, KEY)


def test_beyond_32_bits_of_elements_places_begin_anew() -> None:
    first, _ = draw_halves((2**16, 5), (1, 2), (2**17, 2**16), KEY, CPU)
    assert first.flatten().tolist() == [by_hand(5, KEY)[0], by_hand(6, KEY)[0]]


@pytest.mark.parametrize("block", [((0, 0), (9, 11)), ((4, 0), (5, 11)), ((2, 3), (6, 2))])
def test_a_block_has_the_numbers_of_the_whole(block: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (top, left), (rows, columns) = block
    for part, whole in zip(draw_halves((top, left), (rows, columns), (9, 11), KEY, CPU), drawn((9, 11)), strict=True):
        assert torch.equal(part, whole[top : top + rows, left : left + columns])


def test_numbers_are_even_and_independent() -> None:
    halves = [half.double() / 2**16 for half in drawn((1 << 18,))]
    for half in halves:
        counts = torch.histc(half, 64, 0, 1)
        expected = (1 << 18) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi squared of 63: above once in 10⁵
        neighbours = torch.corrcoef(torch.stack([half[:-1], half[1:]]))[0, 1]
        assert abs(float(neighbours)) < 0.01
    assert abs(float(torch.corrcoef(torch.stack(halves))[0, 1])) < 0.01


@pytest.mark.parametrize("other", [(1, "layer.weight", 1), (0, "layer.bias", 1), (0, "layer.weight", 2)])
def test_another_seed_parameter_or_step_draws_others(other: tuple[int, str, int]) -> None:
    assert draw_key(0, "layer.weight", 1) == KEY
    same = drawn((1 << 12,))[0] == drawn((1 << 12,), draw_key(*other))[0]
    assert int(same.sum()) < 10


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounded_up_as_often_as_the_distance_says(share: float, sign: float) -> None:
    values = torch.full((1 << 16,), sign * (1 + share * 2**-7))
    rounded = round_stochastically(values, drawn((1 << 16,))[0])
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.float().unique().tolist()) <= {sign, sign * (1 + 2**-7)}
    assert float((rounded.float() != sign).double().mean()) == pytest.approx(share, abs=0.01)


def _average(rounded: bool) -> float:
    """An average with beta 0.999 of squares that fell from 1 to 0, after 2000 steps, mean of many."""
    values = torch.ones(1 << 10, dtype=torch.bfloat16)
    for step in range(2000):
        wide = values.float() * 0.999
        halves = draw_halves((0,), (1 << 10,), (1 << 10,), draw_key(0, "w", step), CPU)
        values = round_stochastically(wide, halves[1]) if rounded else wide.to(torch.bfloat16)
    return float(values.float().mean())


def test_an_average_that_stands_still_when_rounded_to_nearest_falls_as_it_should() -> None:
    exact = 0.999**2000
    assert _average(rounded=False) > 0.99  # never moves
    assert _average(rounded=True) == pytest.approx(exact, rel=0.01)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def masters() -> Tensor:
    """Random bits, and both zeros, subnormal numbers, numbers between two of bfloat16 and their neighbours."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, -1 - 3 * 2**-8])
    near = torch.cat([halfway, (bits(halfway) + 1).view(torch.float32), (bits(halfway) - 1).view(torch.float32)])
    return torch.cat([drawn[drawn.abs() < 3e38], torch.tensor([0.0, -0.0, 1e-45, -1e-45]), near])


def test_both_halves_are_the_master_weight_to_the_bit() -> None:
    master = masters()
    weight, compensation = split_master(master)
    assert (weight.dtype, compensation.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits(join_master(weight, compensation)), bits(master))
    assert not torch.equal(bits(weight.float()), bits(master))  # one half alone is not


def test_the_weight_is_the_nearest_one() -> None:
    master = masters().double()
    weight, _ = split_master(master.float())
    nearest = master.float().to(torch.bfloat16)
    ours, torchs = (weight.double() - master).abs(), (nearest.double() - master).abs()
    assert torch.equal(ours, torchs)
    ties = weight != nearest  # of two equally near ones, the larger in magnitude
    assert bool((weight[ties].abs() > nearest[ties].abs()).all()) and int(ties.sum()) >= 2


def test_a_change_of_a_last_place_is_kept_where_the_weight_stays() -> None:
    master = torch.full((4,), 1.0)
    for _ in range(1000):
        weight, compensation = split_master(master)
        master = join_master(weight, compensation) + 2**-23
    assert torch.equal(master, torch.full((4,), 1 + 1000 * 2**-23))
    assert torch.equal(split_master(master)[0].float(), torch.full((4,), 1.0))


def test_a_master_weight_is_read_from_either_form() -> None:
    master = masters()
    weight, compensation = split_master(master)
    halves, whole = {"w.compensation": compensation}, {"w.master": master, "v.compensation": compensation}
    for saved in (halves, whole):
        assert torch.equal(bits(saved_master("w", weight.float(), saved, saved.__getitem__)), bits(master))
    assert saved_master("w", weight, {}, {}.__getitem__) is None  # of weights that nothing rounded


class Tied(nn.Module):
    """An embedding and a head of one weight, a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("frequencies", torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids) + self.frozen.to(self.embedding.weight))


def test_parameters_are_widened_where_they_are_and_shared_ones_stay_shared() -> None:
    module = Tied().to(torch.bfloat16)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    widen(module, torch.float32)
    for name, parameter in module.named_parameters():
        same, rounded = before[name]
        assert parameter is same and parameter.dtype == torch.float32 and torch.equal(parameter, rounded.float())
    assert module.head.weight is module.embedding.weight and module.frequencies.dtype == torch.bfloat16


def test_parameters_are_rounded_once_and_shared_ones_stay_shared() -> None:
    module = Tied()
    masters, buffer = dict(module.named_parameters()), module.frequencies
    cast_parameters(module, torch.bfloat16)
    found = dict(module.named_parameters())
    assert list(found) == list(masters)
    for name, master in masters.items():
        assert found[name] is not master and torch.equal(found[name], master.to(torch.bfloat16))
        assert found[name].requires_grad == master.requires_grad and master.dtype == torch.float32
    assert module.head.weight is module.embedding.weight
    assert module.frequencies is buffer and buffer.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_format_that_accumulates(dtype: torch.dtype, exact: torch.dtype) -> None:
    assert exact_dtype(dtype) == exact


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _tied_steps() -> tuple[list[Tensor], Tensor, bool]:
    module = Tied()
    update = Replicated(module, make_sgd, dist.group.WORLD, torch.bfloat16)
    found = []
    for step in range(2):
        ids = torch.tensor([[1, 2, 5], [0, 4, 4]][step])
        update.backward(module(ids).float().square().sum(), last=True)
        found.append(update._gradients.local()[0].clone())
        update.norm_sq()
        update.step(1e-2, 1.0)
    tied = module.head.weight is module.embedding.weight
    return (
        found,
        update._masters[0].detach(),
        tied and torch.equal(module.head.weight, update._masters[0].to(torch.bfloat16)),
    )


def test_a_tied_weight_in_bfloat16_is_updated_by_both_of_its_uses() -> None:
    """Untied, the head would go on with the weight that it was loaded with."""
    ((gradients, master, tied),) = run_on_ranks(_tied_steps, 1)
    assert tied
    module = Tied()
    for step, found in enumerate(gradients):
        rounded = module.embedding.weight.detach().to(torch.bfloat16).requires_grad_()
        ids = torch.tensor([[1, 2, 5], [0, 4, 4]][step])
        states = rounded[ids] + module.frozen.to(torch.bfloat16)
        (states @ rounded.T).float().square().sum().backward()
        torch.testing.assert_close(found, rounded.grad.float(), rtol=2e-2, atol=2e-2)
        module.embedding.weight.data -= 1e-2 * found
    torch.testing.assert_close(master, module.embedding.weight.detach(), rtol=1e-6, atol=1e-7)


class Job(NamedTuple):
    moments: list[Tensor]


def test_the_next_rows_are_asked_for_before_those_at_hand_are_updated() -> None:
    host, log = HostMoments(torch.device("cpu")), []

    def jobs() -> Iterator[Job]:
        for number in range(3):
            log.append(f"ask {number}")
            yield Job([torch.full((2,), float(number))])

    for job, rows in host.ahead(jobs()):
        log.append(f"update {int(job.moments[0][0])}")
        assert torch.equal(rows[0], job.moments[0])
    assert log == ["ask 0", "ask 1", "update 0", "ask 2", "update 1", "update 2"]
    assert list(host.ahead(iter([]))) == []


def test_rows_are_others_until_they_are_put_back() -> None:
    host = HostMoments(torch.device("cpu"))
    held = host.allocate((4,), torch.bfloat16)
    assert (held.dtype, held.device.type, int(held.count_nonzero())) == (torch.bfloat16, "cpu", 0)
    ((job, rows),) = host.ahead([Job([held[1:3]])])
    rows[0] += 1
    assert int(held.count_nonzero()) == 0
    host.put_back(job.moments, rows)
    host.settle()
    assert held.tolist() == [0.0, 1.0, 1.0, 0.0]
