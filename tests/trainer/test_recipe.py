"""What a resumed run may have otherwise is said, and files that its checkpoint does not hold are the same ones."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from dhp.checkpoint.resume import RECIPE, Start
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError
from dhp.trainer.resume import BESIDE, HELD, held_files, recipe
from dhp.trainer.settings import kept_settings


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=list(overrides)))


def start_of(config: Config) -> Start:
    settings = json.loads(json.dumps(kept_settings(config) | {RECIPE: recipe(config)}))
    return Start(Path("step_4"), 4, 0, settings)


def test_every_key_of_both_sections_is_held_free_or_said() -> None:
    said = set(recipe(config_of()))
    for section in HELD:
        keys = {field.name for field in fields(getattr(Config(), section))}
        assert HELD[section] | BESIDE[section] <= keys and not HELD[section] & BESIDE[section]
        assert {key for key in keys if f"{section}.{key}" in said} == keys - HELD[section] - BESIDE[section]
    # In the sampler's order, which it compares.
    keys = ("balance_window", "long_tokens", "limits", "isf_passes", "group_window", "fullest_first")
    by_sampler = {f"data.{key}" for key in keys}
    assert {f"{section}.{key}" for section in HELD for key in HELD[section]} - by_sampler <= set(
        kept_settings(config_of())
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.learning_rate=0.5", "training.learning_rate was 0.0015 up to step 4, and is 0.5 from there on"),
        ("training.betas=[0.8,0.9]", "training.betas was [0.9, 0.999] up to step 4, and is [0.8, 0.9]"),
        ("training.weight_decay=0.5", "training.weight_decay was 0.01"),
        ("training.max_grad_norm=9", "training.max_grad_norm was "),
        ("training.max_steps=9", "training.max_steps was "),
        ("training.lr_scheduler_type=linear", "training.lr_scheduler_type was "),
        ("training.groups.projector={learning_rate: 0.1}", "training.groups was {} up to step 4, and is {'projector'"),
        ("data.packing=false", "data.packing was True up to step 4, and is False from there on"),
        ("data.max_tokens=4000", "data.max_tokens was None"),
        ("data.system_prompt=Hi", "data.system_prompt was None"),
        ("data.max_pixels=4000", "data.max_pixels was "),
        ("data.data_registry.shapes.columns={images: photos}", "data.data_registry.shapes.columns was {}"),
    ],
)
def test_a_change_is_said_and_goes_on(override: str, told: str) -> None:
    start, now = start_of(config_of()), config_of(override)
    start.check(kept_settings(now))
    lines = start.changes(recipe(now))
    assert len(lines) == 2 and lines[0].startswith(told)
    assert lines[1] == "else the recipe is that of step_4"
    assert start.changes(recipe(config_of())) == ["the recipe is that of step_4"]


def test_a_template_that_changed_under_its_name_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}")
    start = start_of(config_of(f"data.chat_template={file}"))
    file.write_text("{{ messages }}!")
    assert start.changes(recipe(config_of(f"data.chat_template={file}")))[0].startswith("data.chat_template was ")


def test_a_run_that_begins_says_nothing() -> None:
    assert Start().changes(recipe(config_of())) == []


@pytest.mark.parametrize("exchanged", ["model", "annotations"])
def test_a_model_or_annotations_exchanged_for_others_of_the_same_shape_are_refused(
    exchanged: str, tmp_path: Path
) -> None:
    model, annotations = tmp_path / "model", tmp_path / "a.jsonl"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights of one model")
    annotations.write_text('["a"]\n')
    own = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = config_of(*own, f"data.data_registry.shapes.annotation_path={annotations}")
    start = Start(Path("step_4"), 4, 0, held_files(config))
    start.check(held_files(config))
    other = {"model": (model / "model.safetensors", b"weights of a second"), "annotations": (annotations, b'["b"]\n')}
    file, content = other[exchanged]
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="contents of .*the model and the data that it began with") as caught:
        start.check(held_files(config))
    assert ("text.model_name" in str(caught.value)) is (exchanged == "model")
    assert ("shapes.annotation_path" in str(caught.value)) is (exchanged == "annotations")


def test_where_they_lie_may_change(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "shards" / "0.tar").write_bytes(b"0")
        own = [f"{part}.model_name={tmp_path / name}" for part in ("vision", "text")]
        found.append(
            held_files(config_of(*own, f"data.data_registry.shapes.annotation_path={tmp_path / name / 'shards'}"))
        )
    assert found[0] == found[1] and len(found[0]) == 2
