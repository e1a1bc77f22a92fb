"""torch's FSDP2, places of states and buckets."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as PlacementOfPlacementTypes
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.graph import StageSpec
from dhp.core.torch_private import MeshPlacement, ShardingMesh
from dhp.models.shape import PartShape
from dhp.parallel.optim.fsdp import FullySharded
from dhp.parallel.optim.muon import WholeMatrices
from dhp.parallel.optim.replicated import Gradients, cut_into_buckets
from dhp.parallel.optim.value_ranges import Place, find_place, held_blocks, shard_rows
from dhp.parallel.tensor.slices import AdapterCut
from dhp.plan.count.state_bytes import rank_bytes
from tests.helpers.ranks import run_on_ranks
from tests.parallel.conftest import RunOnRanks


def _blocks(shape: tuple[int, ...], placement: Placement) -> dict[tuple[int, ...], Tensor]:
    """What this rank of data × tensor holds of arange, by where it begins in the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    own = distribute_tensor(whole, mesh["tensor"], [placement]).to_local()
    rows = shard_rows(own.shape, mesh["data"])
    held = own[rows.start : rows.stop]
    cut = AdapterCut(mesh["tensor"], (placement,), whole.shape)
    return {b.offset: held[b.here] for b in held_blocks(rows, own.shape, cut)}


