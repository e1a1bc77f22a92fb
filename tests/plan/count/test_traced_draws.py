"""Adapters whose dropout could not be drawn by token are refused before a run, from shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP, Qwen2MLP

from dhp.core.errors import ConfigError
from dhp.core.parameters import AdapterSettings
from dhp.models.registry import load_family
from dhp.plan.count.traced import check_draws

DROPPING = AdapterSettings(2, 4.0, dropout=0.1)


def twice(module: Any, states: torch.Tensor) -> torch.Tensor:
    """An MLP whose last matrix is given two rows a token."""
    inner = module.act_fn(module.gate_proj(states)) * module.up_proj(states)
    return module.down_proj(torch.stack([inner, inner]))[0]


@pytest.mark.parametrize(
    ("part", "kind", "rows", "tokens"), [("text", Qwen2MLP, 24, 12), ("vision", Qwen2_5_VLMLP, 96, 48)]
)
def test_rows_that_are_no_tokens_are_refused(
    part: str, kind: type, rows: int, tokens: int, made_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = load_family(made_model)
    check_draws(made_model, family, part, DROPPING)
    monkeypatch.setattr(kind, "forward", twice)
    wanted = (
        rf"^{part}\.lora\.dropout=0\.1 of .*\.down_proj: it is given {rows} rows where the part has {tokens} tokens"
    )
    with pytest.raises(ConfigError, match=wanted):
        check_draws(made_model, family, part, DROPPING)
    check_draws(made_model, family, part, AdapterSettings(2, 4.0))
    check_draws(made_model, family, part, AdapterSettings(2, 4.0, dropout=0.1, targets=("q_proj", "attn.proj")))
