"""Bytes of a rank by hand: states by ZeRO stage, engine and form, what is frozen, what is gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.config.schema import LoraConfig, PartConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError
from dhp.core.graph import StageSpec
from dhp.models.shape import HeldParameter, PartShape, sum_shape
from dhp.plan.count.state_bytes import (
    RankBytes,
    Units,
    by_zero_stage,
    copied_bytes,
    gathered_moments,
    rank_bytes,
    runtime_bytes,
    stage_units,
)


def spec(**degrees: int) -> StageSpec:
    split = Degrees(**degrees)
    return StageSpec("text", "text", (range(4),), split, True, range(split.world))


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        ("float32", 0, (400, 400, 800)),
        ("float32", 1, (400, 400, 300)),
        ("float32", 2, (400, 100, 300)),
        ("float32", 3, (100, 100, 300)),  # DeepSpeed's optimizer updates a copy of the share
        ("bfloat16", 0, (200, 400, 1200)),
        ("bfloat16", 1, (200, 400, 300)),
        ("bfloat16", 2, (200, 100, 300)),
        ("bfloat16", 3, (50, 100, 300)),
    ],
)
def test_what_each_zero_stage_cuts(dtype: str, stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=stage)
    assert rank_bytes(part, spec(data=4), PartShape(100, 100, 100)) == RankBytes(*expected)


def test_torch_keeps_a_share_of_the_weights_in_the_optimizers_format_alone() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    assert rank_bytes(part, spec(data=4, tensor=2), PartShape(200, 100, 0)) == RankBytes(
        0, 100, 300
    )  # 16 bytes of each of 25 elements
    whole = gathered_moments(part, PartShape(200, 100, 0), Units(10), 4)
    # Two layers' weights, a layer's gradients, and what is sent of them and comes of them, twice a quarter.
    assert whole.most == 2 * 10 * 2 + 10 * 2 + 10 * 4 + 2 * 10 * 4 / 4


def test_a_stage_has_the_ends_of_its_part_where_it_has_their_layers() -> None:
    parameters = (7, 10, 20, 30, 5)  # before three layers, of each, and behind them
    assert stage_units(parameters, range(3)) == Units(30, 12, 5)
    assert stage_units(parameters, [0, 1]) == Units(20, 7, 0)
    assert stage_units(parameters, [1]) == Units(20, 0, 0) and stage_units(parameters, [2]) == Units(30, 5, 5)


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "expected"),
    [
        ("bfloat16", 2, (200 + 40, 20, 60)),  # of 25 elements, of which 5 are trained: 20 in 2 bytes beside the whole
        ("bfloat16", 3, (40, 20, 60)),
        ("float32", 3, (80, 20, 60)),
    ],
)
def test_torch_keeps_shards_of_frozen_weights_too(dtype: str, zero_stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=zero_stage, zero_engine="fsdp")
    assert rank_bytes(part, spec(data=4), PartShape(100, 100, 100, trained=20)) == RankBytes(*expected)


@pytest.mark.parametrize(
    ("nbytes", "zero_stage", "expected"),
    [
        (18, 0, (200, 400, 1200)),
        (16, 0, (200, 200, 1200)),
        (12, 0, (200, 400, 600)),  # compensation and two moments, 2 bytes each
        (10, 0, (200, 200, 600)),
        (16, 2, (200, 50, 300)),  # of 25 elements: sums, master weight, moments
        (12, 2, (200, 100, 200)),
        (16, 3, (0, 50, 300)),  # FSDP2 gathers the optimizer's copy
        (12, 3, (0, 100, 200)),
        (10, 3, (0, 50, 200)),
    ],
)
def test_what_each_form_of_states_takes(nbytes: int, zero_stage: int, expected: tuple[int, int, int]) -> None:
    part = PartConfig(
        num_actors=4, tensor=1, dtype="bfloat16", zero_stage=zero_stage, zero_engine="fsdp", state_bytes=nbytes
    )
    held = rank_bytes(part, spec(data=4), PartShape(100, 100, 100))
    assert held == RankBytes(*expected)
    assert zero_stage or held.total == 100 * nbytes
    assert by_zero_stage(replace(part, data=4), spec(data=4), PartShape(100, 100, 100))[zero_stage] == sum(expected)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "expected"),
    [(18, "bfloat16", (0, 100, 100, 200)), (12, "bfloat16", (0, 100, 100, 100)), (18, "float32", (0, 100, 100, 200))],
)
def test_moments_in_host_memory_are_not_the_devices(
    nbytes: int, dtype: str, expected: tuple[int, int, int, int]
) -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype=dtype, zero_stage=3, zero_engine="fsdp", state_bytes=nbytes)
    held = rank_bytes(replace(part, host_moments=True), spec(data=4), PartShape(100, 100, 100))
    assert held == RankBytes(*expected)
    assert held.total + held.host == rank_bytes(part, spec(data=4), PartShape(100, 100, 100)).total


def test_sums_in_16_bits_are_sent_so() -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype="bfloat16", zero_stage=3, zero_engine="fsdp")
    shape = PartShape(100, 100, 100)
    moments = [gathered_moments(replace(part, state_bytes=own), shape, Units(10), 4) for own in (18, 16, 12, 10)]
    assert [one.most for one in moments] == [2 * 10 * 2 + 10 * 2 + 1.5 * 10 * each for each in (4, 2, 4, 2)]


def test_matrices_in_four_bits_take_a_quarter_and_no_zero_stage_cuts_them() -> None:
    part = PartConfig(num_actors=4, tensor=1, dtype="bfloat16", lora=LoraConfig(rank=8, quantization="nf4"))
    shape = PartShape(1 << 16, 1 << 16, 1 << 16, trained=0, quantized=1 << 15)
    # Four bits a value, 8 for each block of 64 values, 32 for 256 of these.
    weights = 2 * (1 << 15) + (1 << 14) + (1 << 9) + 4 * 2
    assert rank_bytes(part, spec(data=4), shape) == RankBytes(weights, 0, 0)
    assert by_zero_stage(part, spec(data=4), shape) == {0: weights, 1: None, 2: None, 3: None}


def test_every_stage_is_told_and_stage_1_of_slices_has_no_engine() -> None:
    part = PartConfig(num_actors=8, tensor=2, data=4, ulysses=1, ring=1, dtype="bfloat16", zero_stage=3)
    split = spec(data=4, tensor=2)
    assert by_zero_stage(part, split, PartShape(200, 100, 0)) == {0: 1800, 1: None, 2: 600, 3: 400}
    assert runtime_bytes(split) > runtime_bytes(spec())


def test_what_is_not_trained_keeps_its_weights_alone() -> None:
    part = PartConfig(num_actors=1, tensor=1, dtype="bfloat16")
    assert rank_bytes(part, spec(), PartShape(100, 100, 100, trained=10)) == RankBytes(200, 40, 120)
    frozen = replace(spec(), trains=False)
    assert rank_bytes(part, frozen, PartShape(100, 100, 100)) == RankBytes(200, 0, 0)
    assert by_zero_stage(part, frozen, PartShape(100, 100, 100)) == {0: 200, 1: None, 2: None, 3: None}


def test_a_float64_value_takes_eight_bytes_and_an_unknown_format_is_refused() -> None:
    part = PartConfig(num_actors=1, tensor=1, dtype="float64")
    assert rank_bytes(part, spec(), PartShape(10, 10, 10)) == RankBytes(80, 80, 160)
    with pytest.raises(ConfigError, match="dtype=int3"):
        rank_bytes(PartConfig(dtype="int3"), spec(), PartShape(10, 10, 10))


def test_states_of_other_optimizers() -> None:
    """Half of the parameters with one average of each instead of two."""
    part, shape = PartConfig(dtype="bfloat16", zero_engine="fsdp", tensor=1), PartShape(100, 100, 100, states=1.5)
    assert rank_bytes(part, spec(), shape) == RankBytes(200, 400, 1000)
    assert rank_bytes(replace(part, zero_stage=3), spec(data=4), shape) == RankBytes(0, 100, 250)
    assert by_zero_stage(part, spec(data=4), shape)[1] is None  # torch's engine alone holds them
    assert copied_bytes(part, spec(), shape) == 200 + 1000


def test_numbers_that_each_optimizer_keeps() -> None:
    matrix = HeldParameter(("a",), 100, 50, True, True, False, (10, 10), True)
    other = HeldParameter(("b",), 30, 30, False, True, False, (3, 10))
    frozen = HeldParameter(("c",), 20, 20, False, False, False, (2, 10), True)
    assert sum_shape([matrix, other, frozen], True) == PartShape(150, 100, 50, 80, small=100)
    assert sum_shape([matrix, other, frozen], True, "muon") == PartShape(
        150, 100, 50, 80, states=110 / 80, orthogonalizing=15_000.0, small=100
    )
    factors = PartShape(150, 100, 50, 80, states=0.0, factors=20 + 13, small=100)
    assert sum_shape([matrix, other, frozen], True, "adafactor") == factors
    large = HeldParameter(("d",), 10**5 + 1, 10**5 + 1, False, True, False, (10**5 + 1,))
    assert sum_shape([large], False).small == 0
    vector = HeldParameter(("d",), 8, 8, False, True, False, (8,))
    assert sum_shape([vector], False, "adafactor") == PartShape(8, 8, 8, states=1.0, small=8)
    cut = rank_bytes(PartConfig(zero_engine="fsdp", zero_stage=3), spec(data=4), factors)
    assert cut == RankBytes(20, 80, 80 + 33 * 4)  # 5 frozen weights; the factors are whole on every rank
    assert sum_shape([frozen], True, "muon") == PartShape(20, 20, 20, 0, small=20)
