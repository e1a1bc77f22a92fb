"""What crosses from an encoder to a decoder, there and back."""

from __future__ import annotations

import torch

from dhp.models.contract.contract import Handover


def test_lists_and_levels_are_rows_by_name() -> None:
    first, second = torch.randn(2, 4), torch.randn(3, 4)
    deep = [(torch.randn(2, 4), torch.randn(3, 4)) for _ in range(2)]
    handover = Handover(more=(("deep", 2),))
    rows = handover.take({"pooler_output": (first, second), "deep": deep})
    assert list(rows) == ["embeddings", "deep.0", "deep.1"] == list(handover.names)
    assert torch.equal(rows["embeddings"], torch.cat([first, second]))
    assert torch.equal(rows["deep.1"], torch.cat(deep[1]))
    given = handover.give(rows)
    assert torch.equal(given.pooler_output[0], rows["embeddings"])
    assert [torch.equal(level[0], rows[f"deep.{n}"]) for n, level in enumerate(given["deep"])] == [True, True]
    assert given.read == ["pooler_output", "deep"] and not hasattr(given, "last_hidden_state")


def test_one_tensor_stays_one() -> None:
    rows = Handover(listed=False).take({"pooler_output": torch.randn(2, 3, 4)})
    assert rows["embeddings"].shape == (6, 4)
    assert Handover(listed=False).give(rows).pooler_output.shape == (6, 4)


def test_rows_that_all_pictures_share_get_the_sum_of_their_gradients() -> None:
    """Two decoders, with two pictures and with one, of four tokens each; five shared rows travel in two tensors."""
    shared = torch.randn(5, 3, requires_grad=True)
    handover = Handover(shared=(("indicators", 5, 2),))
    output = {"pooler_output": (torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)), "indicators": shared}
    rows = handover.take(output, [4, 4, 4])
    weights = torch.randn(2, 5, 3)
    for weight, own in zip(weights, (slice(0, 8), slice(8, 12)), strict=True):
        found = handover.give({name: tensor[own] for name, tensor in rows.items()}).indicators
        assert torch.equal(found, shared)
        (found * weight).sum().backward(retain_graph=True)
    assert torch.allclose(shared.grad, weights.sum(0))
