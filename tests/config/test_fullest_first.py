"""When the fullest steps come first: as asked, and by itself where a plan is made of the first steps."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.config.generate_request import unbalanced
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError
from dhp.plan.batches import feed_settings

BALANCED, PLANNED = "data.balance=balanced", ("text.recompute=auto", "memory.budget_gib=1")
NO_TOWER = ("vision.recompute=auto", "memory.budget_gib=1", "training.frozen=[vision,projector]")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ((), False),
        ((BALANCED,), False),
        (PLANNED, False),
        ((BALANCED, *PLANNED), True),
        ((BALANCED, "vision.recompute=auto", "memory.budget_gib=1"), True),
        ((BALANCED, *NO_TOWER), False),  # backward does not go through it
        ((BALANCED, *NO_TOWER, "vision.lora.rank=2"), True),
        ((BALANCED, *PLANNED, "data.fullest_first=false"), False),
        ((BALANCED, "data.fullest_first=true"), True),
        (("data.fullest_first=false",), False),
    ],
)
def test_null_is_on_where_a_plan_is_made_and_lengths_are_known(settings: tuple[str, ...], wanted: bool) -> None:
    given = compose_config("tiny", overrides=list(settings))
    config = resolve(given)
    assert config.data.fullest_first is wanted and feed_settings(config).balancing.fullest_first is wanted
    assert resolve(config).data.fullest_first is wanted
    assert given.data.fullest_first is None or wanted == given.data.fullest_first


def test_lengths_must_be_known() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(compose_config("tiny", overrides=["data.fullest_first=true"]))
    assert str(caught.value).startswith(
        "data.fullest_first=true with data.balance=random, which knows no lengths. Set "
    )
    trained = resolve(compose_config("tiny", overrides=[BALANCED, "data.fullest_first=true"]))
    assert unbalanced(trained.data).fullest_first is False  # its checkpoints are evaluated on plain rows
