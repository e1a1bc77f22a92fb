"""The optimizer is the one that was configured."""

from __future__ import annotations

import torch

from dhp.config.load import compose_config
from dhp.config.resolve import resolve
from dhp.run.settings import stage_settings
from dhp.trainers.recipe import optimizer_maker
from dhp.trainers.settings import OptimizerSettings
from tests.helpers.chains import make_chain

UPDATE = OptimizerSettings(
    learning_rate=0.02,
    betas=(0.7, 0.95),
    eps=1e-3,
    weight_decay=0.3,
    lr_scheduler_type="constant",
    warmup_steps=0,
    total_steps=10,
    max_grad_norm=None,
)


def test_adamw_has_every_configured_value() -> None:
    optimizer = optimizer_maker(UPDATE)([torch.nn.Parameter(torch.zeros(1))])
    found = {name: optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert found == {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3}


def test_what_is_configured_reaches_every_stage() -> None:
    """None of the values is a default, and no two are alike."""
    values = {
        "learning_rate": 0.002,
        "betas": [0.7, 0.95],
        "eps": 1e-3,
        "weight_decay": 0.3,
        "max_grad_norm": 0.25,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    }
    config = resolve(compose_config("tiny", overrides=[f"training.{name}={value}" for name, value in values.items()]))
    expected = OptimizerSettings(0.002, (0.7, 0.95), 1e-3, 0.3, "cosine", 3, 40, 0.25)
    chain = make_chain()
    for stage in chain.stages:
        settings = stage_settings(config, chain, stage, "cpu", 40)
        assert settings.spec == stage and settings.update == expected
