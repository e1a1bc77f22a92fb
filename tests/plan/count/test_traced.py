"""Bytes traced without weights or memory are those that ranks count in a real step, for each recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED
from dhp.core.errors import ModelError
from dhp.core.parameters import AdapterSettings
from dhp.core.reports import StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.row_bytes import TracedRows
from dhp.plan.count.traced import TraceSettings, trace_part
from dhp.plan.recompute.profile import usage_of
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault, Running, make_reader, rules_of
from tests.helpers.rows import slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample, save_llava_with_experts
from tests.helpers.tiny_families import save_family

ONE = Degrees()
ALL_CHOICES = ("none", "light", "mlp", "linear", "all")
PATCHES, TARGETS = 32 * 32, 20


def measured(
    model: str, dtype: str, degrees: Degrees, choices: tuple[str, ...], steps: int = 1, **more: object
) -> Iterator[tuple[str, str, StageUsage]]:
    """(recompute, part, usage of the fullest rank) of steps of one sample with one picture. steps: see
    `with_most_replayed`."""
    case = replace(Case(degrees, degrees, 1, dtype, packing=True), **more)
    samples = [make_sample([(1, 32, 32)], 40, TARGETS, 0, IMAGE_TOKEN)]
    data = make_reader(model, case, [samples]).step(0)
    none = {"recompute": lambda stage: ("none",) * len(stage.layers)}
    with Running(model, case, Fault(EncoderEngine, TextEngine), measure=True, **none) as running:
        for choice in choices:
            for stage, group in running.groups.items():
                layers = len(running.graph.stage(stage).layers)
                group.execute_all_async("set_recompute", (choice,) * layers, returns=0)
            found = [running.step(data)[1] for _ in range(steps)]
            for part in found[0]:
                usages = [usage for reports in found if (usage := usage_of(reports[part])) is not None]
                if usages:
                    yield choice, part, with_most_replayed(usages)


def with_most_replayed(usages: list[StageUsage]) -> StageUsage:
    """Of some steps alike: of each layer's replays the one that added most. Gloo's thread lets go of what it gathered a
    moment after a collective's end, so that what a replay frees may have been there when it began."""
    first, added = usages[0], zip(*([layer.replay_bytes for layer in usage.layers] for usage in usages), strict=True)
    layers = (replace(layer, replay_bytes=max(of)) for layer, of in zip(first.layers, added, strict=True))
    return replace(first, layers=tuple(layers))


