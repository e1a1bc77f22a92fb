"""Stages that a GPU cannot hold are refused before anything is loaded."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError
from dhp.models.pretrained import config_source
from dhp.plan.run_plan import plan_run
from dhp.trainer.dry_run import require_room


def test_what_stages_keep_is_held_against_the_gpu() -> None:
    """Of the 3B 18.5 GB of text, 6.0 of vision and two contexts with their communicators: see a dry run."""
    config = resolve(compose_config("qwen2_5_vl_3b", overrides=["cluster.device=cuda"]))
    plan = plan_run(config, config_source(config.text.model_name))
    require_room(plan, None)  # nobody knows
    require_room(plan, 28 * 10**9)
    with pytest.raises(ConfigError) as caught:
        require_room(plan, 24 << 30)
    said = str(caught.value)
    assert "keep 27.5 GB between steps (vision 7.5 GB, text 20.0 GB: weights" in said and "it has 25.8 GB" in said
    assert "text.zero_stage=3" in said and "cluster.collocate=false" in said
