"""Layers with state along the row: a packed row equals each sample alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2Model, Qwen3_5TextConfig, Qwen3_5TextModel, Qwen3NextConfig, Qwen3NextModel

from dhp.core.errors import ModelError
from dhp.models.types import LayerParts
from dhp.parallel.attention import segments as whole
from dhp.parallel.attention.segment_plan import SegmentPlan, plan_segments
from dhp.parallel.attention.segments import packed_attention, run_by_segment
from dhp.parallel.recompute.recomputed_layers import ATTENTION, RecomputedLayers
from dhp.parallel.recompute.saved_calls import save_output
from tests.helpers.double import SMALL, alone, largest_error, make_decoder, packed, samples_of, stay_in_double

LENGTHS = (5, 9, 2, 5, 1, 70)  # shorter than the convolution; longer than a chunk of the delta rule, which is 64
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def qwen3_5() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    return make_decoder(Qwen3_5TextModel, Qwen3_5TextConfig(**SMALL, **LINEAR, rope_parameters=rope))


def qwen3_next() -> Any:
    experts = {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}
    return make_decoder(Qwen3NextModel, Qwen3NextConfig(**SMALL, **LINEAR, **experts))


def lfm2() -> Any:
    types = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return make_decoder(Lfm2Model, Lfm2Config(**small, **types))


MIXERS = {qwen3_5: "Qwen3_5GatedDeltaNet", qwen3_next: "Qwen3NextGatedDeltaNet", lfm2: "Lfm2ShortConv"}


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_double(monkeypatch)


@pytest.mark.parametrize("make", MIXERS)
def test_a_packed_row_equals_each_sample_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make(), samples_of(LENGTHS)
    wanted = alone(model, samples)
    leaking = packed(model, samples)
    assert largest_error(leaking, wanted) > 1e-2  # state runs from sample to sample
    assert run_by_segment(model, [MIXERS[make]]) == 2
    assert largest_error(packed(model, samples), wanted) < 1e-11
    monkeypatch.setattr(whole, "takes_varlen", lambda query: False)
    assert largest_error(packed(model, samples, varlen=True), wanted) < 1e-11  # the plan's segments in their own order


@pytest.mark.parametrize("make", MIXERS)
@pytest.mark.parametrize("choice", ["all", "linear", "light"])
def test_recomputed_layers_equal_the_same(make: Any, choice: str) -> None:
    model, samples = make(), samples_of(LENGTHS[:4])
    wanted = alone(model, samples)
    run_by_segment(model, [MIXERS[make]])
    RecomputedLayers(model.layers, LayerParts("layers", (), (), ("causal",) * 3), (choice,) * 3)
    assert largest_error(packed(model, samples, save_output(ATTENTION, packed_attention)), wanted) < 1e-11


@pytest.mark.parametrize("make", MIXERS)
def test_padded_rows_run_as_they_are(make: Any) -> None:
    model, (tokens,) = make(), samples_of((12,))
    rows, plan = tokens.view(2, 6), plan_segments((6, 6), torch.device("cpu"), causal=True)
    wanted = model(input_ids=rows, use_cache=False).last_hidden_state
    run_by_segment(model, [MIXERS[make]])
    assert torch.equal(model(input_ids=rows, use_cache=False, segments=plan).last_hidden_state, wanted)


def test_calls_beside_those_of_its_segments_change_nothing() -> None:
    """A rank makes as many calls as the others, whose segments are more."""
    model, found = lfm2(), []
    run_by_segment(model, ["Lfm2ShortConv"])
    plan = plan_segments((2, 3), torch.device("cpu"), causal=True)
    for calls in (0, 5):
        states = torch.linspace(-1.0, 1.0, 120, dtype=torch.float64).view(1, 5, 24).requires_grad_()
        output = model.layers[0].conv(states, segments=replace(plan, calls=calls))
        output.square().sum().backward()
        found.append((output, states.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0


def test_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="Lfm2Model has no module of the class Lfm2LongConv"):
        run_by_segment(lfm2(), ["Lfm2ShortConv", "Lfm2LongConv"])


def test_what_would_let_state_run_on_is_refused() -> None:
    model = lfm2()
    run_by_segment(model, ["Lfm2ShortConv"])
    mixer, states = model.layers[0].conv, torch.zeros(1, 5, 24, dtype=torch.float64)
    plan = plan_segments((2, 3), torch.device("cpu"), causal=True)
    divided = SegmentPlan((), None, None, True, rest=object())  # type: ignore[arg-type]
    for named, message in (
        ({}, "layers.0.conv: .* without `segments`"),
        ({"segments": divided}, "divided over ranks"),
        ({"segments": plan, "attention_mask": torch.ones(1, 5)}, "a mask"),
        ({"segments": plan, "past_key_values": object()}, "a cache"),
    ):
        with pytest.raises(ModelError, match=message):
            mixer(states, **named)
