"""Decoders of the library in float64 all through, and a packed row of them against each sample alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dhp.parallel.attention.segment_plan import plan_segments
from dhp.parallel.attention.segments import packed_attention

CPU = torch.device("cpu")
VOCABULARY = 64
PACKED = "dhp_test_packed"
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def stay_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep norms and softmax from a detour through float32, whose rounding jumps by 1e-7 for differences of 1e-16."""
    to, to_float, softmax = Tensor.to, Tensor.float, nn.functional.softmax

    def stay(states: Tensor, *args: Any, **named: Any) -> Tensor:
        single = torch.float32 in args or named.get("dtype") == torch.float32
        return states if single and states.dtype == torch.float64 else to(states, *args, **named)

    monkeypatch.setattr(Tensor, "to", stay)
    monkeypatch.setattr(Tensor, "float", lambda states: states if states.dtype == torch.float64 else to_float(states))
    monkeypatch.setattr(nn.functional, "softmax", lambda states, dim=-1, **_: softmax(states, dim=dim))


def make_decoder(kind: type[nn.Module], config: Any) -> Any:
    """A model with weights of some size, in float64, and eager attention."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = kind(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def samples_of(lengths: Sequence[int]) -> list[Tensor]:
    """Tokens of each sample, [1, tokens]."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(1, VOCABULARY, (1, length), generator=generator) for length in lengths]


def alone(model: Any, samples: Sequence[Tensor], **named: Any) -> list[Tensor]:
    """Outputs of all samples one behind another, each run by itself, and gradients of all parameters."""
    model.config._attn_implementation_internal = "eager"
    outputs = [model(input_ids=tokens, use_cache=False, **named).last_hidden_state[0] for tokens in samples]
    return _with_gradients(model, torch.cat(outputs))


def packed(model: Any, samples: Sequence[Tensor], attention: Any = packed_attention, **planned: Any) -> list[Tensor]:
    """The same of one packed row. planned: of `plan_segments`."""
    lengths = [tokens.shape[1] for tokens in samples]
    AttentionInterface.register(PACKED, attention)
    model.config._attn_implementation_internal = PACKED
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    plan = plan_segments(lengths, CPU, causal=True, **planned)
    output = model(input_ids=torch.cat(list(samples), 1), position_ids=positions, use_cache=False, segments=plan)
    return _with_gradients(model, output.last_hidden_state[0])


def _with_gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((output * weight).sum(), parameters, allow_unused=True)
    used = [g for g in gradients if g is not None]
    return [output.detach(), *used]


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest deviation, relative to the largest value of its tensor."""
    pairs = zip(found, wanted, strict=True)
    return max(float((mine - other).abs().max() / other.abs().max().clamp(min=1e-9)) for mine, other in pairs)
