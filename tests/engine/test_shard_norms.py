"""Which parts may have their states between layers cut by tokens, seen without weights or ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError, ModelError
from dhp.engine.build import shard_without_ranks
from dhp.models.empty import empty_slices
from dhp.models.registry import load_family
from dhp.parallel.kernels.replace import INNER, _classes, replace_without_weights
from dhp.parallel.tensor.styles import PARTIAL_OVER, with_fused
from dhp.parallel.tensor.tensor_plan import local_plan
from dhp.plan.model_checks import check_plan
from tests.helpers.tiny_families import save_family

ASKED = PartConfig(tensor=2, pipeline=1, data=1, ulysses=1, ring=1, parallelism="tensor", sequence_sharded_norms=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [("gemma4", "per_layer_input_gate, a matrix beside its attention"), ("gemma4_moe", "experts, beside their router")],
)
def test_layers_with_more_than_blocks_and_norms_are_refused(name: str, why: str, tmp_path: Path) -> None:
    model = str(save_family(name, tmp_path / "model"))
    with pytest.raises(ModelError, match=f"sequence_sharded_norms=true: a Gemma4TextDecoderLayer .*{why}"):
        check_plan("text", ASKED, model, load_family(model))


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
        model = empty_slices(made_model, family.outside(name), 2, part.kept_whole(2), styles)
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
    model = empty_slices(made_model, family.outside("text"), 2, decoder.kept_whole(2), styles)
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
