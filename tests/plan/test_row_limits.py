"""Which of two limits of rows is never reached, beside the rows that the sampler makes."""

from __future__ import annotations

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Loads
from dhp.plan.batches import balance_settings, samples_a_row, unreached

LOADS = Loads(np.full(4000, 1024), np.full(4000, 2048))


def asked(*settings: str) -> Config:
    return resolve(compose_config("qwen2_5_vl_32b_8gpus", overrides=settings))


@pytest.mark.parametrize(
    ("settings", "samples", "told"),
    [
        ([], 8, None),
        (["data.limits.vision=null"], 1, "rows hold 2,048 tokens in the mean, not data.limits.text=16384"),
        (["data.limits.vision=null", "data.balance=isf"], 2, "rows hold 4,096 tokens in the mean"),
        (["data.limits.text=null"], 1, "rows hold 1,024 image tokens in the mean, not data.limits.vision=16384"),
        (["data.limits.vision=4096"], 4, None),  # both are set: which one ends rows is asked for
        (["data.limits.text=null", "data.limits.vision=null"], 1, None),
        (["data.limits.vision=null", "training.micro_batch_size=8", "training.batch_size=64"], 8, None),
    ],
)
def test_rows_and_what_is_said_of_them(settings: list[str], samples: int, told: str | None) -> None:
    config = asked(*settings)
    lines = unreached(config, LOADS)
    assert len(lines) == (told is not None) and (told or "") in "".join(lines)
    assert samples_a_row(config, 2048, 1024) == samples
    limits = balance_settings(config).limits(LOADS, config.training.micro_batch_size)
    packs = choose_method(config.data.balance, None)(LOADS, limits, 64, config.seed)
    assert np.median(packs.counts) == samples
