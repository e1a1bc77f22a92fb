"""AdamW of states in 16 bits against one that has whole tensors and no chunks, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dhp.core.parameters import COMPENSATION, FORMS, MOMENTS, SUM, ParameterGroup
from dhp.parallel.optim import chunked_adamw
from dhp.parallel.optim.base import clipped_step, join_master
from dhp.parallel.optim.chunked_adamw import ChunkedAdamW, ChunkExtent, make_chunked_adamw
from dhp.parallel.optim.value_ranges import HeldBlock
from tests.parallel.optim.plain_states import PlainStates

STEPS, NAME, DECAY, BETAS, EPS, SEED = 5, "layer.weight", 0.1, (0.9, 0.999), 1e-8, 3
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


def plain(form: int, shape: tuple[int, ...], coefficient: float) -> list[Tensor]:
    states = PlainStates(NAME, start(shape), FORMS[form], SEED)
    for step in range(STEPS):
        rounded = gradient(step, shape).to(getattr(torch, FORMS[form].format(SUM)))
        states.step(rounded.float() * coefficient, 1e-2 / (step + 1), DECAY, BETAS, EPS)
    return [states.master, *states.moments]


def train(weight: nn.Parameter, optimizer: ChunkedAdamW, form: int, rows: slice, coefficient: float) -> None:
    for step in range(STEPS):
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
    for found, expected in zip(states_of(weight, optimizer), plain(form, shape, coefficient), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("form", NARROW)
def test_rows_of_a_rank_are_those_of_the_whole(form: int) -> None:
    expected = plain(form, (9, 5), 1.0)
    for rows in (slice(0, 4), slice(4, 9), slice(9, 9)):
        weight, optimizer = held(start((9, 5))[rows], form)
        optimizer.extents[weight] = ChunkExtent(
            (9, 5), [HeldBlock((slice(0, rows.stop - rows.start), slice(0, 5)), (rows.start, 0))]
        )
        train(weight, optimizer, form, rows, 1.0)
        for found, whole in zip(states_of(weight, optimizer), expected, strict=True):
            assert torch.equal(found, whole[rows])


def test_rows_drawn_as_if_they_were_the_first_ones_are_other_rows() -> None:
    expected, rows = plain(12, (9, 5), 1.0), slice(4, 9)
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
    for step in range(STEPS):
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
