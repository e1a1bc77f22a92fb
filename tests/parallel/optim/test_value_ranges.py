"""Which elements of a whole a rank holds, and matrices that are put together and taken apart."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dhp.parallel.optim.muon import WholeMatrices
from dhp.parallel.optim.value_ranges import Place, find_place
from dhp.parallel.tensor.slices import AdapterCut
from tests.helpers.ranks import run_on_ranks

WHOLE = torch.arange(8 * 6).view(8, 6)
STACK = torch.arange(4 * 6 * 5).view(4, 6, 5)


def _held(whole: Tensor, placement: Placement) -> list[bool]:
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
def test_the_place_of_a_slices_rows(whole: Tensor, placement: Placement) -> None:
    assert run_on_ranks(_held, 2, whole, placement) == [[True] * 3] * 2


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
