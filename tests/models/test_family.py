"""Experts, matrices and plugins of families."""

import socket
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModel

from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError, ModelError
from dhp.core.parameters import AdapterSettings
from dhp.models.decoder import Decoder
from dhp.models.empty import list_parameters, part_shape
from dhp.models.registry import import_on_rank, import_plugins, load_family
from dhp.models.shape import hidden_matrices
from dhp.models.types import find_experts
from dhp.objectives.objectives import OBJECTIVES, find_objective
from tests.helpers.tiny_families import save_family

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 64, "num_hidden_layers": 3}
DEEP = {"moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
DEEP |= {"first_k_dense_replace": 1, "n_shared_experts": 2}
EVERY_OTHER = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TEXTS = {
    "qwen3_moe": Qwen3MoeConfig(**{**SMALL, **EVERY_OTHER}, decoder_sparse_step=2),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "glm4_moe": Glm4MoeConfig(**SMALL, **DEEP),
    "deepseek_v3": DeepseekV3Config(**SMALL, **DEEP),
}


def _check(text: PreTrainedConfig) -> None:
    found = find_experts(text)
    with torch.device("meta"):
        layers = AutoModel.from_config(text).layers
    held = [getattr(layer.mlp, "experts", None) for layer in layers]
    assert found.sparse == tuple(experts is not None for experts in held)
    shapes = {tuple(experts.down_proj.shape) for experts in held if experts is not None}
    assert shapes == {(found.count, text.hidden_size, found.width)}
    shared = next(layer.mlp for layer, experts in zip(layers, held, strict=True) if experts is not None)
    assert found.shared == (shared.shared_experts.up_proj.out_features if hasattr(shared, "shared_experts") else 0)


@pytest.mark.parametrize("name", TEXTS)
def test_the_configuration_tells_which_layers_have_which_experts(name: str) -> None:
    _check(TEXTS[name])


def test_those_of_the_families(experts_model: str, qwen3_vl_moe_model: str) -> None:
    for directory in (experts_model, qwen3_vl_moe_model):
        _check(AutoConfig.from_pretrained(directory).get_text_config())
    decoder = load_family(qwen3_vl_moe_model).decoder
    assert decoder.layers.kinds == ("experts", "causal", "experts", "experts")
    assert decoder.shared == tuple(f"model.language_model.layers.{n}.mlp.experts" for n in (0, 2, 3))


def test_a_dense_decoder_has_none(llava_model: str) -> None:
    assert find_experts(Qwen3Config()) is None
    assert load_family(llava_model).decoder.shared == ()


def test_replicas_hold_their_share_and_all_else(experts_model: str) -> None:
    family = load_family(experts_model)
    whole, shared = (
        part_shape(experts_model, family.tower.modules, shared=family.decoder.shared, sharing=n) for n in (1, 2)
    )
    of_experts = 2 * 4 * 3 * 24 * 64  # layers, experts, matrices
    assert shared.total == whole.total == whole.per_rank
    assert shared.per_rank == whole.total - of_experts // 2
    assert shared.replicated == whole.total - of_experts


def _decoder(**text: object) -> Decoder:
    from transformers import LlavaConfig, Qwen3MoeConfig

    return Decoder(LlavaConfig(text_config=Qwen3MoeConfig(**{"num_experts": 4, "moe_intermediate_size": 24} | text)))


@pytest.mark.parametrize(
    ("text", "asked", "told"),
    [
        ({}, {"data": 2, "expert": 3}, r"4 experts among neighbours of text.data=2"),
        ({}, {"tensor": 16}, r"width\(24\) % tensor\(16\)"),
        ({}, {"tensor": 2, "parallelism": "autotp"}, "text.parallelism=autotp with text.tensor=2 of a decoder with"),
        ({"output_router_logits": True}, {"pipeline": 2}, "text.pipeline=2 of a decoder with a load-balancing loss"),
        ({"output_router_logits": True}, {"compile": True}, "text.compile=true of a decoder with a load-balancing"),
    ],
)
def test_what_is_refused_by_name(text: dict, asked: dict, told: str) -> None:
    degrees = {"data": 1, "tensor": 1, "pipeline": 1} | asked
    with pytest.raises(ConfigError, match=told):
        _decoder(num_attention_heads=32, num_key_value_heads=16, **text).check(PartConfig(**degrees))


def test_a_loss_without_a_weight_is_none() -> None:
    assert find_experts(_config(output_router_logits=True, router_aux_loss_coef=0.0)).balance == 0.0
    assert find_experts(_config(output_router_logits=False, router_aux_loss_coef=0.1)).balance == 0.0
    assert find_experts(_config(output_router_logits=True, router_aux_loss_coef=0.1)).balance == 0.1


def _config(**text: object) -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**text)


