"""Decoders that run each sample of a row alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhp.core.errors import ModelError
from dhp.parallel.attention.by_sample import run_by_sample
from dhp.parallel.attention.segment_plan import plan_segments

CPU = torch.device("cpu")


class Running(nn.Module):
    """Its states are sums of all that came before in the row, with positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor, **named: Any) -> Any:
        assert attention_mask.shape == inputs_embeds.shape[:2] and bool(attention_mask.all()) and not named["use_cache"]
        self.calls.append(tuple(inputs_embeds.shape[:2]))
        states = inputs_embeds.cumsum(1) + position_ids.sum(0)[..., None]
        return SimpleNamespace(last_hidden_state=states)


def run(lengths: list[int], calls: int = 0, **named: Any) -> tuple[Running, Tensor]:
    decoder = Running()
    run_by_sample(decoder)
    plan = plan_segments(lengths, CPU, causal=True)
    object.__setattr__(plan, "calls", calls)
    states = torch.arange(1.0, 1 + sum(lengths))[None, :, None]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, 1, -1)
    output = decoder(inputs_embeds=states, segments=plan, position_ids=positions, attention_mask=None, **named)
    return decoder, output.last_hidden_state[0, :, 0]


def test_a_sum_begins_anew_with_a_sample() -> None:
    decoder, states = run([2, 3, 2])
    alone = [torch.arange(1.0, 3), torch.arange(3.0, 6), torch.arange(6.0, 8)]
    assert states.tolist() == torch.cat([one.cumsum(0) + 3 * torch.arange(len(one)) for one in alone]).tolist()
    assert sorted(decoder.calls) == [(1, 3), (2, 2)]  # samples of one length together


def test_axes_of_positions_are_not_taken_for_rows() -> None:
    """Three axes, rows and tokens."""
    decoder = Running()
    run_by_sample(decoder)
    positions = torch.arange(27).view(3, 3, 3)
    states = torch.zeros(3, 3, 1)
    output = decoder(inputs_embeds=states, segments=plan_segments([3] * 3, CPU, True), position_ids=positions)
    assert torch.equal(output.last_hidden_state[..., 0], positions.sum(0).float())
    apart = decoder(inputs_embeds=states, segments=plan_segments([1, 2, 3, 3], CPU, True), position_ids=positions)
    assert torch.equal(apart.last_hidden_state[..., 0], positions.sum(0).float())


def test_further_calls_change_nothing() -> None:
    assert run([2, 3], calls=4)[0].calls == [(1, 2), (1, 3), (1, 1), (1, 1)]
    assert run([2, 3], calls=4)[1].tolist() == run([2, 3])[1].tolist()


def test_a_tensor_that_is_no_tokens_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"called with deepstack of the shape \(4, 8\).*each of 1 × 5 tokens"):
        run([2, 3], deepstack=torch.zeros(4, 8))


def test_a_decoder_without_a_plan_is_refused() -> None:
    decoder = Running()
    run_by_sample(decoder)
    with pytest.raises(ModelError, match="without all of a row's samples"):
        decoder(inputs_embeds=torch.zeros(1, 2, 1), position_ids=torch.zeros(1, 1, 2))
