"""Adapters: made, exported, on packed weights."""

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dhp.checkpoint.shard_reader import read_shards
from dhp.config.schema import PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import ADAPTER, NF4, AdapterSettings, is_adapter, plain_name
from dhp.models import export, quantized
from dhp.models.begin_adapters import check_begin, weight_reader
from dhp.models.empty import adapt
from dhp.models.export import merge, save_adapter, save_whole
from dhp.models.load import drop_modules, model_class
from dhp.models.lora import TokenDropout, adapted_modules, add_adapters, check_targets, find_targets, target_of
from dhp.models.quantized import check_quantized, find_quantized, quantize, require_package
from dhp.models.registry import load_family
from dhp.models.types import LayerParts, Part
from dhp.parallel.optim.base import cast_parameters
from dhp.plan.trainable import training_rules
from tests.helpers.batches import mixed_step
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.tiny_families import make_config, save_family


def meta(model: str) -> nn.Module:
    with torch.device("meta"):
        return model_class(model)(AutoConfig.from_pretrained(model))


def targets(model: str, part: str, *said: str) -> tuple[str, ...]:
    return find_targets(meta(model), load_family(model).parts[part], AdapterSettings(2, 4.0, targets=said))


def test_by_default_all_linear_modules_of_the_layers(made_model: str) -> None:
    text = targets(made_model, "text")
    assert {name.rpartition(".")[2] for name in text} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert all(name.startswith("model.language_model.layers.") for name in text) and len(text) == 2 * 7
    vision = targets(made_model, "vision")
    assert {name.rpartition(".")[2] for name in vision} >= {"qkv", "proj"}
    assert not any("merger" in name or "patch_embed" in name for name in vision)


def test_routers_of_experts_get_none(qwen3_vl_moe_model: str) -> None:
    found = targets(qwen3_vl_moe_model, "text")
    assert found and not any("gate" == name.rpartition(".")[2] or "expert" in name for name in found)


