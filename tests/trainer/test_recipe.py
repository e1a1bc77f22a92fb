"""What a resumed run may have otherwise is said, and files that its checkpoint does not hold are the same ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dhp.checkpoint.resume import LAYOUT, RECIPE, Start
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError
from dhp.trainer.resume import BESIDE, HELD, check_rates, check_recipe, free_layout, held_files, rates, recipe
from dhp.trainer.settings import kept_settings


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=list(overrides)))


def start_of(config: Config, steps: int = 60) -> Start:
    kept = {RECIPE: recipe(config) | rates(config, steps), LAYOUT: free_layout(config)}
    settings = json.loads(json.dumps(kept_settings(config) | kept))
    return Start(Path("step_4"), 4, 0, settings, parts=("vision", "text"))


def test_every_key_of_both_sections_is_held_free_or_said() -> None:
    said = set(recipe(config_of()))
    for section in HELD:
        keys = {field.name for field in fields(getattr(Config(), section))}
        assert HELD[section] | BESIDE[section] <= keys and not HELD[section] & BESIDE[section]
        assert {key for key in keys if f"{section}.{key}" in said} == keys - HELD[section] - BESIDE[section]
    # In the sampler's order, which it compares.
    keys = ("balance_window", "long_tokens", "limits", "isf_passes", "fullest_first")
    by_sampler = {f"data.{key}" for key in keys}
    assert {f"{section}.{key}" for section in HELD for key in HELD[section]} - by_sampler <= set(
        kept_settings(config_of())
    )


CHANGES = [
    ("training.learning_rate=0.5", "training.learning_rate was 0.0015", "the learning rate follows one curve"),
    ("training.betas=[0.8,0.9]", "training.betas was [0.9, 0.999]", "averages of gradients"),
    ("training.weight_decay=0.5", "training.weight_decay was 0.01", ""),
    ("training.max_grad_norm=9", "training.max_grad_norm was ", ""),
    ("training.lr_scheduler_type=linear", "training.lr_scheduler_type was ", "the learning rate follows one curve"),
    ("training.groups.projector={learning_rate: 0.1}", "training.groups was {}", ""),
    ("data.packing=false", "data.packing was True", "the samples that are left"),
    ("data.max_tokens=4000", "data.max_tokens was None", ""),
    ("data.system_prompt=Hi", "data.system_prompt was None", ""),
    ("data.max_pixels=4000", "data.max_pixels was ", ""),
    ("data.data_registry.shapes.columns={images: photos}", "data.data_registry.shapes.columns was {}", ""),
]


@pytest.mark.parametrize(("override", "said", "why"), CHANGES)
def test_a_change_is_refused_and_where_it_is_asked_for_said(override: str, said: str, why: str) -> None:
    plain, now = config_of(), config_of(override)
    start = start_of(plain)
    start.check(kept_settings(now))
    with pytest.raises(CheckpointError) as caught:
        check_recipe(now, start)
    assert said in str(caught.value) and why in str(caught.value)
    key = override.partition("=")[0].replace(".projector", "").replace(".shapes.columns", "")
    check_recipe(config_of(override, f"training.resume_changes=[{key}]"), start)
    lines = start.changes(recipe(now), free_layout(now))
    assert len(lines) == 2 and lines[0].startswith(said)
    assert lines[1] == "else the recipe is that of step_4"
    assert start.changes(recipe(plain), free_layout(plain)) == ["the recipe is that of step_4"]


def test_a_run_may_be_longer_where_its_rates_do_not_know_its_end() -> None:
    constant, linear = config_of("training.warmup_steps=3"), config_of("training.lr_scheduler_type=linear")
    start = start_of(constant, 60)
    check_rates(constant, start, 90)
    start = start_of(linear, 60)
    check_rates(linear, start, 60)
    with pytest.raises(CheckpointError, match="training.total_steps was 60 and is 90; training.warmup_steps was"):
        check_rates(linear, start, 90)
    asked = config_of("training.lr_scheduler_type=linear", "training.resume_changes=[training.total_steps]")
    with pytest.raises(CheckpointError, match="configured: training.warmup_steps was"):
        check_rates(asked, start, 90)
    check_rates(config_of("training.lr_scheduler_type=linear", "training.resume_changes=[training]"), start, 90)


@pytest.mark.parametrize("change", ["min_lr=0.0001", "lr_num_cycles=3"])
def test_the_shape_of_a_curve_stays(change: str) -> None:
    waves = "training.lr_scheduler_type=cosine_with_restarts"
    with pytest.raises(CheckpointError, match="training.(min_lr was 0.0|lr_num_cycles was 1) .*follows one curve"):
        check_recipe(config_of(waves, f"training.{change}"), start_of(config_of(waves)))


def test_where_a_rate_is_constant_its_fall_may_begin_at_another_step() -> None:
    stable = ["training.lr_scheduler_type=warmup_stable_decay", "training.warmup_steps=3"]
    ten = config_of(*stable, "training.lr_decay_steps=10")
    assert rates(ten, 60) == {
        "training.total_steps": 60,
        "training.warmup_steps": 3,
        "training.lr_decay_steps": 10,
    }
    start = start_of(ten, 60)  # behind step 4
    for now, steps in ((ten, 90), (ten, 14), (config_of(*stable, "training.lr_decay_steps=20"), 60)):
        check_rates(now, start, steps)
    with pytest.raises(CheckpointError, match="training.total_steps was 60 and is 13"):  # it would be falling
        check_rates(ten, start, 13)
    with pytest.raises(CheckpointError, match="training.total_steps was 13 and is 60"):  # it has fallen
        check_rates(ten, start_of(ten, 13), 60)
    with pytest.raises(CheckpointError, match="training.lr_decay_steps was 9 and is 10"):
        check_rates(ten, start_of(config_of(*stable, "training.lr_decay_steps=9"), 13), 13)
    with pytest.raises(CheckpointError, match="training.warmup_steps was 3 and is 5"):  # it would be rising
        check_rates(config_of(*stable[:1], "training.warmup_steps=5", "training.lr_decay_steps=10"), start, 60)


def test_the_optimizer_stays() -> None:
    whole = "vision.zero_stage=0"
    start = start_of(config_of(whole))
    with pytest.raises(CheckpointError, match="training.optimizer was adamw and is muon. Reason: .*has other states"):
        start.check(kept_settings(config_of(whole, "training.optimizer=muon")))
    start.check(kept_settings(config_of(whole)))
    unsaid = {key: value for key, value in start.settings.items() if key != "training.optimizer"}
    older = replace(start, settings=unsaid)  # which had AdamW alone
    older.check(kept_settings(config_of(whole)))
    with pytest.raises(CheckpointError, match="training.optimizer was adamw and is adafactor"):
        older.check(kept_settings(config_of(whole, "training.optimizer=adafactor")))


def test_layouts_may_change() -> None:
    now = config_of("text.tensor=1", "text.num_actors=1", "text.parallelism=none", "text.zero_stage=0")
    start = start_of(config_of())
    start.check(kept_settings(now), ["vision", "text"])
    check_recipe(now, start)
    assert start.changes(recipe(now), free_layout(now))[-1] == (
        "another layout than the checkpoint's, whose tensors are cut anew: text.num_actors 2 → 1, text.tensor 2 → 1"
    )


def test_a_template_that_changed_under_its_name_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}")
    start = start_of(config_of(f"data.chat_template={file}"))
    file.write_text("{{ messages }}!")
    now = config_of(f"data.chat_template={file}")
    with pytest.raises(CheckpointError, match="data.chat_template was "):
        check_recipe(now, start)
    assert start.changes(recipe(now), free_layout(now))[0].startswith("data.chat_template was ")


def test_a_run_that_begins_says_nothing() -> None:
    assert Start().changes(recipe(config_of()), free_layout(config_of())) == []


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
