"""Which parameters rules select, and what group each is in."""

from __future__ import annotations

import pytest

from dhp.core.parameters import ALL, GroupRule, ParameterGroup, Selector, TrainingRules, is_inside

NAMES = (
    "model.visual.blocks.1.attn.qkv.weight",
    "model.visual.merger.mlp.0.weight",
    "model.language_model.layers.1.self_attn.q_proj.weight",
    "model.language_model.layers.1.self_attn.q_proj.bias",
    "model.language_model.layers.11.mlp.up_proj.weight",
    "model.language_model.norm.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("merger", [1]),
        ("layers.1", [2, 3]),  # not layers.11
        ("q_proj", [2, 3]),
        ("q_proj.bias", [3]),
        ("*bias", [3]),
        ("*norm*", [5]),
        ("norm", [5]),
        ("layers.1?", [4]),
        ("layers.[02-9]", []),
        ("layers.[1]", [2, 3]),
        ("model.*.weight", [0, 1, 2, 4, 5]),
        ("proj", []),  # a piece is a whole name between dots
        ("*_proj", [2, 3, 4]),
        ("lm_head.weight", [6]),
        ("language_model.norm.weight", [5]),
        ("l.norm", []),
        ("mlp.0.weigh", []),
        ("(merger)+", []),  # of a regular expression nothing means anything
        ("mo.el", []),
    ],
)
def test_a_pattern_names_whole_pieces(pattern: str, found: list[int]) -> None:
    assert [at for at, name in enumerate(NAMES) if Selector(pattern).fits(name)] == found


def test_a_part_is_its_modules_without_those_of_another() -> None:
    tower = Selector("vision", ("model.visual",), ("model.visual.merger",))
    assert [name for name in NAMES if tower.fits(name)] == [NAMES[0]]
    assert is_inside("model.visual", ["model.visual"]) and not is_inside("model.visuals.a", ["model.visual"])


def test_what_is_frozen_beats_what_is_trainable() -> None:
    rules = TrainingRules((Selector("layers.*"), Selector("merger")), (Selector("*bias"),))
    assert [name for name in NAMES if rules.trains(name)] == [NAMES[1], NAMES[2], NAMES[4]]
    assert rules.selects and not ALL.selects and all(map(ALL.trains, NAMES))


def test_later_groups_beat_earlier_ones_in_what_they_say() -> None:
    rules = TrainingRules(
        groups=(
            GroupRule("deep", (Selector("layers.11"), Selector("norm")), 0.1, None, 5),
            GroupRule("light", (Selector("*norm*"),), None, 0.0),
            GroupRule("still", (Selector("lm_head"),)),
        )
    )
    default = ParameterGroup("text", 1.0, 0.5, 2)
    assert rules.group(NAMES[2], default) == default
    assert rules.group(NAMES[4], default) == ParameterGroup("deep", 0.1, 0.5, 5)
    assert rules.group(NAMES[5], default) == ParameterGroup("deep+light", 0.1, 0.0, 5)
    assert rules.group(NAMES[6], default) == ParameterGroup("still", 1.0, 0.5, 2)


def test_what_no_rule_is_about_has_no_rules_name() -> None:
    rules = TrainingRules(groups=(GroupRule("vision", (Selector("visual"),)), GroupRule("rest of vision", ())))
    assert rules.default_name("vision") == "rest of rest of vision" and rules.default_name("text") == "text"