def traced(model: str, part: str, usage: StageUsage, dtype: str, tensor: int = 1, **more: object) -> StageUsage:
    """The same without a rank. 64 windows of 16 patches."""
    rows = TracedRows(usage.rows, PATCHES // 4, TARGETS, PATCHES, 64)
    return trace_part(model, load_family(model), part, rows, TraceSettings(dtype, tensor, usage.choices, **more))


def bytes_of(usage: StageUsage) -> tuple[object, ...]:
    layers = [(one.kind, one.choice, one.held_bytes, one.replay_bytes) for one in usage.layers]
    return usage.peak_bytes, usage.before_bytes, usage.after_bytes, usage.rows, layers


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
@pytest.mark.parametrize("model", ["made_model", "qwen3_vl_model"])
def test_every_byte_is_that_of_a_real_step(model: str, dtype: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    found = list(measured(path, dtype, ONE, ALL_CHOICES))
    assert len(found) == 2 * len(ALL_CHOICES)
    for choice, part, usage in found:
        own = traced(path, part, usage, dtype)
        if (model, dtype, part) == ("qwen3_vl_model", "bfloat16", "vision"):
            # Mean and deviation of torch's layer norm: two bytes each on a CPU, four on the meta device and on GPUs.
            extra = own.layers[-1].held_bytes + own.layers[-1].replay_bytes
            extra -= usage.layers[-1].held_bytes + usage.layers[-1].replay_bytes
            assert extra == 2 * 2 * 2 * PATCHES
            continue
        assert bytes_of(own) == bytes_of(usage), (choice, part)


def test_of_a_tensor_rank(made_model: str) -> None:
    for choice, part, usage in measured(made_model, "float32", Degrees(tensor=2), ("none", "mlp")):
        own = traced(made_model, part, usage, "float32", tensor=2)
        # A slice of the vocabulary keeps which tokens are its own, and their rows: a byte and eight a token.
        outside = 9 * usage.rows if part == "text" else 0
        own = replace(own, before_bytes=own.before_bytes + outside, peak_bytes=own.peak_bytes + outside)
        assert bytes_of(own) == bytes_of(usage), (choice, part)


@pytest.mark.parametrize("model", ["made_model", slow("qwen3_vl_model")])
@pytest.mark.slow
def test_of_a_tensor_rank_with_sharded_norms(model: str, request: pytest.FixtureRequest) -> None:
    """Each layer keeps less than without, and what is traced is what a rank keeps."""
    path, sharded = request.getfixturevalue(model), {"sharded_norms": True}
    for choice, part, usage in measured(path, "float32", Degrees(tensor=2), ("none", "light", "all"), 3, **sharded):
        own = traced(path, part, usage, "float32", tensor=2, sequence_sharded_norms=True)
        outside = 9 * usage.rows if part == "text" else 0
        own = replace(own, before_bytes=own.before_bytes + outside, peak_bytes=own.peak_bytes + outside)
        assert bytes_of(own) == bytes_of(usage), (choice, part)
        whole = traced(path, part, usage, "float32", tensor=2)
        assert own.peak_bytes < whole.peak_bytes and own.layers[0].held_bytes < whole.layers[0].held_bytes


@pytest.mark.parametrize("sharded", [False, slow(True)], ids=["whole norms", "sharded norms"])
@pytest.mark.slow
def test_of_a_tensor_rank_with_adapters(made_model: str, sharded: bool) -> None:
    """The embedding is frozen: it keeps nothing for backward."""
    own = {part: AdapterSettings(4, 4.0) for part in ("vision", "text")}
    lora, choices = tuple(own.items()), ("none", "all")
    for choice, part, usage in measured(
        made_model, "float32", Degrees(tensor=2), choices, 3, lora=lora, sharded_norms=sharded
    ):
        trains = rules_of(made_model, Case(ONE, ONE, 1, lora=lora)).trains
        more = {"adapters": own, "sequence_sharded_norms": sharded, "trains": trains}
        found = traced(made_model, part, usage, "float32", tensor=2, **more)
        assert bytes_of(found) == bytes_of(usage), (choice, part)


def test_a_slice_of_the_vocabulary_need_not_have_the_row_that_pads(tiny_assets: Path) -> None:
    model = str(tiny_assets / "model")
    family = load_family(model)
    settings = TraceSettings("float32", 2, ("none",) * len(family.decoder.layers.kinds))
    assert trace_part(model, family, "text", TracedRows(64, 16, 4), settings).peak_bytes > 0


def test_what_is_frozen_keeps_nothing(made_model: str) -> None:
    """The tower and its projector, and gradients that the decoder does not send back."""
    frozen = ("vision", "projector")
    decoder_only = {"trains": lambda name: "visual" not in name, "receives_gradients": False}
    found = list(measured(made_model, "float32", ONE, ("none",), frozen=frozen))
    assert [part for _, part, _ in found] == ["vision", "text"] and found[0][2].peak_bytes == 0
    for _, part, usage in found:
        assert bytes_of(traced(made_model, part, usage, "float32", **decoder_only)) == bytes_of(usage)


def test_other_rows_keep_other_bytes(made_model: str) -> None:
    """The negative control of those above."""
    ((_, part, usage), *_) = measured(made_model, "float32", ONE, ("none",))
    assert part == "vision"
    assert bytes_of(traced(made_model, part, replace(usage), "bfloat16")) != bytes_of(usage)
    rows = TracedRows(usage.rows, PATCHES // 4, TARGETS, PATCHES - 64, 15)
    settings = TraceSettings("float32", 1, usage.choices)
    assert trace_part(made_model, load_family(made_model), part, rows, settings).peak_bytes < usage.peak_bytes


def test_experts_that_multiply_in_groups_keep_what_shapes_say(tmp_path: Path) -> None:
    """However tokens are routed: each visits so many experts."""
    model = str(save_family("qwen3_vl_moe", tmp_path))
    family, sample = load_family(model), Maker(model).sample([3], 20, 0)
    case = Case(ONE, ONE, 1, "bfloat16", packing=True)
    data = make_reader(model, case, [[sample]]).step(0)
    features, targets = int((sample.mm_token_type_ids > 0).sum()), int((sample.labels[1:] != IGNORED).sum())
    with Running(model, case, Fault(EncoderEngine, TextEngine), measure=True) as running:
        layers = len(running.graph.stage("text").layers)
        for choice in ("none", "mlp", "all"):
            running.groups["text"].execute_all_async("set_recompute", (choice,) * layers, returns=0)
            usage = usage_of(running.step(data)[1]["text"])
            assert usage is not None
            rows, settings = TracedRows(usage.rows, features, targets), TraceSettings("bfloat16", 1, usage.choices)
            assert bytes_of(trace_part(model, family, "text", rows, settings)) == bytes_of(usage), choice


def test_a_part_that_looks_at_values_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = str(save_llava_with_experts(tmp_path_factory.mktemp("experts")))
    settings = TraceSettings("float32", 1, ("none", "none"))
    with pytest.raises(ModelError, match="the text part of .* is not known before it runs"):
        trace_part(model, load_family(model), "text", TracedRows(64, 16), settings)
