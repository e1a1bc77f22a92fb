"""What is taken where a model has not what was asked for, and said."""

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.models.registry import load_family
from dhp.plan.equivalents import take_no_states, take_whole_pictures
from dhp.trainer.preflight import prepare
from tests.helpers.tiny_families import save_family
from tests.plan.test_stage_graph import config_of

RING = ("vision.parallelism=sequence", "vision.num_actors=4", "vision.ring=2", "vision.ulysses=2")


@pytest.fixture(scope="module")
def whole_pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("internvl", tmp_path_factory.mktemp("internvl")))


def test_a_ring_of_whole_pictures_is_ulysses(whole_pictures: str) -> None:
    config = config_of(whole_pictures, *RING)
    taken, notes = take_whole_pictures(config, load_family(whole_pictures))
    assert (taken.vision.ring, taken.vision.ulysses, taken.vision.num_actors) == (1, 4, 4)
    assert len(notes) == 1 and "vision.ring=2 of a internvl model" in notes[0] and "vision.ulysses=4" in notes[0]
    assert taken.text == config.text


def test_a_ring_of_a_tower_by_token_stays(made_model: str) -> None:
    config = config_of(made_model, *RING)
    assert take_whole_pictures(config, load_family(made_model)) == (config, ())


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_cut_states_of_a_part_that_keeps_none_are_none(made_model: str, stage: int) -> None:
    config = config_of(made_model, "vision.parallelism=deepspeed", "vision.num_actors=2", f"vision.zero_stage={stage}")
    taken, notes = take_no_states(config, {"vision": False, "text": True})
    assert (taken.vision.zero_stage, taken.vision.parallelism, taken.vision.data) == (0, "data", 2)
    assert len(notes) == 1 and f"vision.zero_stage={stage} with nothing of vision trained" in notes[0]
    assert take_no_states(config, {"vision": True, "text": True}) == (config, ())


def test_a_run_says_what_it_takes(tiny_assets: Path, tmp_path: Path) -> None:
    said: list[str] = []
    asked = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "training.frozen=[vision,projector]"]
    config = prepare(compose_config("tiny", overrides=[*asked, "vision.zero_stage=1"]), say=said.append)
    assert config.vision.zero_stage == 0
    assert any("vision.zero_stage=0 is taken" in line for line in said)
