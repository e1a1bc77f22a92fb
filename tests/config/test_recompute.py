"""What a part recomputes, as a user writes it."""

from __future__ import annotations

import pytest

from dhp.config.layout import read_choices, resolve_recompute
from dhp.config.model_rules import check_layers
from dhp.config.resolve import resolve
from dhp.config.rules import check_budget
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from tests.config.test_resolve import config

LETTERS = {"none": "-", "light": "i", "mlp": "m", "linear": "n", "all": "a"}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", "------"),
        ("full", "aaaaaa"),
        ("auto", "aaaaaa"),
        ("0", "a-----"),
        ("0-2,5", "aaa--a"),
        ("light", "iiiiii"),
        ("mlp:1-2", "-mm---"),
        ("mlp:0-1,3,all:4-5", "mm-maa"),
        ("linear, none:5", "nnnnn-"),
        ("light:0-1, 5", "ii---i"),
    ],
)
def test_layers_by_what_they_recompute(text: str, layers: str) -> None:
    assert "".join(LETTERS[choice] for choice in read_choices(text, 6)) == layers


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("most", "most.*none, full, auto"),
        ("ful", "did you mean full"),
        ("1-", "cannot be read"),
        ("mlp:", "cannot be read"),
        ("mlp1", "cannot be read"),
        ("0,,1", "an empty item"),
        ("-3", "cannot be read"),
        ("4-2", "first of a range"),
        ("6", "not among the 6 layers"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_choices(text, 6, "text.recompute")


@pytest.mark.parametrize(
    ("recompute", "checkpointing", "resolved"),
    [(None, False, "none"), (None, True, "full"), ("full", True, "full"), ("mlp:7", False, "mlp:7")],
)
def test_activation_checkpointing_is_another_word_for_full(
    recompute: str | None, checkpointing: bool, resolved: str
) -> None:
    part = PartConfig(recompute=recompute, activation_checkpointing=checkpointing)
    assert resolve_recompute("vision", part) == resolved


@pytest.mark.parametrize("recompute", ["none", "auto", "0-3"])
def test_two_keys_that_contradict_each_other_are_refused(recompute: str) -> None:
    with pytest.raises(ConfigError, match="Keep vision.recompute alone"):
        resolve(config(vision__recompute=recompute, vision__activation_checkpointing=True))


def test_auto_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="text.recompute=auto without memory.budget_gib"):
        resolve(config(text__recompute="auto", cluster__device="cpu"))
    with pytest.raises(ConfigError, match="memory.budget_gib"):
        resolve(config(text__recompute="auto", memory__budget_gib=0.0))
    check_budget(resolve(config(text__recompute="auto", cluster__device="cpu", memory__budget_gib=0.5)))
    check_budget(resolve(config(text__recompute="auto")))  # of GPUs it is read


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    check_layers("text.recompute", "0-3", 4)
    with pytest.raises(ConfigError, match="text.recompute=0-3: 0-3 is not among the 2 layers; give layers from 0 to 1"):
        check_layers("text.recompute", "0-3", 2)


def test_what_is_resolved_resolves_to_itself() -> None:
    once = resolve(config(vision__activation_checkpointing=True, text__recompute="light"))
    assert resolve(once) == once