TOWER = {"attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
DECODER = {*(f"self_attn.{own}_proj" for own in "qkvo"), *(f"mlp.{own}_proj" for own in ("gate", "up", "down"))}


def test_layers_and_projector_but_neither_ends_nor_vectors(made_model: str) -> None:
    family = load_family(made_model)
    shapes = {one.name: one.shape for one in list_parameters(made_model, family)}
    found = hidden_matrices(shapes, family)
    assert {name for name in found if ".0." in name and "blocks" in name} == {
        f"model.visual.blocks.0.{own}.weight" for own in TOWER
    }
    assert {name for name in found if "layers.0." in name} == {
        f"model.language_model.layers.0.{own}.weight" for own in DECODER
    }
    assert {"model.visual.merger.mlp.0.weight", "model.visual.merger.mlp.2.weight"} <= found
    ends = {"lm_head.weight", "model.language_model.embed_tokens.weight", "model.visual.patch_embed.proj.weight"}
    assert ends <= shapes.keys() and not ends & found
    assert not [name for name in found if len(shapes[name]) != 2]
    # What LLaMA-Factory and ms-swift choose by name.
    assert found == {n for n, s in shapes.items() if len(s) == 2 and "embed" not in n and "lm_head" not in n}


def test_a_matrix_whose_name_has_no_dot_before_weight_and_what_is_none(tmp_path: Path) -> None:
    folder = str(save_family("gemma3", tmp_path / "gemma3"))
    family = load_family(folder)
    shapes = {one.name: one.shape for one in list_parameters(folder, family)}
    found = hidden_matrices({**shapes, "model.tower.gate.bias": (1, 4)}, family)
    assert "model.multi_modal_projector.mm_input_projection_weight" in found
    assert not {name for name in found if name.endswith("bias")}


def test_adapters_are_matrices_too(made_model: str) -> None:
    family = load_family(made_model)
    shapes = {one.name: one.shape for one in list_parameters(made_model, family, {"text": AdapterSettings(2, 2.0)})}
    adapters = {name for name in shapes if "lora_" in name}
    assert adapters and adapters <= hidden_matrices(shapes, family)


FAMILY = """
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
class Config(PreTrainedConfig):
    model_type = "{name}"
class Model(PreTrainedModel):
    config_class = Config
AutoConfig.register("{name}", Config)
AutoModelForImageTextToText.register(Config, Model)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of PYTHONPATH."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_registers_a_family_once(folder: Path) -> None:
    (folder / "plugin_one.py").write_text(FAMILY.format(name="plugin_one"))
    import_plugins(["plugin_one"])
    import_plugins(["plugin_one"])  # on a rank that is a fork of a process that has it
    from transformers import CONFIG_MAPPING

    assert CONFIG_MAPPING["plugin_one"].__module__ == "plugin_one"


def test_a_module_registers_an_objective(folder: Path) -> None:
    (folder / "plugin_sum.py").write_text(
        "import dhp\nfrom dhp.objectives.objective import CrossEntropy\n"
        "class Mine(CrossEntropy): pass\ndhp.OBJECTIVES['mine'] = Mine\n"
    )
    with pytest.raises(ConfigError, match="training.objective=mine does not exist.* in plugins"):
        find_objective("mine")
    try:
        import_plugins(["plugin_sum"])
        assert type(find_objective("mine")).__module__ == "plugin_sum"
    finally:
        OBJECTIVES.pop("mine", None)


def test_a_package_registers_by_a_module_below_it(folder: Path) -> None:
    (folder / "plugin_package").mkdir()
    (folder / "plugin_package" / "__init__.py").write_text("import plugin_package.model\n")
    (folder / "plugin_package" / "model.py").write_text(FAMILY.format(name="plugin_package"))
    import_plugins(["plugin_package"])


@pytest.mark.parametrize("name", ["plugin.py", "/tmp/plugin", "../plugin", ".plugin", "a b", "a;b", ""])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a Python module.*PYTHONPATH=FOLDER"):
        import_plugins([name])


def test_a_misspelt_module_is_told_the_nearest(folder: Path) -> None:
    (folder / "plugin_two.py").write_text(FAMILY.format(name="plugin_two"))
    with pytest.raises(ModelError, match=r"--plugin=plugin_tow: there is no module .*; did you mean plugin_two\?$"):
        import_plugins(["plugin_tow"], "--plugin")
    assert "plugin_two" not in sys.modules


def test_a_module_beside_is_not_imported_but_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_beside.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    with pytest.raises(ModelError, match=f"plugin_beside.py lies in this folder, .*PYTHONPATH={tmp_path}"):
        import_plugins(["plugin_beside"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import a_package_that_is_not_there", "it imports a_package_that_is_not_there, which is not installed"),
        ("1 / 0", r"fails when it is imported \(ZeroDivisionError: division by zero\)"),
        ("raise SystemExit(3)", r"fails when it is imported \(SystemExit: 3\)"),
        ("x = ", r"fails when it is imported \(SyntaxError"),
        (
            "x = 1",
            "no vision-language model and nothing with dhp.*AutoModelForImageTextToText.register.*dhp.OBJECTIVES",
        ),
    ],
)
def test_a_module_that_is_no_family_is_refused(text: str, told: str, folder: Path) -> None:
    name = f"plugin_wrong_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(ModelError, match=f"plugins={name}: .*{told}"):
        import_plugins([name])


def test_a_module_of_another_kind_registers_nothing() -> None:
    with pytest.raises(ModelError, match="registers no vision-language model"):
        import_plugins(["json"])


def test_a_rank_names_its_node() -> None:
    with pytest.raises(
        ModelError, match=f"^on the node {socket.gethostname()}, plugins=plugin_far: there is no module"
    ):
        import_on_rank(["plugin_far"])
