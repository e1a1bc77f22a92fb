"""dhp.doctor.card and dhp.cli.card: what was verified of a model, and when that is stale."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from dhp.cli.card import main
from dhp.core.errors import ConfigError
from dhp.core.parameters import ALL
from dhp.doctor.card import EXACT, LAYOUTS, Card, Layout, Resumed, as_markdown, as_yaml, versions
from dhp.doctor.plain_model import read_plain
from dhp.tiny.looks import family_names
from dhp.tiny.tiny_model import make_family

# Their cards say so: rounding in float32 grows in them. gemma4: gradient norms 1.1e-6 apart; qwen3_5_moe: 1e-12 in the
# first step, 1e-2 in the fourth, where the plain model is 2.8e-1 off itself when weights move by 1e-14 of themselves.
NOT_EQUAL = {"gemma4", "qwen3_5_moe"}
CARDS = Path(__file__).parents[2] / "docs" / "reference" / "cards"

CARD = Card(
    "llava",
    "llava",
    "dhp doctor model --make llava out=DIR",
    "abc1234",
    {"dhp": "1", "torch": "2"},
    (Layout("1 + 1", (), 0.0, 2e-16), Layout("1 + pipeline 2", ("text.pipeline=2",), refused="no stages here. Set 1")),
    (Resumed("1 + 1", "1 + 1", 2, 0, 0.0), Resumed("1 + 1", "1 + pipeline 2", 2, 1, 3e-9)),
    94,
    1.5e-15,
    (("a", "a"), ("b", "b")),
    "python -m dhp card llava",
    "",
    "2026-11-29",
)


def test_a_page_says_what_was_tried() -> None:
    page = as_markdown(CARD)
    assert page.startswith("# llava\n\nVerified: llava, as `dhp doctor model --make llava out=DIR` makes it, 4 steps")
    assert "| 1 + 1 | equal to the bit | 2.0e-16 |\n| 1 + pipeline 2 | refused: no stages here | |" in page
    assert "resumed in the same layout: 0 of 2 losses differ.\n" in page
    assert "resumed as 1 + pipeline 2: 1 of 2 losses differ, by 3.0e-09.\n" in page
    assert "2 of 2 are those of plain transformers'" in page and "at commit abc1234, with dhp 1, torch 2." in page


def test_a_page_says_why_there_are_no_answers() -> None:
    page = as_markdown(replace(CARD, answers=(), unanswered="state that no cache keeps: export it"))
    assert "- Answers: none by dhp: state that no cache keeps.\n" in page


def test_a_page_says_what_rounding_does_to_the_plain_model() -> None:
    page = as_markdown(replace(CARD, weights_error=2 * EXACT, rounding=(2e-7, 3e-6)))
    assert "6e-08 of itself off, which is float32's rounding: losses 2.0e-07, gradient norms 3.0e-06." in page


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": (replace(CARD.layouts[0], loss_error=2 * EXACT),)},
        {"layouts": (replace(CARD.layouts[0], norm_error=2 * EXACT),)},
        {"resumed": (replace(CARD.resumed[1], error=2 * EXACT),)},
        {"weights_error": 2 * EXACT},
        {"answers": (("a", "a"), ("b", "c"))},
        {"layouts": (replace(CARD.layouts[0], loss_error=float("nan")),)},
    ],
)
def test_one_difference_is_enough(changes: dict) -> None:
    assert CARD.verified and yaml.safe_load(as_yaml(CARD))["verified"]
    other = replace(CARD, **changes)
    assert not other.verified and "**Not equal in all that was tried**" in as_markdown(other)


def test_the_plain_model_of_experts_computes_in_float64(tmp_path: Path) -> None:
    model = read_plain(str(make_family("qwen3_vl_moe", tmp_path / "model")), torch.float64, "cpu", ALL)
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.dtype == torch.float64 and bool(logits.isfinite().all())


@pytest.mark.slow
def test_a_family_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["internvl", f"out={tmp_path}"]) == 0
    card = yaml.safe_load((tmp_path / "internvl.yaml").read_text(encoding="utf-8"))
    assert [one["name"] for one in card["layouts"] if one["refused"]] == []
    assert all(one["loss_error"] < 1e-12 for one in card["layouts"]) and card["weights_error"] < 1e-9
    assert len(card["answers"]) == 16 and [one["losses"] for one in card["resumed"]] == [2, 2]


def test_every_family_has_a_card() -> None:
    assert sorted(file.stem for file in CARDS.glob("*.yaml")) == sorted(family_names())
    index = (CARDS / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name}.md)" in index for name in family_names())


BEFORE = {"transformers": "5.23.0"}  # of the last update: all cards take an hour of a machine, and follow one by one


@pytest.mark.parametrize("name", family_names())
def test_a_card_is_not_stale(name: str) -> None:
    """Made with what is installed now or was before the last update, of the layouts that are tried now: or
    `python -m scripts.cards` again. The family itself is held to what is installed by the tests of families."""
    card = yaml.safe_load((CARDS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert card["versions"] in (versions(), versions() | BEFORE)
    assert {one["name"]: tuple(one["settings"]) for one in card["layouts"]} == dict(LAYOUTS)
    assert card["verified"] == (name not in NOT_EQUAL) and (CARDS / f"{name}.md").is_file()
    for one in card["layouts"] if name in NOT_EQUAL else ():
        errors = one["loss_error"], one["norm_error"]
        assert one["refused"] or all(mine <= rounding for mine, rounding in zip(errors, card["rounding"], strict=True))


def test_what_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"layout=1 is no setting of card: out=DIR is"):
        main(["llava", "layout=1"])
