"""Dropout of an adapter's input is torch's, but for what decides which elements are dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.errors import ConfigError
from dhp.models.lora import TokenDropout

KEYS = TokenKeys(keys_of([(5, 0, 200), (6, 0, 200)]))


def test_it_is_torchs_dropout_of_the_elements_that_it_draws() -> None:
    """Zeros, the others scaled so that the mean stays, and the gradient likewise."""
    states = torch.randn(2, 200, 64, dtype=torch.float64, requires_grad=True)
    module = TokenDropout(0.25, "a")
    with drawing(KEYS):
        output = module(states)
    kept = output != 0
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(output, states * kept / 0.75, rtol=1e-15, atol=0)
    gradient = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, states, gradient)
    torch.testing.assert_close(found, gradient * kept / 0.75, rtol=1e-15, atol=0)
    torchs = nn.Dropout(0.25)(torch.ones(1, dtype=torch.float64).expand(1000))
    assert torchs.unique().tolist() == [0, 1 / 0.75] == module_values(module)


def module_values(module: TokenDropout) -> list[float]:
    with drawing(KEYS):
        return module(torch.ones(400, 16, dtype=torch.float64)).unique().tolist()


def test_a_slice_of_columns_drops_what_the_whole_does() -> None:
    states, whole = torch.ones(400, 48), TokenDropout(0.5, "a")
    part, unmoved = TokenDropout(0.5, "a"), TokenDropout(0.5, "a")
    part.first_column = 32
    with drawing(KEYS):
        wanted = whole(states)[:, 32:]
        assert torch.equal(part(states[:, 32:]), wanted)
        assert not torch.equal(unmoved(states[:, 32:]), wanted)
        assert not torch.equal(TokenDropout(0.5, "b")(states), whole(states))


def test_neither_evaluation_nor_its_memory_draws() -> None:
    states, module = torch.ones(3, 8), TokenDropout(0.5, "a")
    assert module(states.to("meta")).shape == states.shape
    with drawing(KEYS), pytest.raises(ConfigError, match="is given 3 rows"):  # which shapes alone show
        module(states.to("meta"))
    assert module.eval()(states) is states


def test_tokens_that_are_not_known_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"of which nothing is known.*dhp\.core\.draws\.drawing"):
        TokenDropout(0.5, "a")(torch.ones(3, 8))
    with (
        drawing(KEYS),
        pytest.raises(
            ConfigError,
            match=r"lora\.dropout=0\.5 of a: it is given 3 rows where the part has 400 tokens.*lora\.dropout=0$",
        ),
    ):
        TokenDropout(0.5, "a")(torch.ones(3, 8))


def test_it_makes_no_copy_of_what_it_keeps_for_backward() -> None:
    """A byte an element, as torch's: whose mask it is."""
    saved: list[torch.Tensor] = []
    states = torch.ones(400, 64, requires_grad=True)
    with drawing(KEYS), torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one), lambda one: one):
        TokenDropout(0.5, "a")(states)
    assert sum(one.nbytes for one in saved) == states.numel()
