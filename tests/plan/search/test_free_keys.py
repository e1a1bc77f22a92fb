"""What a search keeps of a configuration, and what it may set."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.core.errors import ConfigError
from dhp.plan.search.free_keys import ALL, ROWS, SCHEDULE, find_held, freed, one_actor_each, with_settings


def test_what_the_file_sets_is_kept_and_may_be_freed() -> None:
    config = compose_config("qwen2_5_vl_72b_32gpus")
    held = find_held(config)
    assert {"vision.data", "text.zero_stage", "vision.recompute", ROWS} <= set(held.keys)
    assert "text.zero_stage" not in find_held(config, free=["text.zero_stage"]).keys
    assert find_held(config, free=[ALL]).keys == (ROWS,)  # rows of data.limits.text tokens
    assert find_held(config, free=[ALL, ROWS]).keys == ()
    assert held.layouts(config)["text"] == held.of("text") - {"recompute"}


def test_the_command_line_is_kept() -> None:
    overrides = ["text.zero_stage=0", "training.micro_batch_size=4", "training.schedule=1f1b"]
    keys = find_held(compose_config("tiny", overrides=overrides), overrides).keys
    assert keys == ("vision.zero_stage", "text.zero_stage", ROWS, SCHEDULE)


def test_a_degree_that_follows_from_the_actors_is_fixed_with_its_value() -> None:
    config = compose_config("tiny")
    given = freed(config, find_held(config, fix=["text.tensor"]))
    assert (given.text.tensor, given.text.parallelism, given.text.num_actors) == (2, "none", 1)
    assert (given.vision.ulysses, given.vision.zero_stage, given.vision.recompute) == (None, 1, "auto")


def test_the_data_do_not_depend_on_layouts() -> None:
    alone = one_actor_each(compose_config("tiny", overrides=["cluster.chain=true", "vision.recompute=full"]))
    assert (alone.vision.num_actors, alone.vision.zero_stage, alone.cluster.chain) == (1, 0, False)


def test_settings_bring_along_what_would_contradict_them() -> None:
    config = compose_config("tiny", overrides=["text.activation_checkpointing=true", "text.cuts=[1]"])
    found = with_settings(config, find_held(config, free=[ALL]), {"text.pipeline": 1, "text.recompute": "none"})
    assert found["text.activation_checkpointing"] is False and found["text.cuts"] is None


@pytest.mark.parametrize("what", ["fix", "free"])
def test_an_unknown_key_is_refused(what: str) -> None:
    names = {what: ["text.tensors"]}
    with pytest.raises(ConfigError, match=f"{what}=text.tensors is no key .* did you mean text.tensor"):
        find_held(compose_config("tiny"), **names)
