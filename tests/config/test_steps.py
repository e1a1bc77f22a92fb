"""How many micro-batches a step has, and how many steps a warm-up."""

import pytest

from dhp.config.resolve import resolve
from dhp.config.steps import micro_batches, vision_batch, warmup_steps
from dhp.core.errors import ConfigError
from tests.config.test_resolve import config


def test_micro_batches():
    changes = {"text__parallelism": "data", "text__num_actors": 2}
    assert micro_batches(resolve(config(training__batch_size=12, training__micro_batch_size=3, **changes))) == 2


@pytest.mark.parametrize(("given", "batch"), [(1, 1), (4, 4), (6, 6), (9, 6), (None, 6)])
def test_micro_batches_of_a_pass_of_the_tower(given, batch):
    asked = config(training__batch_size=6, training__micro_batch_size=1, training__vision_batch=given)
    assert vision_batch(resolve(asked)) == batch


def test_a_pass_of_no_micro_batch_is_refused():
    with pytest.raises(ConfigError, match="training.vision_batch=0"):
        resolve(config(training__vision_batch=0))


@pytest.mark.parametrize(
    ("ratio", "steps", "total", "expected"),
    [(0.0, None, 60, 0), (0.03, None, 60, 2), (1.0, None, 7, 7), (0.5, 3, 60, 3), (0.5, 0, 60, 0)],
)
def test_warmup_steps(ratio, steps, total, expected):
    assert warmup_steps(config(training__warmup_ratio=ratio, training__warmup_steps=steps), total) == expected


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps\(9\) > steps\(8\)"):
        warmup_steps(config(training__warmup_steps=9), 8)
