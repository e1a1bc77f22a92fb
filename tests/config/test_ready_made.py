"""The ready-made configurations: composed from groups, and right for the models they are made for."""

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import micro_batches, resolve

# name → actors of each part, (vision data, vision ulysses), (text data, text tensor)
READY = {
    "qwen2_5_vl_3b": (4, (1, 4), (4, 1)),
    "qwen2_5_vl_7b": (4, (1, 4), (4, 1)),
    "qwen2_5_vl_32b": (16, (2, 8), (16, 1)),
    "qwen2_5_vl_72b": (64, (8, 8), (8, 8)),
    "qwen2_5_vl_32b_8gpus": (8, (1, 8), (4, 1)),
    "qwen2_5_vl_72b_32gpus": (32, (4, 8), (16, 1)),
}
FEWER_GPUS = ("qwen2_5_vl_32b_8gpus", "qwen2_5_vl_72b_32gpus")


@pytest.mark.parametrize("name", READY)
def test_degrees_model_and_groups(name):
    config = resolve(compose_config(name))
    vision, text = config.vision, config.text
    found = (vision.num_actors, (vision.data, vision.ulysses), (text.data, text.tensor))
    assert (found, text.num_actors) == (READY[name], READY[name][0])
    size = name.removeprefix("qwen2_5_vl_").partition("_")[0].upper()
    assert vision.model_name == text.model_name == f"Qwen/Qwen2.5-VL-{size}-Instruct"
    zero_stage = 3 if name in FEWER_GPUS else 1
    assert (config.name, vision.zero_stage, config.data.datasets) == (name, zero_stage, ["train"])
    assert micro_batches(config) >= 2


@pytest.mark.parametrize("name", FEWER_GPUS)
def test_two_actors_share_rows_of_16k_with_12_bytes_of_states(name):
    config = resolve(compose_config(name))
    text = config.text
    assert (text.ulysses, text.state_bytes, text.recompute, config.data.limits.text) == (2, 12, "full", 16384)
    assert config.vision.state_bytes == 18


@pytest.mark.parametrize("name", READY)
def test_states_of_decoders_are_cut_by_torch(name):
    """As the files and docs/reference/configuration.md say; auto is DeepSpeed where tensor is 1."""
    assert resolve(compose_config(name)).text.zero_engine == "fsdp"


def test_a_group_is_exchanged_on_the_command_line():
    config = compose_config("qwen2_5_vl_7b", overrides=["vision=data_zero1", "vision.data=4", "model=qwen2_5_vl_3b"])
    assert (config.vision.parallelism, config.vision.num_actors) == ("data", 4)
    assert config.text.model_name == "Qwen/Qwen2.5-VL-3B-Instruct"


@pytest.mark.parametrize("name", READY)
def test_groups_are_exchanged_as_the_page_says(name):
    actors = READY[name][0]
    vision = resolve(compose_config(name, overrides=["vision=data_zero1", "vision.data=null"])).vision
    assert (vision.parallelism, vision.data, vision.ulysses, vision.zero_stage) == ("data", actors, 1, 1)
    asked = ["text=sequence", "text.data=null", "text.zero_stage=0", "training.batch_size=8"]
    text = resolve(compose_config(name, overrides=asked)).text
    assert (text.parallelism, text.data * text.ulysses * text.ring) == ("sequence", actors)


def test_a_section_is_still_a_section_where_a_group_has_its_name():
    config = compose_config("qwen2_5_vl_7b", overrides=["vision={num_actors: 2}", "text.data=1"])
    assert (config.vision.num_actors, config.vision.data, config.text.data) == (2, None, 1)
