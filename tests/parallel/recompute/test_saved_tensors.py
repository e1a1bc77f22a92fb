"""Bytes that autograd keeps, against sizes worked out by hand. Float32: 4 bytes a value."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dhp.parallel.recompute.saved_tensors import SavedTensors, noting, top_hooks

ROWS = 10


class Squares(nn.Module):
    """Two layers of 8 × 8 and an activation between them: saves its input, what ReLU gives, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        return self.second(self.first(states).relu())  # ReLU saves its result, which the second layer saves too


class Noted(Squares):
    def forward(self, states: Tensor) -> Tensor:
        with noting():
            return super().forward(states)


EACH = ROWS * 8 * 4  # bytes of one tensor between two layers


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    model = Squares()
    saved = SavedTensors(model)
    with saved.counting():
        output = model(torch.randn(ROWS, 8))
    assert saved.bytes == saved.peak == 2 * EACH
    del output
    assert saved.bytes == 0 and saved.peak == 2 * EACH


def test_what_takes_the_place_of_a_parameters_old_memory_counts() -> None:
    """ZeRO's stage 3 gives parameters other memory inside of a forward pass."""
    model = Squares()
    whole = [p.data for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    saved = SavedTensors(model)
    with saved.counting():
        for parameter, data in zip(model.parameters(), whole, strict=True):
            parameter.data = data
        states = torch.randn(ROWS, 8)
        several = [model(states) for _ in range(4)]
    assert saved.bytes == EACH + 4 * EACH
    del several, states
    assert saved.bytes == 0


def test_views_keep_their_whole_storage_once() -> None:
    saved = SavedTensors(nn.Module())
    fused = torch.randn(ROWS, 3 * 8, requires_grad=True)
    with saved.counting():
        states = fused * 2.0  # saves nothing: the factor is a number
        query, key, value = states.split(8, dim=1)
        product = (query * key).sum() + value.square().sum()
    assert saved.bytes == 3 * EACH
    del states, query, key, value
    assert saved.bytes == 3 * EACH
    del product
    assert saved.bytes == 0


def test_buffers_do_not_count_and_integers_do() -> None:
    model = nn.Embedding(5, 8)
    model.register_buffer("scale", torch.randn(8))
    saved = SavedTensors(model)
    indices = torch.tensor([1, 2, 3])
    with saved.counting():
        output = model(indices) * model.scale
    assert saved.bytes == 3 * 8  # the indices, 8 bytes each
    del output, indices
    assert saved.bytes == 0


def test_backward_frees_what_it_has_used() -> None:
    model = Squares()
    saved = SavedTensors(model)
    with saved.counting():
        loss = model(torch.randn(ROWS, 8)).square().sum()
        assert saved.bytes == 3 * EACH
        loss.backward()
    assert saved.bytes == 0
    assert saved.take_peak() == 3 * EACH
    assert saved.take_peak() == 0


def test_a_peak_is_no_sum() -> None:
    model = Squares()
    saved = SavedTensors(model)
    for _ in range(3):
        with saved.counting():
            model(torch.randn(ROWS, 8)).sum().backward()
    assert saved.peak == 2 * EACH


def test_checkpointed_layers_keep_inputs_and_what_is_recomputed_counts_while_it_lives() -> None:
    layers = nn.Sequential(*(Noted() for _ in range(3)))
    saved = SavedTensors(layers)
    states = torch.randn(ROWS, 8)
    with saved.counting():
        for layer in layers:
            states = checkpoint(layer, states, use_reentrant=False)
        loss = states.sum()
        del states
        assert saved.bytes == 3 * EACH  # the three inputs
        loss.backward()
    assert saved.peak == 4 * EACH  # beside the input of the last layer, which is there, its ReLU
    assert saved.bytes == 0


def test_without_noting_what_is_recomputed_would_be_missed() -> None:
    layer = Squares()
    saved = SavedTensors(layer)
    with saved.counting():
        checkpoint(layer, torch.randn(ROWS, 8), use_reentrant=False).sum().backward()
    assert saved.peak == EACH


def test_gradients_are_the_same_with_counting() -> None:
    model, states = Squares(), torch.randn(ROWS, 8)
    model(states).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with SavedTensors(model).counting():
        model(states).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


def test_an_output_that_its_own_function_saves_does_not_stay_forever() -> None:
    saved = SavedTensors(nn.Module())
    gc.disable()
    try:
        for _ in range(3):
            with saved.counting():
                F.softmax(torch.randn(ROWS, 8, requires_grad=True), dim=-1).sum()
            assert saved.bytes == 0
    finally:
        gc.enable()


def test_attention_keeps_its_inputs_its_output_and_a_number_a_row() -> None:
    saved = SavedTensors(nn.Module())
    query, key, value = (torch.randn(1, 2, ROWS, 8, requires_grad=True) for _ in range(3))
    with saved.counting():
        output = F.scaled_dot_product_attention(query, key, value)
    assert saved.bytes == 4 * 2 * EACH + 2 * ROWS * 4
    del output


def test_torch_still_tells_the_hooks_in_force() -> None:
    assert top_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda t: t[0]):
        pack, unpack = top_hooks()
        assert unpack(pack(torch.ones(1))) == 1
