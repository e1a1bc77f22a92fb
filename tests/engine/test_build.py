"""Engines are built, and their stages do their parts."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import PartConfig
from dhp.core import torch_private
from dhp.core.draws import TokenKeys, drawing, keys_of
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import ALL, AdapterSettings, GroupRule, ParameterGroup, Selector, TrainingRules
from dhp.core.torch_private import count_graphs
from dhp.engine import stage as engine_stage
from dhp.engine.build import (
    cuts_first,
    dtype_to_load,
    freeze,
    optimizer_maker,
    rates_at,
    shard_without_ranks,
    trained_groups,
)
from dhp.engine.device_transfer import move_together, to_device
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.sample_sums import EvaluatingEngine
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.empty import empty_slices, stored_dtype
from dhp.models.lora import TokenDropout
from dhp.models.registry import load_family
from dhp.parallel.attention import attention_kernels
from dhp.parallel.kernels import elementwise
from dhp.parallel.kernels.replace import INNER, _classes, replace_without_weights
from dhp.parallel.tensor.styles import PARTIAL_OVER, with_fused
from dhp.parallel.tensor.tensor_plan import local_plan
from dhp.plan.model_checks import check_plan
from dhp.trainer.settings import stage_settings
from experiments.loops import Ours
from experiments.pair import join_alone
from tests.helpers.families import Maker
from tests.helpers.flash_attention import flash_attn_interface
from tests.helpers.graphs import make_graph
from tests.helpers.layouts import with_part
from tests.helpers.rows import slow
from tests.helpers.tiny_families import FAMILIES, save_family

UPDATE = OptimizerSettings(
    learning_rate=0.02,
    betas=(0.7, 0.95),
    eps=1e-3,
    weight_decay=0.3,
    lr_scheduler_type="constant",
    warmup_steps=0,
    total_steps=10,
    max_grad_norm=None,
)


def settings(rules: TrainingRules = ALL) -> StageSettings:
    config = resolve(compose_config("tiny"))
    graph = make_graph()
    return replace(stage_settings(config, graph, graph.stage("text"), "cpu", 10), update=UPDATE, rules=rules)


def test_adamw_has_every_configured_value() -> None:
    optimizer = optimizer_maker(settings())([("weight", torch.nn.Parameter(torch.zeros(1)))])
    found = {name: optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert optimizer.param_groups[0]["group"].name == "text"
    assert found == {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3}


def test_adamw_has_a_group_for_each_of_the_rules() -> None:
    own = (GroupRule("slow", (Selector("a"),), learning_rate=0.01), GroupRule("light", (Selector("bias"),), None, 0.0))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    made = optimizer_maker(settings(TrainingRules(groups=own)))(model.named_parameters())
    found = {group["group"].name: (group["lr"], group["weight_decay"], group["params"]) for group in made.param_groups}
    assert found == {
        "slow": (0.01, 0.3, [model["a"].weight]),
        "slow+light": (0.01, 0.0, [model["a"].bias]),
        "text": (0.02, 0.3, [model["b"].weight]),
        "light": (0.02, 0.0, [model["b"].bias]),
    }


def test_what_no_rule_trains_has_no_gradient_and_what_was_frozen_stays_so() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in "abc"})
    model["a"].requires_grad_(False)
    freeze(model, lambda name: name != "b.weight")
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "b.bias",
        "c.weight",
        "c.bias",
    ]
    assert trained_groups(model, settings()) == (ParameterGroup("text", 0.02, 0.3, 0),)


def test_groups_fall_to_the_same_share_of_their_rates() -> None:
    groups = [ParameterGroup("text", 0.02, 0.3, 0), ParameterGroup("fast", 0.2, 0.3, 0)]
    update = replace(settings().update, learning_rate=0.02, lr_scheduler_type="linear", total_steps=4, min_lr=0.005)
    assert rates_at(2, groups, update) == pytest.approx(dict(zip(groups, (0.0125, 0.125))))
    assert rates_at(4, groups, update) == pytest.approx(dict(zip(groups, (0.005, 0.05))))
    waves = replace(update, lr_scheduler_type="cosine_with_restarts", cycles=2, min_lr=0.0)
    assert [rates_at(step, groups, waves)[groups[0]] for step in (0, 2)] == [0.02, 0.02]


def test_what_is_configured_reaches_every_stage() -> None:
    """None of the values is a default, and no two are alike."""
    values = {
        "learning_rate": 0.002,
        "betas": [0.7, 0.95],
        "eps": 1e-3,
        "weight_decay": 0.3,
        "max_grad_norm": 0.25,
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 3,
        "min_lr": 1e-4,
        "lr_decay_ratio": 0.2,
        "lr_decay_type": "linear",
    }
    config = resolve(compose_config("tiny", overrides=[f"training.{name}={value}" for name, value in values.items()]))
    expected = OptimizerSettings(
        *(0.002, (0.7, 0.95), 1e-3, 0.3, "warmup_stable_decay", 3, 40, 0.25, 1e-4), decay_steps=8, decay_type="linear"
    )
    graph = make_graph()
    for stage in graph.stages:
        settings = stage_settings(config, graph, stage, "cpu", 40)
        assert settings.spec == stage and settings.update == expected


@pytest.mark.parametrize(
    ("stored", "computed", "adapted", "loaded"),
    [
        (torch.bfloat16, torch.bfloat16, False, torch.bfloat16),  # the pages of the file itself
        (torch.bfloat16, torch.bfloat16, True, torch.float32),
        (torch.float32, torch.bfloat16, False, torch.float32),  # which has more than the stage computes in
        (torch.bfloat16, torch.float32, False, torch.float32),
        (torch.float16, torch.bfloat16, False, torch.float32),
    ],
    ids=str,
)
def test_weights_are_read_as_they_are_stored(
    stored: torch.dtype, computed: torch.dtype, adapted: bool, loaded: torch.dtype, tmp_path: Path
) -> None:
    save_file(
        {"a": torch.zeros(2, dtype=stored), "counts": torch.zeros(2, dtype=torch.int64)}, tmp_path / "a.safetensors"
    )
    adapters = AdapterSettings(2, 2.0) if adapted else None
    given = replace(with_part(settings(), model_name=str(tmp_path)), adapters=adapters)
    assert dtype_to_load(given, computed) is loaded


def test_of_several_formats_none_is_the_stored_one(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32)):
        save_file({name: torch.zeros(2, dtype=dtype)}, tmp_path / f"{name}.safetensors")
    assert stored_dtype(str(tmp_path)) is None
    assert dtype_to_load(with_part(settings(), model_name=str(tmp_path)), torch.bfloat16) is torch.float32


def test_of_a_hub_id_nothing_is_stored_here() -> None:
    assert stored_dtype("Qwen/Qwen2.5-VL-3B-Instruct") is None
    assert (
        dtype_to_load(with_part(settings(), model_name="Qwen/Qwen2.5-VL-3B-Instruct"), torch.bfloat16) is torch.float32
    )


def test_only_fsdp2_cuts_first() -> None:
    cut = {
        (stage, engine): cuts_first(with_part(settings(), zero_stage=stage, zero_engine=engine))
        for stage, engine in ((0, "fsdp"), (2, "fsdp"), (3, "fsdp"), (3, "deepspeed"))
    }
    assert cut == {(0, "fsdp"): False, (2, "fsdp"): True, (3, "fsdp"): True, (3, "deepspeed"): False}


@pytest.mark.parametrize(
    ("images", "clips", "targets", "vision", "audio"),
    [
        (1, 0, 1, True, False),
        (0, 1, 1, False, True),
        (1, 1, 1, True, True),
        (0, 0, 9, False, False),
        (3, 3, 0, False, False),  # nothing is learned, so no rank has a gradient
    ],
)
def test_one_picture_or_clip_of_a_step_with_a_target_is_enough(
    images: int, clips: int, targets: int, vision: bool, audio: bool
) -> None:
    info: Any = SimpleNamespace(images=images, clips=clips, total_weight=targets)
    found = []
    for part in ("vision", "audio"):
        engine = object.__new__(EncoderEngine)
        engine.spec = SimpleNamespace(part=part)
        found.append(engine.is_active(info))
    assert found == [vision, audio]


class Dropping(EvaluatingEngine):
    """A rank whose stage is an adapter's dropout."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(TokenDropout(0.5, "matrix"))
        self.forgotten: list[tuple[int, int]] = []

    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Any) -> tuple[Any, ...]:
        return ({"rows": 1 * self.model(work)},)

    def forget(self, micro_batch: int, chunk: int) -> None:
        self.forgotten.append((micro_batch, chunk))


