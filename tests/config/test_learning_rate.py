"""Keys of the learning rate: ranges, what belongs together, and the steps of a decay."""

import pytest

from dhp.config.command_line import compose_config
from dhp.config.ranges import DECAYS, LR_SCHEDULES, check_learning_rate, decay_steps
from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError
from dhp.parallel.optim.learning_rates import KINDS, RateCurve, learning_rate_at

STABLE = {"lr_scheduler_type": "warmup_stable_decay"}
COSINE = {"lr_scheduler_type": "cosine"}


def test_each_schedule_and_each_decay_that_may_be_asked_for_is_there():
    assert LR_SCHEDULES == KINDS
    for decay in DECAYS:
        assert learning_rate_at(3, 1.0, 0, RateCurve("warmup_stable_decay", 4, decay_steps=2, decay_type=decay)) < 1


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_defaults_go_with_each_schedule(kind):
    check_learning_rate(TrainingConfig(lr_scheduler_type=kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "choose from constant, linear, cosine, .*; did you mean cosine?"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "; did you mean cosine, with training.min_lr?"),
        ({"lr_scheduler_type": "wsd"}, "; did you mean warmup_stable_decay?"),
        ({"min_lr": 1e-5}, "training.min_lr=1e-05 with training.lr_scheduler_type=constant, which does not read it"),
        (COSINE | {"min_lr": 0.1}, r"0 <= min_lr <= learning_rate\(0.001\). It is a learning rate, not a share"),
        (COSINE | {"min_lr": -0.1}, "training.min_lr=-0.1 is out of range"),
        (COSINE | {"min_lr": float("nan")}, "training.min_lr=nan is out of range"),
        (COSINE | {"lr_num_cycles": 2}, "Set training.lr_scheduler_type=cosine_with_restarts, or leave"),
        (COSINE | {"lr_decay_steps": 2}, "training.lr_decay_steps=2 with .*Set .*=warmup_stable_decay, or leave"),
        (COSINE | {"lr_decay_ratio": 0.2}, "training.lr_decay_ratio=0.2 with"),
        (COSINE | {"lr_decay_type": "linear"}, "training.lr_decay_type=linear with"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_num_cycles": 0}, "lr_num_cycles >= 1"),
        (STABLE | {"lr_decay_steps": -1}, "lr_decay_steps >= 0"),
        (STABLE | {"lr_decay_ratio": 1.1}, "0 <= lr_decay_ratio <= 1"),
        (STABLE | {"lr_decay_type": "lineer"}, "choose from cosine, linear, 1-sqrt; did you mean linear?"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_learning_rate(TrainingConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [(STABLE, 3), (STABLE | {"lr_decay_ratio": 0.5}, 11), (STABLE | {"lr_decay_steps": 6}, 6), (COSINE, 0)],
)
def test_steps_of_the_decay(changes, expected):
    assert decay_steps(TrainingConfig(**changes), 21, 4) == expected


@pytest.mark.parametrize(("key", "value"), [("lr_decay_steps", 6), ("lr_decay_ratio", 0.6)])
def test_a_decay_that_begins_in_the_warmup(key, value):
    with pytest.raises(
        ConfigError, match=rf"training.{key}={value} .*warmup_steps\(5\) \+ decay_steps\(6\) > steps\(10\)"
    ):
        decay_steps(TrainingConfig(**STABLE, **{key: value}), 10, 5)
    assert decay_steps(TrainingConfig(**STABLE, **{key: value}), 11, 4) in (6, 7)


def test_the_warm_up_of_a_group_leaves_room_for_the_decay_too() -> None:
    given = ["training.lr_scheduler_type=warmup_stable_decay", "training.lr_decay_steps=50"]
    groups = ["+training.groups.projector.warmup_steps=80"]
    config = compose_config("tiny", None, [*given, *groups])
    with pytest.raises(ConfigError, match=r"training.groups.projector.warmup_steps\(80\) \+ decay_steps\(50\) > steps"):
        decay_steps(config.training, 100, 10)
    assert decay_steps(compose_config("tiny", None, given).training, 100, 10) == 50
