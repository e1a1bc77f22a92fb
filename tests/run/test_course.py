"""Training stages one after another: each from the one before it, and from where it stopped."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from dhp.__main__ import main as command
from dhp.base.errors import ConfigError
from dhp.config.load import compose_config
from dhp.config.schema import StageEntry
from dhp.run.course import run_course
from tests.helpers.runs import ONE_ACTOR_EACH, tiny, train
from tests.run.test_failures import wait_for_steps

FIRST = "stages.one={recipe: alignment, settings: {training: {max_steps: 2, learning_rate: 0.01}}}"
SECOND = (
    "stages.two={recipe: context_extension, rope_theta: 5.0e4, max_positions: 8192, "
    "settings: {training: {max_steps: 300, save_steps: 1, save_total_limit: 2}}}"
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def test_a_course_goes_on_in_the_stage_that_was_stopped(tiny_assets: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    arguments = tiny(tiny_assets, root, *ONE_ACTOR_EACH, f"+{FIRST}", f"+{SECOND}")

    def interrupt(process: subprocess.Popen[str]) -> None:
        wait_for_steps(root / "2_two", 2)
        process.send_signal(signal.SIGINT)

    stopped = train(*arguments, meanwhile=interrupt)
    assert stopped.status == 130 and stopped.left == (), stopped.stderr
    assert "the course stops in stage 2, two; the same command with this run_dir goes on there" in stopped.stdout
    assert list(json.loads((root / "stages.json").read_text())) == ["1_one"]
    done = len((root / "2_two" / "metrics.jsonl").read_text().splitlines())
    again = train(*arguments, f"stages.two.settings.training.max_steps={done + 1}")
    assert again.status == 0 and again.left == (), again.stderr
    assert "stage 1 of 2, one: done" in again.stdout and "continuing after step" in again.stdout
    told = json.loads((root / "stages.json").read_text())
    assert [(name, one["steps"]) for name, one in told.items()] == [("1_one", 2), ("2_two", done + 1)]
    _check_models(tiny_assets / "model", root, tmp_path)


def _check_models(model: Path, root: Path, folder: Path) -> None:
    """The second stage begins with what the first one ended with; what it trained is in its export."""
    before, start = weights(model), weights(root / "2_two" / "start")
    assert command(["export", str(root / "1_one"), str(folder / "one")]) == 0
    for name, value in weights(folder / "one").items():
        assert torch.equal(start[name], value)
    changed = {name for name in before if not torch.equal(before[name], start[name])}
    assert changed == {name for name in before if "merger" in name}
    assert command(["export", str(root / "2_two"), str(folder / "two")]) == 0
    text = AutoConfig.from_pretrained(folder / "two").get_text_config()
    assert (text.rope_parameters["rope_theta"], text.max_position_embeddings) == (5e4, 8192)
    end = weights(folder / "two")
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} <= {
        *("q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "norm", "input_layernorm"),
        "post_attention_layernorm",
    }
    assert any("q_proj" in name for name in changed) and not any("visual" in name for name in changed)


def test_a_mistake_in_a_later_stage_is_told_before_the_first_begins(tiny_assets: Path, tmp_path: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"])
    wrong = StageEntry("context_extension", {"vision": {"zero_stage": 1}})
    config.stages = {"one": StageEntry("alignment"), "two": wrong}
    with pytest.raises(ConfigError, match="stage 2 of 2, two: vision.zero_stage=1 with nothing of vision trained"):
        run_course(config, lambda _: pytest.fail("it began"), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_first_stage_may_raise_positions_without_a_copy_of_its_weights(tiny_assets: Path, tmp_path: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}"])
    config.stages = {"far": StageEntry(rope_theta=7e4)}
    begun = []

    def stop(prepared) -> None:  # type: ignore[no-untyped-def]
        begun.append(prepared.text.model_name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_course(config, stop, lambda _: None)
    start = tmp_path / "run" / "1_far" / "start"
    assert begun == [str(start)]
    assert AutoConfig.from_pretrained(start).get_text_config().rope_parameters["rope_theta"] == 7e4
    assert (start / "model.safetensors").is_symlink()
    model = AutoConfig.from_pretrained(tiny_assets / "model").get_text_config()
    assert model.rope_parameters["rope_theta"] == 1e4
    assert all(torch.equal(value, weights(start)[name]) for name, value in weights(tiny_assets / "model").items())