def test_nothing_is_left_out_at_random_and_nothing_kept() -> None:
    rank, ones = Dropping(), torch.ones(1000, requires_grad=True)
    (sent,) = rank.evaluate_step(2, 1, ones)
    assert torch.equal(sent["rows"], torch.ones(1000)) and not sent["rows"].requires_grad
    assert rank.forgotten == [(2, 1)]
    with drawing(TokenKeys(keys_of([(7, 0, 1)]))):
        (trained,) = rank.forward_step(3, 1, ones)  # training goes on as before
    assert 300 < int((trained["rows"] == 0).sum()) < 700 and trained["rows"].requires_grad


def test_a_tensor_of_the_device_is_used_where_it_lies() -> None:
    """cuda_ipc hands over tensors of the GPU itself, which cannot be locked for a transfer."""
    there = torch.empty(3, device="meta")  # no more of host memory than a GPU's
    assert to_device(there, torch.device("meta")) is there


def test_numbers_with_fractions_keep_them() -> None:
    """Positions by seconds are no whole numbers."""
    given = [torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.5], [-12.25]]), torch.tensor([True, False])]
    moved = move_together(given, torch.device("cpu"))
    assert [(m.tolist(), m.dtype) for m in moved] == [
        ([[1, 2]], torch.int64), ([[0.5], [-12.25]], torch.float32), ([1, 0], torch.int64),
    ]  # fmt: skip
    assert all(m.data_ptr() != g.data_ptr() for m, g in zip(moved, given, strict=True))


