"""Training stages: what each is configured as."""

from __future__ import annotations

from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.config.devices import shipped_directory
from dhp.config.resolve import GROUP, resolve, training_stages
from dhp.config.schema import Config, StageEntry
from dhp.core.errors import ConfigError

RECIPES = shipped_directory() / GROUP


def run_of(**stages: StageEntry) -> Config:
    config = compose_config("tiny", overrides=["run_dir=runs/five"])
    config.stages = dict(stages)
    return config


def test_a_stage_has_its_recipe_then_its_settings() -> None:
    settings: dict[str, Any] = {"training": {"max_steps": 3}, "text": {"num_actors": 1}}
    first, second = training_stages(
        run_of(alignment=StageEntry(settings=settings), far=StageEntry("context_extension", rope_theta=1e6)), RECIPES
    )
    assert (first.number, first.name, first.config.run_dir) == (1, "alignment", "runs/five/1_alignment")
    assert (first.config.training.trainable, first.config.training.max_steps) == (["projector"], 3)
    assert first.config.text.num_actors == 1 and second.config.text.num_actors == 2
    assert second.config.training.learning_rate == 2e-5 and second.config.text.lora.targets[0] == "q_proj"
    assert (second.rope_theta, second.max_positions, second.config.run_dir) == (1e6, None, "runs/five/2_far")
    assert first.config.training.resume == "auto" and not first.config.stages


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_each_recipe_alone_is_a_run(name: str) -> None:
    config = resolve(compose_config("tiny", overrides=[f"+{GROUP}={name}"]))
    (stage,) = training_stages(run_of(**{name: StageEntry()}), RECIPES)
    assert config.training.trainable == stage.config.training.trainable
    assert config.text.lora.rank == (8 if name.startswith("context_") else 0)
    length = name.removeprefix("context_")
    assert config.data.max_tokens == (int(length) if length.isdigit() else None)
    assert not length.isdigit() or config.text.parallelism == ("tensor" if length == "8192" else "sequence")


@pytest.mark.parametrize(
    ("name", "entry", "told"),
    [
        ("a", StageEntry("alignmnt"), "stages.a.recipe=alignmnt does not exist in .*; did you mean alignment?"),
        ("a", StageEntry(settings={"trainin": {}}), "stages.a.settings: trainin is not a key; did you mean training?"),
        ("a", StageEntry(settings={"training": {"max_step": 1}}), "training.max_step is not a key; did you mean"),
        ("a", StageEntry(settings={"run_dir": "x"}), "stages.a.settings.run_dir: the run sets it for all"),
        ("a/b", StageEntry(), "stages.a/b: the name becomes a directory's"),
        ("a", StageEntry(rope_theta=-1.0), "stages.a.rope_theta=-1.0 must be positive"),
    ],
)
def test_what_is_no_stage_is_refused(name: str, entry: StageEntry, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        training_stages(run_of(**{name: entry}), RECIPES)
