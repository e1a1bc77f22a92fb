"""Forms of states in every engine that holds them: what is summed, kept and saved, against one process's tensors.

Gradients are small whole numbers, whose sums are exact in 16 bits in any order: what differs to the bit is no order's.
"""

from __future__ import annotations

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
from dhp.parallel.optim.base import StageOptimizer, make_adamw, saved_master
from dhp.parallel.optim.chunked_adamw import ChunkedAdamW, make_chunked_adamw
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


@pytest.mark.parametrize("nbytes", [slow(16), 12, 10])
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


@pytest.mark.parametrize("nbytes", slow_but(FORMS, 18, 10))
@pytest.mark.parametrize("layout", [Layout(0, 1), slow(Layout(0, 2, 2)), Layout(3, 2)], ids=str)
def test_a_resumed_run_goes_on_to_the_bit(layout: Layout, nbytes: int, tmp_path: Path) -> None:
    straight, half, resumed = (tmp_path / name for name in ("straight", "half", "resumed"))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(4), str(straight))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2), str(half))
    run_on_ranks(_train, layout.ranks, layout, nbytes, range(2, 4), str(resumed), str(half))
    assert_equal(read(resumed), read(straight))


@pytest.mark.parametrize("layout", [slow(Layout(0, 1)), Layout(3, 2)], ids=str)
@pytest.mark.parametrize(("was", "now"), [(18, 12), (12, 18), (16, 10), (10, 16), (12, 10), (18, 16)])
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
