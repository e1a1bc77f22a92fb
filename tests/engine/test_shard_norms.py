"""Which parts may have their states between layers cut by tokens, seen without weights or ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.part import PartConfig
from dhp.core.errors import ConfigError, ModelError
from dhp.models.registry import load_family
from dhp.trainer.preflight import check_plan
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
