"""Optimizers: what exists, and what goes with each."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.rules import check_optimizer
from dhp.config.schema import Config
from dhp.core.errors import ConfigError

WHOLE = ("training.optimizer=muon", "vision.zero_stage=0")


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=list(overrides)))


def test_muon_with_whole_states_and_with_fsdp() -> None:
    config = config_of(*WHOLE, "training.muon_momentum=0.9", "training.muon_adjust_lr=original")
    check_optimizer(config)
    assert (config.training.optimizer, config.vision.zero_engine) == ("muon", "deepspeed")  # which has nothing to do
    cut = config_of(*WHOLE, "text.parallelism=data", "text.zero_stage=3")
    assert cut.text.zero_engine == "fsdp"  # auto
    assert config_of("text.parallelism=data", "text.zero_stage=3").text.zero_engine == "deepspeed"


DATA = ("text.parallelism=data",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.optimizer=moun"], "training.optimizer=moun does not exist; .*did you mean muon?"),
        (["training.optimizer=adamw_torch"], "did you mean adamw?"),
        ([*WHOLE, "training.muon_momentum=1"], "0 <= muon_momentum < 1"),
        (
            [*WHOLE, "training.muon_adjust_lr=none"],
            "training.muon_adjust_lr=none does not exist; choose from match",
        ),
        (["training.muon_momentum=0.9"], "training.muon_momentum=0.9 is out of range: training.optimizer=muon, which"),
        (["training.muon_adjust_lr=original"], "training.optimizer=muon, which alone reads it"),
        ([WHOLE[0], "vision.zero_stage=1"], "with vision.zero_stage=1 and vision.zero_engine=deepspeed: .*=fsdp with"),
        ([*WHOLE, *DATA, "text.zero_stage=2", "text.zero_engine=deepspeed"], "with text.zero_stage=2 and text.zero_en"),
        (
            [*WHOLE, "text.parallelism=deepspeed", "text.zero_stage=2"],
            "text.parallelism=data in the place of dee",
        ),
        (
            [*WHOLE, "text.dtype=bfloat16", "text.state_bytes=12"],
            "training.optimizer=muon with text.state_bytes=12: ",
        ),
        ([*WHOLE, "text.host_moments=true"], "training.optimizer=muon with text.host_moments=true: rows"),
        (["training.optimizer=adafactor"], "training.optimizer=adafactor with vision.zero_stage=1 and .*but adafactor"),
        (["training.optimizer=adafactor", WHOLE[1], "training.muon_momentum=0.9"], "muon, which alone reads it"),
        ([*WHOLE, "text.parallelism=autotp"], "with text.parallelism=autotp: .*Set text.parallelism=tensor"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)