def test_patterns_choose_within_the_part(made_model: str) -> None:
    assert targets(made_model, "text", "layers.1", "q_proj") == tuple(
        name for name in targets(made_model, "text") if ".1." in name or "q_proj" in name
    )
    assert targets(made_model, "vision", "merger.mlp.0") == ("model.visual.merger.mlp.0",)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders with the configuration of a declared family, without weights."""

    def save(name: str) -> str:
        folder, config = tmp_path_factory.mktemp(name), make_config(name)
        config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
        config.save_pretrained(folder)
        return str(folder)

    return save


def test_what_a_router_is_made_of_gets_none(shapes: Callable[[str], str]) -> None:
    found = targets(shapes("gemma4_moe"), "text")
    assert any(name.endswith("q_proj") for name in found) and not any("router" in name for name in found)


def test_a_layer_that_nothing_depends_on_gets_none(llava_model: str) -> None:
    model, part = meta(llava_model), load_family(llava_model).parts["vision"]
    last = len(part.layers.kinds) - 1
    found = find_targets(model, part, AdapterSettings(2, 4.0))
    assert any(f"layers.{last - 1}." in name for name in found) and not any(f"layers.{last}." in name for name in found)
    assert all(parameter.requires_grad for parameter in model.parameters())
    told = rf"vision.lora.targets: layers.{last} selects .*layers.{last}.*an adapter there would learn nothing"
    with pytest.raises(ConfigError, match=told):
        check_targets(model, part, "vision.lora", AdapterSettings(2, 4.0, targets=(f"layers.{last}",)))


def test_a_tower_alone_of_a_model_whose_head_is_its_embedding(shapes: Callable[[str], str]) -> None:
    folder = shapes("gemma3")
    model, family = meta(folder), load_family(folder)
    drop_modules(model, family.outside("vision"))
    found = find_targets(model, family.parts["vision"], AdapterSettings(2, 4.0))
    add_adapters(model, found, AdapterSettings(2, 4.0), seed=0)
    assert tuple(name for name, _ in adapted_modules(model)) == found != ()


def test_dense_layers_beside_experts_keep_their_names(shapes: Callable[[str], str]) -> None:
    folder = shapes("glm4v_moe")
    model = meta(folder)
    found = [n for n in targets(folder, "text") if n.endswith(("mlp.gate_proj", "shared_experts.up_proj"))]
    assert len(found) == 1 + 2  # of the first layer, and of those with experts
    add_adapters(model, found, AdapterSettings(2, 4.0), seed=0)
    assert [name for name, _ in adapted_modules(model)] == found


class Convolved(Part):
    """A part whose layers are made as those of GPT-2."""

    modules, layers = ("h",), LayerParts("h", ("plain",) * 2, (), ())

    def check(self, asked: PartConfig) -> None:
        pass


def test_layers_without_a_linear_module_are_refused() -> None:
    model = nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict({"c_attn": Conv1D(6, 2)}) for _ in range(2))})
    assert find_targets(model, Convolved(), AdapterSettings(2, 4.0)) == ()
    told = r"text.lora.rank without text.lora.targets: .*have is c_attn \(Conv1D\)\. Set text.lora.rank=0"
    with pytest.raises(ConfigError, match=told):
        check_targets(model, Convolved(), "text.lora", AdapterSettings(2, 4.0))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("q_prj", r"text.lora.targets: q_prj is no matrix of this part; did you mean q_proj\?"),
        ("lm_head", r"lm_head selects lm_head, of the kind Linear: adapters stand beside linear layers alone"),
        ("embed_tokens", r"embed_tokens selects model.language_model.embed_tokens, of the kind Embedding"),
        ("*norm", r"of the kind Qwen2_5_VLRMSNorm"),
        ("merger", r"merger is no matrix of this part\. There are q_proj, k_proj"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(made_model: str, said: str, told: str) -> None:
    asked = AdapterSettings(2, 4.0, targets=("v_proj", said))
    with pytest.raises(ConfigError, match=told):
        check_targets(meta(made_model), load_family(made_model).parts["text"], "text.lora", asked)


@pytest.mark.parametrize("said", ["gate_up_proj", "mlp.gate"])
def test_experts_by_another_name_and_routers_are_refused(said: str, shapes: Callable[[str], str]) -> None:
    folder = shapes("qwen3_vl_moe")
    asked = AdapterSettings(2, 4.0, targets=("q_proj", said))
    words = rf"{said} selects .*, of the kind Qwen3VLMoe.*: adapters stand beside .* named as experts.down_proj"
    with pytest.raises(ConfigError, match=words):
        check_targets(meta(folder), load_family(folder).parts["text"], "text.lora", asked)


def test_matrices_of_experts_are_selected_where_their_module_is_named(shapes: Callable[[str], str]) -> None:
    folder = shapes("glm4v_moe")
    layers = "model.language_model.layers"
    both = [f"{layers}.{n}.mlp.experts.{own}" for n in (1, 2) for own in ("gate_up_proj", "down_proj")]
    found = targets(folder, "text", "experts", "v_proj")
    assert [name for name in found if "experts" in name] == both and len(found) == 2 * 2 + 3
    assert targets(folder, "text", "1.mlp.experts.down_proj") == (f"{layers}.1.mlp.experts.down_proj",)
    assert not [name for name in targets(folder, "text", "down_proj", "layers.1") if ".experts." in name]
    assert not [name for name in targets(folder, "text", "shared_experts") if ".experts." in name]
    model, asked = meta(folder), AdapterSettings(2, 4.0, targets=("experts", "v_proj"))
    check_targets(model, load_family(folder).parts["text"], "text.lora", asked)
    add_adapters(model, found, asked, seed=0)
    assert sorted(target_of(name, layer) for name, layer in adapted_modules(model)) == sorted(found)


@pytest.mark.parametrize("said", ["experts", "experts.gate_up_proj"])
def test_adapters_of_experts_are_merged_exported_and_begun_with(
    said: str, qwen3_vl_moe_model: str, tmp_path: Path
) -> None:
    model, asked = qwen3_vl_moe_model, {"text": AdapterSettings(2, 3.0, targets=(said, "q_proj"))}
    beside = plain(model)
    adapt(beside, load_family(model), asked, "cpu")
    weights = {n: torch.randn(p.shape) / 9 for n, p in beside.named_parameters() if is_adapter(n)}
    of_experts = [name for name in weights if ".experts." in name]
    assert len(of_experts) == 3 * 2 * (2 if said == "experts" else 1)  # layers, A and B, matrices
    save_adapter(model, weights, asked, tmp_path / "adapter")
    by_peft = PeftModel.from_pretrained(plain(model), tmp_path / "adapter").eval()
    save_whole(Path(model), merge(model, weights, asked), tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(by_peft), rtol=1e-4, atol=1e-5)
    assert (logits(by_peft) - logits(plain(model))).abs().max() > 1e-3
    begin = {"text": str(tmp_path / "adapter")}
    check_begin(meta(model), load_family(model).parts, asked, begin, model)
    again, part = plain(model), load_family(model).parts["text"]
    read = weight_reader(tmp_path / "adapter")
    add_adapters(again, find_targets(again, part, asked["text"]), asked["text"], seed=0, begin=read)
    held = dict(again.named_parameters())
    assert not [name for name, one in weights.items() if not torch.equal(held[name], one)]
    assert torch.equal(logits(again), logits(by_peft))
    other = {"text": AdapterSettings(4, 3.0, targets=(said, "q_proj"))}
    with pytest.raises(ConfigError, match="rank=4, and the adapter of .* has 2"):
        check_begin(meta(model), load_family(model).parts, other, begin, model)


def test_peft_keeps_the_module_with_its_attributes_and_adds_to_what_it_makes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 3)})
    base = model["a"]
    base.note = "kept"
    base.forward = lambda states: torch.ones(*states.shape[:-1], 3)  # as a slice's own forward is
    model["b"].weight.requires_grad_(False)
    add_adapters(model, ["a"], AdapterSettings(2, 6.0), seed=3)
    ((name, layer),) = adapted_modules(model)
    assert name == "a" and layer.base_layer is base and base.note == "kept"
    states = torch.randn(5, 4)
    assert torch.equal(layer(states), torch.ones(5, 3))  # B begins with zeros
    nn.init.ones_(layer.lora_B[ADAPTER].weight)
    added = 3.0 * states @ layer.lora_A[ADAPTER].weight.T @ layer.lora_B[ADAPTER].weight.T
    torch.testing.assert_close(layer(states), 1.0 + added)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert trained == {
        "a.base_layer.weight": True,
        "a.base_layer.bias": True,
        "a.lora_A.default.weight": True,
        "a.lora_B.default.weight": True,
        "b.weight": False,
        "b.bias": True,
    }
    assert [name for name in trained if is_adapter(name)] == ["a.lora_A.default.weight", "a.lora_B.default.weight"]
    assert plain_name("a.base_layer.weight") == "a.weight"


def test_adapters_of_a_second_part_are_no_second_adapter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 3)})
    with warnings.catch_warnings(action="error", category=UserWarning):  # peft would say so
        add_adapters(model, ["a"], AdapterSettings(2, 6.0, dropout=0.2), seed=0)
        add_adapters(model, ["b"], AdapterSettings(4, 6.0, dropout=0.4), seed=0)
    assert [layer.lora_dropout[ADAPTER].share for _, layer in adapted_modules(model)] == [0.2, 0.4]
    assert [(name, layer.r[ADAPTER]) for name, layer in adapted_modules(model)] == [("a", 2), ("b", 4)]


def test_dropout_is_of_what_enters_and_its_scale_of_the_root_with_rslora() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3)})
    add_adapters(model, ["a"], AdapterSettings(4, 6.0, dropout=0.5, rslora=True), seed=0)
    ((_, layer),) = adapted_modules(model)
    assert isinstance(layer.lora_dropout[ADAPTER], TokenDropout) and layer.lora_dropout[ADAPTER].share == 0.5
    assert layer.scaling[ADAPTER] == 3.0


@pytest.mark.parametrize("part", ["vision", "text"])
def test_a_part_of_a_tied_model_gets_adapters_without_its_embedding(part: str, tied_model: str) -> None:
    """peft asks a model whose head is its embedding for that embedding."""
    family = load_family(tied_model)
    own, model = family.parts[part], meta(tied_model)
    drop_modules(model, (*family.outside(part), *([family.decoder.embedding] if part == "text" else ())))
    chosen = find_targets(model, own, AdapterSettings(2, 4.0))
    with torch.device("meta"):
        add_adapters(model, chosen, AdapterSettings(2, 4.0), seed=0)
    assert len(list(adapted_modules(model))) == len(chosen) > 0
    assert "get_input_embeddings" not in vars(model)


Adapters = dict[str, AdapterSettings]
BOTH = {"vision": AdapterSettings(2, 8.0), "text": AdapterSettings(3, 4.0, targets=("q_proj", "down_proj"))}
DORA = {"text": AdapterSettings(2, 3.0, dora=True, rslora=True)}
CASES = {
    "both parts": (BOTH, Case(Degrees(ulysses=2), Degrees(tensor=2), 2, "float32", lora=tuple(BOTH.items()))),
    "dora and the projector": (
        DORA,
        Case(Degrees(), Degrees(data=2), 2, "float32", lora=tuple(DORA.items()), trainable=("projector",)),
    ),
    "dora of slices": (
        DORA,
        Case(Degrees(), Degrees(data=2, tensor=2), 2, "float32", text_zero_stage=3, fsdp=True, lora=(*DORA.items(),)),
    ),
}


def trained(model: str, case: Case, folder: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint after two steps."""
    feed = make_reader(model, case, [mixed_step()] * 2)
    with Running(model, case) as running:
        for step in range(2):
            running.step(feed.step(step))
        running.save(folder)
    return {name: tensor for part in ("vision", "text") for name, tensor in read_shards(folder / part).items()}