@pytest.mark.parametrize(
    ("shape", "placement"),
    [
        ((8, 6), Shard(0)),
        ((7, 6), Shard(0)),  # uneven over tensor ranks, and again over replicas
        ((5, 8), Shard(1)),
        ((12, 4), _StridedShard(0, split_factor=3)),
        ((18,), _StridedShard(0, split_factor=3)),
        ((3, 8, 2), _StridedShard(1, split_factor=2)),  # as experts' gates and values
        ((1, 4), Shard(1)),  # no row is left for the second replica
    ],
)
def test_blocks_of_all_ranks_are_the_whole(shape: tuple[int, ...], placement: Placement, on_ranks: RunOnRanks) -> None:
    whole = torch.full(shape, -1)
    for of_rank in on_ranks(_blocks, 4, shape, placement):
        for offset, values in of_rank.items():
            block = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert bool((whole[block] == -1).all())
            whole[block] = values
    assert torch.equal(whole, torch.arange(whole.numel()).view(shape))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)

    def states(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _update(stage: int, dtype: torch.dtype = torch.float32) -> tuple[_Net, FullySharded]:
    net, mesh = _Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    made = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    return net, FullySharded(net, list(net.layers), made, mesh, 0, stage, dtype)


def _masters() -> list[tuple[torch.dtype, float]]:
    """Of a module that comes in 16 bits: the format of each master weight, and how far it is from what came."""
    net, mesh = _Net().to(torch.bfloat16), init_device_mesh("cpu", (dist.get_world_size(),))
    came = {name: parameter.detach().float() for name, parameter in net.named_parameters()}
    made = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    update = FullySharded(net, list(net.layers), made, mesh, 0, 3, torch.bfloat16)
    (loss := update.forward(lambda: net.head(net.states(torch.ones(1, 4).bfloat16())).float().sum())).backward()
    assert loss.isfinite()
    whole = {shard.name: shard.parameter.full_tensor() for shard in update._shards}
    return [(shard.weight.dtype, float((whole[shard.name] - came[shard.name]).abs().max())) for shard in update._shards]


def test_what_comes_in_16_bits_is_widened_before_it_is_cut(on_ranks: RunOnRanks) -> None:
    for of_rank in on_ranks(_masters, 2):
        assert of_rank == [(torch.float32, 0.0)] * 5


def _frozen(dtype: torch.dtype) -> tuple[int, int, bool]:
    """Of a module with a frozen layer, after a step: bytes of weights and moments on this rank, as counted and as a dry
    run says of two ranks, and whether the frozen weights are the rounded ones, to the bit."""
    net, mesh = _Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    net.layers[0].requires_grad_(False)
    sizes = [(one.numel(), one.requires_grad) for one in net.parameters()]
    came = {f"layers.0.{name}": one.detach().to(dtype) for name, one in net.layers[0].named_parameters()}
    update = FullySharded(net, list(net.layers), lambda own: torch.optim.AdamW(own), mesh, 0, 3, dtype)
    update.backward(update.forward(lambda: net.head(net.states(torch.ones(1, 4, dtype=dtype))).sum()), last=True)
    update.norm_sq()
    update.step(1e-2, 1.0)
    moments = (m for own in update.optimizer.state.values() for n, m in own.items() if n != "step")
    counted = sum(one.nbytes for one in (*(shard.weight for shard in update._shards), *moments))
    total, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
    name, world = str(dtype).removeprefix("torch."), Degrees(data=2)
    part = PartConfig(num_actors=2, tensor=1, dtype=name, zero_stage=3, zero_engine="fsdp")
    stage = StageSpec("text", "text", (range(2),), world, True, range(2))
    said = rank_bytes(part, stage, PartShape(total, total, total, trained))
    whole = {shard.name: shard.parameter.full_tensor() for shard in update._shards}
    return counted, said.weights + said.optimizer, all(torch.equal(whole[name], own) for name, own in came.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_frozen_weights_are_kept_as_the_module_computes_and_counted(dtype: torch.dtype, on_ranks: RunOnRanks) -> None:
    found = on_ranks(_frozen, 2, dtype)
    assert sum(counted for counted, _, _ in found) == sum(said for _, said, _ in found)
    assert all(same for _, _, same in found)


def _divided() -> tuple[float, float]:
    """A gradient of ones on each of two ranks: as FSDP leaves it by itself, and as the adapter does."""
    mesh, alone = init_device_mesh("cpu", (2,)), nn.Linear(4, 4, bias=False)
    fully_shard(alone, mesh=mesh)
    alone(torch.ones(1, 4)).sum().backward()
    net, update = _update(3)
    update.backward(update.forward(lambda: net.head(torch.ones(1, 4)).sum()), last=True)
    update._take_sums()
    own = next(s for s in update._trained if s.name == "head.weight").weight.grad
    return float(alone.weight.grad.to_local().max()), float(own.max())


def test_gradients_are_divided_unless_told_otherwise(on_ranks: RunOnRanks) -> None:
    assert on_ranks(_divided, 2) == [(1.0, 2.0)] * 2


def _two_meshes() -> list[tuple[tuple[int, ...], float]]:
    """What a rank holds of parameters of one unit, cut over four ranks and over two, and their summed gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    net = nn.Linear(4, 4)
    copies = ShardingMesh(mesh["copies"], shard_mesh_dim=0)
    place = lambda parameter: MeshPlacement(Shard(0), copies) if parameter.dim() == 1 else None
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=place)
    net.set_gradient_divide_factor(1.0)
    net.set_force_sum_reduction_for_comms(True)
    (net(torch.ones(1, 4)) * (1 + dist.get_rank())).sum().backward()
    held = (net.weight, net.bias)
    return [(tuple(one.to_local().shape), float(one.grad.to_local().max())) for one in held]


def test_parameters_of_a_unit_may_be_cut_over_other_ranks(on_ranks: RunOnRanks) -> None:
    even, odd = ([((1, 4), 10.0), ((2,), total)] for total in (1.0 + 3, 2.0 + 4))
    assert on_ranks(_two_meshes, 4) == [even, odd, even, odd]


def _outside_of_the_roots_forward() -> str:
    net, update = _update(3)
    try:
        (net.states(torch.ones(1, 4)) @ net.head.weight.T).sum()
    except Exception as error:
        return type(error).__name__
    return ""


def test_weights_are_whole_in_the_roots_forward_alone(on_ranks: RunOnRanks) -> None:
    assert all(on_ranks(_outside_of_the_roots_forward, 2))
    assert on_ranks(_inside_of_the_roots_forward, 2) == [(3, 4)] * 2


def _inside_of_the_roots_forward() -> tuple[int, ...]:
    net, update = _update(3)
    found: list[Any] = []

    def compute() -> Tensor:
        found.append(tuple(net.head.weight.shape))
        return (net.states(torch.ones(1, 4)) @ net.head.weight.T).sum()

    update.backward(update.forward(compute), last=True)
    return found[0]


def _same_memory(stage: int) -> list[bool]:
    """Whether after each of three steps the optimizer's weights are FSDP's, and the module computes with them."""
    net, update = _update(stage)
    found = []
    for _ in range(3):
        compute = lambda: net.head(net.states(torch.ones(1, 4))).square().sum()
        loss = update.forward(compute)
        update.backward(loss, last=True)
        norm_sq = update.norm_sq()
        update.step(1e-2, 1.0)
        moved = abs(float(update.forward(compute).detach()) - float(loss.detach())) > 1e-6
        update.drop()
        aliased = all(s.weight.data_ptr() == s.parameter.to_local().data_ptr() for s in update._trained)
        found.append(aliased and moved and norm_sq > 0)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizers_weights_are_those_that_are_gathered(stage: int, on_ranks: RunOnRanks) -> None:
    assert on_ranks(_same_memory, 2, stage) == [[True] * 3] * 2


def _held(stage: int) -> tuple[int, int]:
    """Bytes of the layers' weights on this rank between forward and backward, and after the step."""
    net, update = _update(stage)
    loss = update.forward(lambda: net.head(net.states(torch.ones(1, 4))).sum())
    count = lambda: sum(getattr(p, "_local_tensor", p).nbytes for layer in net.layers for p in layer.parameters())
    between = count()
    update.backward(loss, last=True)
    update.norm_sq()
    update.step(1e-2, 1.0)
    return between, count()


def test_stage_2_keeps_gathered_weights_until_the_step_and_stage_3_does_not(on_ranks: RunOnRanks) -> None:
    whole = 2 * 4 * (4 * 4 + 4)
    assert on_ranks(_held, 2, 2) == [(whole, whole // 2)] * 2
    assert on_ranks(_held, 2, 3) == [(whole // 2, whole // 2)] * 2


WHOLE = torch.arange(8 * 6).view(8, 6)
STACK = torch.arange(4 * 6 * 5).view(4, 6, 5)


def _held_by(whole: Tensor, placement: PlacementOfPlacementTypes) -> list[bool]:
    """Whether places of rows of this rank's slice say which they are: all of them, some, none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    slice_of = distribute_tensor(whole, mesh, [placement]).to_local()
    found = []
    for rows in (range(len(slice_of)), range(1, 3), range(2, 2)):
        place = find_place(rows, slice_of.shape, AdapterCut(mesh, (placement,), whole.shape))
        held = slice_of[rows.start : rows.stop]
        same = torch.equal(whole[place.numbers], held)
        found.append(same and place.shape == tuple(held.shape) and place.count == held.numel())
    return found


@pytest.mark.parametrize(
    ("whole", "placement"),
    [
        (WHOLE, Shard(0)),
        (WHOLE, Shard(1)),
        (WHOLE, _StridedShard(0, split_factor=2)),
        (STACK, _StridedShard(1, split_factor=3)),  # experts' gate and up
        (STACK, Shard(2)),
    ],
    ids=["rows", "columns", "fused", "fused experts", "columns of experts"],
)
def test_the_place_of_a_slices_rows(whole: Tensor, placement: PlacementOfPlacementTypes) -> None:
    assert run_on_ranks(_held_by, 2, whole, placement) == [[True] * 3] * 2


EXPERTS = torch.arange(4 * 8 * 2).view(4, 8, 2)


def _held_of_shares(placement: PlacementOfPlacementTypes) -> tuple[bool, list[tuple[tuple[int, ...], Tensor]]]:
    """Of experts that replicas share out and tensor ranks cut: whether the place of this rank's rows says which they
    are, and its blocks by where they begin."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "experts", "tensor"))
    cut = AdapterCut(mesh["experts", "tensor"], (Shard(0), placement), EXPERTS.shape)
    share = distribute_tensor(EXPERTS, mesh["experts"], [Shard(0)]).to_local()
    slice_of = distribute_tensor(share, mesh["tensor"], [placement]).to_local()
    rows = shard_rows(slice_of.shape, mesh["copies"])
    held = slice_of[rows.start : rows.stop]
    first, *others = find_place(rows, slice_of.shape, cut).numbers
    assert isinstance(first, slice)
    same = torch.equal(EXPERTS[first][:, *others], held)
    return same, [(block.offset, held[block.here]) for block in held_blocks(rows, slice_of.shape, cut)]


@pytest.mark.parametrize("placement", [_StridedShard(1, split_factor=2), Shard(2)], ids=["gate and up", "down"])
def test_slices_of_shares_of_experts_have_their_places(placement: PlacementOfPlacementTypes) -> None:
    whole = torch.full(EXPERTS.shape, -1)
    for same, blocks in run_on_ranks(_held_of_shares, 8, placement):
        assert same
        for offset, values in blocks:
            block = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert bool((whole[block] == -1).all())
            whole[block] = values
    assert torch.equal(whole, EXPERTS)


def test_a_range_is_one_and_gaps_are_numbers() -> None:
    place = find_place(range(1, 4), torch.Size((5, 2)), None)
    assert place == Place((5, 2), (slice(1, 4), slice(0, 2)))
    assert place.of(1) == Place((2,), (slice(0, 2),)) and place.shape == (3, 2)
    gaps = Place((5, 2), (torch.tensor([0, 3]), slice(0, 2)))
    assert gaps.shape == (2, 2) and gaps.count == 4


def _flipped() -> list[bool]:
    """Whether the parts of flipped matrices are right; rank r of three has rows r and r + 3 of each but the last."""
    own = dist.get_rank()
    places = [Place((6, 2), (torch.tensor([own, own + 3]), slice(0, 2))) for _ in range(4)]
    places.append(Place((3, 4), (slice(own, own + 1), slice(0, 4))))
    wholes = [torch.arange(12.0).view(place.whole) + 100 * number for number, place in enumerate(places)]
    part = lambda number: wholes[number][places[number].numbers]
    made = WholeMatrices(places, dist.group.WORLD).changed(part, lambda whole: whole.flip(0), torch.empty(0))
    found = dict(made)
    return [torch.equal(found[n], wholes[n].flip(0)[place.numbers]) for n, place in enumerate(places)]


def test_matrices_are_changed_whole_and_come_back_in_parts() -> None:
    """More of them than ranks, the last round not full."""
    assert run_on_ranks(_flipped, 3) == [[True] * 5] * 3


def test_a_bucket_has_one_kind_of_sum_and_comes_where_its_last_member_does() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(9)]
    over: Any = "tensor ranks"
    copies: Any = "ranks with the same experts"
    partial = {id(parameters[8]): over}
    others = {id(parameters[number]): copies for number in (1, 4, 5, 7)}
    buckets = cut_into_buckets(parameters, torch.float32, partial, others, 12)  # three values
    # Backward comes by from the last one on; what is summed over further ranks waits for all others.
    assert [bucket.members for bucket in buckets] == [[7, 5, 4], [6, 3, 2], [1], [0], [8]]
    assert [bucket.group for bucket in buckets] == [copies, None, copies, None, None]
    assert [bucket.over for bucket in buckets] == [None, None, None, None, over]
    ends = {id(parameters[number]): copies for number in (0, 4)}  # a bucket that begins first and is full last
    buckets = cut_into_buckets(parameters[:5], torch.float32, {}, ends, 12)
    assert [bucket.members for bucket in buckets] == [[3, 2, 1], [4, 0]]


def _sums() -> list[list[float]]:
    """Gradients of two micro-batches on each of two ranks, of a weight of both, of one of them, and of none."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, second, _ = parameters
    held = Gradients(parameters, torch.float32, dist.group.WORLD, {})
    found = []
    for _ in range(2):  # memory that was freed in between may hold anything
        held.backward((first * (dist.get_rank() + 1)).sum(), last=False)
        held.backward((first * 3 + second * 5).sum(), last=True)
        found.append([gradient.sum().item() for gradient in held.local()])
        for gradient in held.local():
            gradient.fill_(float("nan"))
        held.drop()
    return found


def test_a_sum_begins_with_the_first_gradient_and_is_zero_where_none_came() -> None:
    assert run_on_ranks(_sums, 2) == [[[18.0, 20.0, 0.0]] * 2] * 2
