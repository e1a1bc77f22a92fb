"""A master weight as two halves, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp.parallel.optim.base import join_master, saved_master, split_master


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