def plain(model: str | Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, made_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    adapters, case = CASES[request.param]
    folder = tmp_path_factory.mktemp("run")
    yield made_model, adapters, trained(made_model, case, folder), folder


def test_a_checkpoint_has_what_was_trained_alone(run: tuple) -> None:
    _, adapters, weights, _ = run
    of_parts = {"vision": "visual", "text": "language_model"}
    for part in adapters:
        own = [name for name in weights if of_parts[part] in name]
        assert own and all(map(is_adapter, own))


def test_merged_it_is_what_peft_makes_of_the_exported_adapter(run: tuple) -> None:
    model, adapters, weights, folder = run
    save_whole(Path(model), merge(model, weights, adapters), folder / "merged")
    count = save_adapter(model, weights, adapters, folder / "adapter")
    merged, by_peft = plain(folder / "merged"), PeftModel.from_pretrained(plain(model), folder / "adapter").eval()
    assert count >= sum(map(is_adapter, weights))
    torch.testing.assert_close(logits(merged), logits(by_peft), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - logits(plain(model))).abs().max() > 1e-3  # and something was learned
    theirs = dict(by_peft.merge_and_unload().named_parameters())
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)


def test_adapters_of_another_model_are_refused(run: tuple, llava_model: str) -> None:
    model, adapters, weights, _ = run
    name = next(name for name in weights if "lora_A" in name)
    with pytest.raises(ModelError, match="is not the model that these adapters were trained beside.*--base"):
        merge(model, weights | {name: weights[name][:, 1:]}, adapters)
    with pytest.raises(ModelError, match="and they lack"):
        merge(model, {n: w for n, w in weights.items() if n != name}, adapters)


