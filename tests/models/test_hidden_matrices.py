"""Which parameters are matrices of hidden layers."""

from __future__ import annotations

from pathlib import Path

from dhp.core.parameters import AdapterSettings
from dhp.models.empty import list_parameters
from dhp.models.registry import load_family
from dhp.models.shape import hidden_matrices
from tests.helpers.tiny_families import save_family

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