ASKED = PartConfig(tensor=2, pipeline=1, data=1, ulysses=1, ring=1, parallelism="tensor", sequence_sharded_norms=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [("gemma4", "per_layer_input_gate, a matrix beside its attention"), ("gemma4_moe", "experts, beside their router")],
)
def test_layers_with_more_than_blocks_and_norms_are_refused(name: str, why: str, tmp_path: Path) -> None:
    model = str(save_family(name, tmp_path / "model"))
    with pytest.raises(ModelError, match=f"sequence_sharded_norms=true: a Gemma4TextDecoderLayer .*{why}"):
        check_plan("text", ASKED, model, load_family(model))


def test_layers_without_attention_stand_beside_shared_heads(tmp_path: Path) -> None:
    """Of a Qwen3.5 most layers have a mixer; four ranks share its two key/value heads."""
    model = str(save_family("qwen3_5", tmp_path / "model"))
    check_plan("text", replace(ASKED, tensor=4, sequence_sharded_norms=False), model, load_family(model))


def test_others_are_not(made_model: str) -> None:
    family = load_family(made_model)
    for name in ("vision", "text"):
        check_plan(name, ASKED, made_model, family)


def test_a_tower_that_runs_as_a_whole_is_refused(tmp_path: Path) -> None:
    model = str(save_family("llava_clip", tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"vision\.sequence_sharded_norms=true with a llava model: .* as a whole"):
        load_family(model).tower.check_stages("vision", ASKED)


def test_kernels_are_put_inside_of_what_gathers(made_model: str) -> None:
    """Blocks whose input is gathered still turn by our rotary positions and have our gates."""
    family = load_family(made_model)
    for name in ("vision", "text"):
        part = family.parts[name]
        styles = with_fused(part.tensor_plan, part.fused)
        model = empty_slices(made_model, family.outside(name), 2, part.shared_heads(2), styles)
        before = {kind: len(modules) for kind, (_, modules) in _classes(model).items()}
        local_plan(model, model._expand_parallel_plan(model.tp_plan | styles))
        shard_without_ranks(model, part, 2)
        blocks = [module for module in model.modules() if hasattr(vars(module).get("forward"), INNER)]
        assert before == {kind: len(modules) for kind, (_, modules) in _classes(model).items()}
        outer = [block.forward for block in blocks]
        replace_without_weights(model, torch.float32)
        assert [block.forward for block in blocks] == outer and blocks
        assert any(getattr(block.forward, INNER).__func__ is not type(block).forward for block in blocks)


def test_the_norm_behind_the_last_layer_has_its_ranks_tokens_too(made_model: str) -> None:
    family = load_family(made_model)
    decoder = family.decoder
    styles = with_fused(decoder.tensor_plan, decoder.fused)
    model = empty_slices(made_model, family.outside("text"), 2, decoder.shared_heads(2), styles)
    local_plan(model, model._expand_parallel_plan(model.tp_plan | styles))
    shard_without_ranks(model, decoder, 2)
    norm, layers = model.get_submodule(decoder.norm), model.get_submodule(decoder.layers.path)
    assert PARTIAL_OVER in vars(norm)  # its gradients are summed over the ranks
    assert len(norm._forward_hooks) == 1 and not layers[-1]._forward_hooks  # states are whole behind it alone


def test_a_decoder_that_adds_features_by_itself_is_refused(tmp_path: Path) -> None:
    model = str(save_family("idefics3", tmp_path / "model"))
    decoder = load_family(model).decoder
    contract = decoder._contract
    adds = replace(contract, embeds=False, handover=replace(contract.handover, more=(("deepstack_features", 3),)))
    decoder._contract = adds
    with pytest.raises(ConfigError, match="adds features of pictures to the states between layers"):
        decoder.check(ASKED)


EXACT = 1e-9  # of each gradient's norm, in float64


def gradients(model: str, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step of two micro-batches with samples and pictures of several lengths, in float64."""
    data: Any = SimpleNamespace(family=load_family(model))
    with join_alone():
        ours = Ours(model, data, dtype="float64", **changes)
        found: dict[str, Tensor] = {}
        for trainer in ours.trainers.values():
            trainer.grad_norm_sq = partial(_noting, trainer, found, trainer.grad_norm_sq)
        first, second, _ = Maker(model).steps()
        return ours.step(ours.shard((tuple(first), tuple(second))))[1], found


def _noting(trainer: Any, found: dict[str, Tensor], measure: Any, *arguments: Any) -> float:
    named = trainer.model.named_parameters()
    found |= {name: p.grad.clone() for name, p in named if p.grad is not None}
    return measure(*arguments)


def assert_same(own: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert own[0] == pytest.approx(wanted[0], rel=1e-12)
    assert own[1].keys() == wanted[1].keys()
    largest = max(float(gradient.norm()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        error = float((own[1][name] - gradient).norm()) / max(float(gradient.norm()), 1e-6 * largest)
        assert error < EXACT, f"{name}: {error}"


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made, and run operation by operation: compiling them to kernels would take minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()


QUICK = "qwen2_5_vl"
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in FAMILIES if name != QUICK]


@pytest.mark.parametrize("name", [slow(QUICK), *OTHERS])
def test_compiled_layers_give_the_same_gradients(name: str, tmp_path: Path, uncompiled_kernels: None) -> None:
    model = str(save_family(name, tmp_path))
    wanted = gradients(model)
    assert_same(gradients(model, compile=True), wanted)


def graphs_of_steps(model: str, count: int) -> list[tuple[int, int]]:
    """Graphs made so far, and given up, behind each step with ever more samples of other lengths."""
    torch.compiler.reset()
    data: Any = SimpleNamespace(family=load_family(model))
    maker, found = Maker(model), []
    made, given_up = count_graphs()
    with join_alone():
        ours = Ours(model, data, dtype="float64", compile=True)
        for step in range(count):
            pictures = [[number % 4 for number in range(1 + (step + at) % 3)] for at in range(1 + step)]
            samples = tuple(maker.sample(of, 3 + 5 * at + step, 10 * step + at) for at, of in enumerate(pictures))
            ours.step(ours.shard((samples, samples[:1])))
            now = count_graphs()
            found.append((now[0] - made, now[1] - given_up))
    return found


def test_steps_of_other_lengths_and_counts_make_no_graphs(
    tmp_path: Path, uncompiled_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_family(QUICK, tmp_path))
    before = torch_private.shapes.use_duck_shape
    try:
        found = graphs_of_steps(model, 4)
        assert found[0][0] > 4 and found[1:] == [(found[1][0], 0)] * 3
        monkeypatch.setattr(elementwise, "tell_sizes_apart", lambda: None)
        torch_private.shapes.use_duck_shape = True
        assert graphs_of_steps(model, 4)[-1] > found[-1]  # negative control: sizes that are equal once
    finally:
        torch_private.shapes.use_duck_shape = before


def test_a_step_by_flash_attn_gives_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(save_family("qwen2_5_vl", tmp_path))
    wanted = gradients(model)
    calls: list[str] = []
    fake = flash_attn_interface(calls)
    monkeypatch.setattr(attention_kernels, "_package", lambda: fake)
    monkeypatch.setattr(engine_stage, "require", lambda key, device: None)
    for packing in (True, False):
        calls.clear()
        assert_same(gradients(model, attention_backend="flash_attention_2", packing=packing), wanted)
        assert len(calls) == 2 * 3 + 3  # a call a layer: both micro-batches of the decoder, one has pictures


def test_a_rank_without_flash_attn_refuses(tmp_path: Path) -> None:
    model = str(save_family("qwen2_5_vl", tmp_path))
    with pytest.raises(ConfigError, match=r"vision.attention_backend=flash_attention_2: flash-attn is not installed"):
        gradients(model, attention_backend="flash_attention_2")