def test_what_peft_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    """Dense layers of some models with experts: their `gate_proj` would become the experts'."""
    model, asked = str(save_family("glm4v_moe", tmp_path / "model")), {"text": AdapterSettings(2, 2.0)}
    beside = plain(model)
    adapt(beside, load_family(model), asked, "cpu")
    weights = {n: torch.randn_like(p) for n, p in beside.named_parameters() if is_adapter(n)}
    with pytest.raises(ModelError, match="peft would not read these adapters of a glm4v_moe model.*without --adapter"):
        save_adapter(model, weights, asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged, before = merge(model, weights, asked), dict(plain(model).named_parameters())
    moved = {name for name, weight in merged.items() if name in before and not torch.equal(weight, before[name])}
    assert len(moved) == len(weights) / 2 and "model.language_model.layers.0.mlp.gate_proj.weight" in moved


def test_what_peft_has_no_way_to_say_is_refused(made_model: str, tmp_path: Path) -> None:
    mixed = {"vision": AdapterSettings(2, 2.0, rslora=True), "text": AdapterSettings(2, 2.0)}
    with pytest.raises(ModelError, match="adapters of vision and text differ in dora or rslora.*without --adapter"):
        save_adapter(made_model, {}, mixed, tmp_path / "out")
    name = "model.language_model.layers.0.self_attn.q_proj.base_layer.weight"
    with pytest.raises(ModelError, match="q_proj.weight was trained beside the adapters.*without --adapter"):
        save_adapter(made_model, {name: torch.zeros(1)}, {"text": AdapterSettings(2, 2.0)}, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ModelError, match="is not empty"):
        save_adapter(made_model, {}, {}, tmp_path / "full")


def test_adapters_beside_four_bits_are_not_merged() -> None:
    rounded = AdapterSettings(2, 4.0, quantization="nf4")
    with pytest.raises(ConfigError, match=r"adapters of text were trained beside .*four bits.* --adapter"):
        merge("nowhere", {}, {"vision": AdapterSettings(2, 4.0), "text": rounded})


def test_a_merge_into_16_bits_is_rounded_once(
    llava_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than a layer's matrix is in 32 bits at a time."""
    model, asked = str(tmp_path), {"text": AdapterSettings(2, 2.0)}
    plain(llava_model).to(torch.bfloat16).save_pretrained(model)
    beside = plain(model)
    adapt(beside, load_family(model), asked, "cpu")
    weights = {n: torch.randn(p.shape) for n, p in beside.named_parameters() if is_adapter(n)}
    held, wide = export._load(model), list[int]()
    monkeypatch.setattr(export, "_load", lambda _: held)
    plainly = Linear.merge

    def counted(layer: Linear, **how: Any) -> None:
        wide.append(sum(p.dtype == torch.float32 for n, p in held.named_parameters() if not is_adapter(n)))
        plainly(layer, **how)

    monkeypatch.setattr(Linear, "merge", counted)
    merged = merge(model, weights, asked)
    assert len(wide) == len(weights) // 2 and set(wide) == {1, 2}  # with the bias that some have
    name = next(name for name in weights if "lora_A" in name)
    base, before = name.replace(".lora_A.default", ""), dict(plain(model).named_parameters())
    exact = before[base].double() + weights[name.replace("lora_A", "lora_B")].double() @ weights[name].double()
    assert merged[base].dtype == torch.bfloat16
    assert (merged[base] != exact.to(torch.bfloat16)).float().mean() < 1e-3  # ties of float32's own rounding


KEY = "text.lora.quantization"
ASKED = AdapterSettings(2, 4.0, quantization=NF4)
LAYERS = LayerParts("layers", (), (), ("causal",))
CPU = torch.device("cpu")
installed = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 4)
        self.seen, self.sliced = nn.Linear(64, 64), nn.Linear(64, 64)
        self.sliced.forward = lambda states: states  # as a slice's own forward is

    def forward(self, states: Tensor) -> Tensor:
        return self.down(self.up(states.to(self.seen.weight.dtype)))


def small() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"head": nn.Linear(64, 8), "layers": nn.ModuleList([Layer()])})


