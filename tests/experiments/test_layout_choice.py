"""The table of which layout when: what is asked, how rows are written, and that the page has those of results/."""

import pytest

from experiments.layout_choice.__main__ import BEGIN, DEVICES, END, MODELS, PAGE, TOKENS, table, with_table, words_of
from tests.helpers.figures import rows

ROW = {
    "model": "7b", "devices": 8, "tokens": 16384, "fits": True, "text": "data 8, zero 3 fsdp", "vision": "ulysses 8",
    "text_recompute": "none:0,light:1-19,none:20-27", "vision_recompute": "none", "tokens_s_device": 6135, "mfu": 0.382,
    "gib": 70.4, "sure": False,
}  # fmt: skip


def test_a_million_tokens_a_step_whatever_the_row() -> None:
    assert "training.batch_size=256" in words_of("3b", 8, 4096) and "training.batch_size=16" in words_of("3b", 8, 65536)
    assert {"devices=1x8", "devices=4x8", "devices=1x4"} == {words_of("3b", n, 4096)[1] for n in (8, 32, 4)}


def test_rows_are_written_with_what_is_uncertain() -> None:
    instead = ["devices=16", "device=b200", "more"]
    nothing = {"model": "72b", "devices": 8, "tokens": 4096, "fits": False, "instead": instead}
    head, line, fitting, lacking = table([ROW, nothing, {"made_on": {}}]).splitlines()
    assert head.count("|") == line.count("|") == fitting.count("|") == lacking.count("|")
    assert fitting == (
        "| 7B | 8 | 16,384 | data 8, zero 3 fsdp | ulysses 8 | mixed: none, light; none | 6,135 | 38% | 70.4? |"
    )
    assert lacking.startswith("| 72B | 8 | 4,096 | nothing fits; devices=16, or device=b200 would |")
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(with_table(page, [ROW]), [nothing]) == with_table(page, [nothing])
    with pytest.raises(ValueError, match="each on a line of its own"):
        with_table("no marks", [ROW])


def test_the_page_has_the_rows_that_are_here() -> None:
    """Else: `python -m experiments.layout_choice --table results/layout_choice.jsonl`."""
    found, page = rows("layout_choice"), PAGE.read_text(encoding="utf-8")
    assert with_table(page, found) == page
    assert {(row["model"], row["devices"], row["tokens"]) for row in found} == {
        (model, devices, tokens) for model in MODELS for devices in DEVICES for tokens in TOKENS
    }
