"""The ready-made configurations: composed from groups, and right for the models they are made for."""

import pytest

from dhp.config.command_line import compose_config
from dhp.config.devices import nodes
from dhp.config.layout import DEGREES
from dhp.config.resolve import resolve
from dhp.config.steps import micro_batches
from dhp.core.errors import ConfigError
from dhp.models.pretrained import config_source
from dhp.models.registry import load_family
from dhp.plan.batches import assumed_rows
from dhp.plan.count.samples import assumed_equal, equal_samples
from tests.helpers.rows import slow_but

# name → actors of each part, (vision data, vision ulysses), (text data, text tensor)
READY = {
    "qwen2_5_vl_3b": (4, (1, 4), (4, 1)),
    "qwen2_5_vl_7b": (4, (1, 4), (4, 1)),
    "qwen2_5_vl_32b": (16, (2, 8), (16, 1)),
    "qwen2_5_vl_72b": (64, (8, 8), (8, 8)),
    "qwen2_5_vl_32b_8gpus": (8, (1, 8), (4, 1)),
    "qwen2_5_vl_72b_32gpus": (32, (4, 8), (16, 1)),
    "qwen2_5_vl_7b_tensor": (4, (1, 4), (1, 4)),
    "qwen2_5_vl_32b_8gpus_tensor": (8, (1, 8), (1, 8)),
}
LONG_ROWS = ("qwen2_5_vl_72b", "qwen2_5_vl_32b_8gpus", "qwen2_5_vl_72b_32gpus", "qwen2_5_vl_32b_8gpus_tensor")
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
    config = compose_config("qwen2_5_vl_7b", overrides=["vision=data_zero1", "model=qwen2_5_vl_3b"])
    assert (config.vision.parallelism, config.vision.num_actors) == ("data", 4)
    assert config.text.model_name == "Qwen/Qwen2.5-VL-3B-Instruct"


# What a choice makes of 16 actors, in nodes of eight: degrees that are not 1, ZeRO's stage and engine.
CHOICES = {
    "vision": {
        "data": ({"data": 16}, 0, "deepspeed"),
        "data_zero1": ({"data": 16}, 1, "deepspeed"),
        "data_zero3": ({"data": 16}, 3, "fsdp"),
        "ulysses": ({"data": 2, "ulysses": 8}, 0, "deepspeed"),
        "ulysses_zero1": ({"data": 2, "ulysses": 8}, 1, "deepspeed"),
        "ulysses_zero3": ({"data": 2, "ulysses": 8}, 3, "fsdp"),
        "ring": ({"ring": 16}, 0, "deepspeed"),
        "ring_ulysses": ({"ulysses": 8, "ring": 2}, 0, "deepspeed"),
        "tensor": ({"data": 2, "tensor": 8}, 0, "fsdp"),
        "pipeline": ({"pipeline": 8, "data": 2}, 0, "deepspeed"),
    },
    "text": {
        "data": ({"data": 16}, 0, "deepspeed"),
        "data_zero2": ({"data": 16}, 2, "fsdp"),
        "data_zero3": ({"data": 16}, 3, "fsdp"),
        "zero": ({"data": 16}, 1, "deepspeed"),
        "sequence": ({"data": 2, "ulysses": 8}, 0, "deepspeed"),
        "sequence_zero3": ({"data": 2, "ulysses": 8}, 3, "fsdp"),
        "pairs_zero3": ({"data": 8, "ulysses": 2}, 3, "fsdp"),
        "ring": ({"ring": 16}, 0, "deepspeed"),
        "ring_sequence": ({"ulysses": 8, "ring": 2}, 0, "deepspeed"),
        "tensor": ({"data": 2, "tensor": 8}, 0, "fsdp"),
        "tensor_zero3": ({"data": 2, "tensor": 8}, 3, "fsdp"),
        "pipeline": ({"pipeline": 8, "data": 2}, 0, "deepspeed"),
        "tensor_pipeline": ({"pipeline": 2, "tensor": 8}, 0, "fsdp"),
    },
}


EVERY = [(part, choice) for part in CHOICES for choice in CHOICES[part]]
FEW = (("vision", "ulysses_zero1"), ("vision", "pipeline"), ("text", "pairs_zero3"), ("text", "tensor"))


@pytest.mark.parametrize(("part", "choice"), slow_but(EVERY, *FEW))
def test_one_key_exchanges_the_parallelism_of_a_part(part, choice):
    """The model of 32B takes them all: its heads and layers are checked too."""
    config = resolve(compose_config("qwen2_5_vl_32b", overrides=[f"{part}={choice}"]))
    own, (degrees, *zero) = getattr(config, part), CHOICES[part][choice]
    assert {degree: getattr(own, degree) for degree in DEGREES if getattr(own, degree) > 1} == degrees
    assert [own.zero_stage, own.zero_engine] == zero and own.dtype == "bfloat16"
    assert (config.training.schedule == "1f1b") == (own.pipeline > 1)
    load_family(config_source(own.model_name)).parts[part].check(own)
    for name in ("qwen2_5_vl_7b", *FEWER_GPUS):
        resolve(compose_config(name, overrides=[f"{part}={choice}"]))


def test_choices_are_those_of_the_table_and_go_together():
    for part, choices in CHOICES.items():
        with pytest.raises(ConfigError, match=f"choose from {', '.join(sorted(choices))}"):
            compose_config("qwen2_5_vl_32b", overrides=[f"{part}=no_such"])
    asked = ["vision=data_zero1", "text=tensor", "vision.num_actors=8", "text.num_actors=4"]
    config = resolve(compose_config("qwen2_5_vl_7b", overrides=asked))
    assert (config.vision.data, config.text.tensor, config.text.data) == (8, 4, 1)


def test_groups_over_nodes_are_equal_and_as_few_as_can_be():
    assert [nodes(actors) for actors in (1, 8, 12, 16, 20, 64)] == [None, None, 2, 2, 4, 8]


@pytest.mark.parametrize("name", READY)
def test_rows_hold_the_tokens_that_the_file_names(name):
    config = resolve(compose_config(name))
    rows, limits = assumed_rows(config), config.data.limits
    assert rows.samples * rows.tokens == limits.text == (16384 if name in LONG_ROWS else 8192)
    family = load_family(config_source(config.text.model_name))
    assert equal_samples(config, family, assumed_equal(config)).loads(config).worst.tokens == limits.text


def test_a_section_is_still_a_section_where_a_group_has_its_name():
    config = compose_config("qwen2_5_vl_7b", overrides=["vision={num_actors: 2}", "text.data=1"])
    assert (config.vision.num_actors, config.vision.data, config.text.data) == (2, None, 1)


def test_a_group_is_laid_over_a_file_that_composes_none() -> None:
    for asked in (["vision=data_zero1", "text=tensor"], ["+vision=data_zero1", "+text=tensor"]):
        config = compose_config("tiny", overrides=asked)
        assert (config.vision.parallelism, config.vision.zero_stage, config.text.parallelism) == ("data", 1, "tensor")