def adapted() -> nn.ModuleDict:
    model = small()
    add_adapters(model, ["layers.0.up"], ASKED, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    nn.init.normal_(model["layers"][0].up.lora_B[ADAPTER].weight)
    return model


def test_linear_modules_of_the_layers_that_are_not_trained() -> None:
    """Not the head, a router, adapters, a slice, nor a module whose weight others read."""
    nothing = lambda name: is_adapter(name)
    assert find_quantized(adapted(), LAYERS, nothing) == ("layers.0.up.base_layer", "layers.0.down")
    assert find_quantized(adapted(), LAYERS, lambda name: "down" in name) == ("layers.0.up.base_layer",)


@pytest.mark.parametrize("part", ["vision", "text"])
def test_of_a_model_they_are_those_that_adapters_stand_beside(part: str, made_model: str) -> None:
    family, model = load_family(made_model), meta(made_model)
    own = family.parts[part]
    beside = find_targets(model, own, ASKED)
    with torch.device("meta"):
        add_adapters(model, beside[:3], ASKED, seed=0)
    rules = training_rules(TrainingConfig(), family, [part])
    names = find_quantized(model, own.layers, rules.trains)
    assert tuple(name.removesuffix(".base_layer") for name in names) == beside
    whole = training_rules(TrainingConfig(trainable=["layers.1" if part == "text" else "blocks.1"]), family, [part])
    layers = {name.split(".")[3] for name in find_quantized(model, own.layers, whole.trains)}
    assert layers == {str(number) for number in range(len(own.layers.kinds))} - {"1"}


def test_without_the_package_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda module: None)
    told = f"{KEY}=nf4: bitsandbytes, .* is not installed. Install it on each node"
    with pytest.raises(ConfigError, match=told):
        require_package(KEY)
    with pytest.raises(ConfigError, match=told):
        quantize(adapted(), LAYERS, ASKED, is_adapter, torch.float32, CPU, KEY)


def test_a_package_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("libcudart.so.12 not found")

    monkeypatch.setattr(quantized, "find_spec", lambda module: module)
    monkeypatch.setattr(quantized, "_package", broken)
    with pytest.raises(ConfigError, match=f"{KEY}=nf4: bitsandbytes cannot be loaded: libcudart"):
        quantize(adapted(), LAYERS, ASKED, is_adapter, torch.float32, CPU, KEY)


class Packed(nn.Linear):
    """In bitsandbytes' place: a layer of the same arguments, whose weight is no number any more."""

    def __init__(self, width: int, out: int, bias: bool, compute_dtype: torch.dtype, quant_type: str) -> None:
        super().__init__(width, out, bias)
        self.told = (compute_dtype, quant_type)


def packed(weight: Tensor, requires_grad: bool, **told: Any) -> nn.Parameter:
    assert told.keys() == {"compress_statistics", "quant_type", "module"}
    return nn.Parameter(weight.float().mul(100).round().to(torch.uint8), requires_grad)


def test_its_layers_stand_in_the_others_places(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Packed, Params4bit=packed))
    monkeypatch.setattr(quantized, "find_spec", lambda module: module)
    monkeypatch.setattr(quantized, "_package", lambda: package)
    model = adapted()
    bias = model["layers"][0].up.base_layer.bias
    quantize(model, LAYERS, ASKED, is_adapter, torch.bfloat16, CPU, KEY)
    found = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    assert list(found) == ["layers.0.up.base_layer", "layers.0.down"]
    up, down = found.values()
    assert up.told == (torch.bfloat16, "nf4") and up.bias is bias and down.bias is None
    assert not up.weight.requires_grad and up.training
    kept = up.weight
    cast_parameters(model, torch.bfloat16)
    assert up.weight is kept and up.weight.dtype == torch.uint8  # what is packed is no number to be rounded
    assert up.bias.dtype == model["head"].weight.dtype == torch.bfloat16


def test_parts_whose_layers_read_weights_are_refused(qwen3_vl_moe_model: str, made_model: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}=nf4 with a qwen3_vl_moe model: its layers have experts"):
        check_quantized(load_family(qwen3_vl_moe_model), {"text": ASKED})
    check_quantized(load_family(qwen3_vl_moe_model), {"text": AdapterSettings(2, 4.0), "vision": ASKED})
    check_quantized(load_family(made_model), {"text": ASKED})


@installed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_pefts_layer_does_around_bitsandbytes(dtype: torch.dtype) -> None:
    """Output, and gradients of states and adapters, to the last bit; and something else than unrounded weights."""
    import bitsandbytes
    from peft import LoraConfig, inject_adapter_in_model

    ours, exact, plain = adapted(), adapted(), small().to(dtype)
    quantize(ours, LAYERS, ASKED, is_adapter, dtype, CPU, KEY)
    for name in ("up", "down"):
        owner, own = plain["layers"][0], getattr(plain["layers"][0], name)
        made = bitsandbytes.nn.Linear4bit(
            own.in_features, own.out_features, own.bias is not None, compute_dtype=dtype, quant_type="nf4"
        )
        made.load_state_dict(own.state_dict())
        setattr(owner, name, made.to("cpu"))
    plain.is_loaded_in_4bit = True
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["layers.0.up"]), plain, ADAPTER)
    theirs = plain["layers"][0].up
    assert type(theirs).__module__ == "peft.tuners.lora.bnb"
    plain.load_state_dict({n: p for n, p in ours.state_dict().items() if is_adapter(n)}, strict=False)
    for model in (ours, exact, plain):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    outputs, gradients = [], []
    for model in (ours, plain, exact):
        states = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        layer = model["layers"][0]
        output = layer.down(layer.up(states))
        output.pow(2).sum().backward()
        outputs.append(output.detach())
        gradients.append(
            [states.grad, *(layer.up.get_parameter(f"{n}.{ADAPTER}.weight").grad for n in ("lora_A", "lora_B"))]
        )
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2], rtol=1e-2)
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients[:2], strict=True))


@installed
def test_a_rounded_matrix_takes_the_bytes_that_a_dry_run_counts() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(1024, 1024, bias=False)})])})
    quantize(model, LAYERS, ASKED, lambda name: False, torch.bfloat16, CPU, KEY)
    weight: Any = model["layers"][0]["up"].weight
    state = weight.quant_state
    held = weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert held == int(quantized.BYTES_A_VALUE * 1024 * 1024)
