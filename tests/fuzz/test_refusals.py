"""Refused draws are counted by what docs/reference/limits.md says of their messages."""

from itertools import islice
from pathlib import Path

import pytest

from dhp.config.rules import CANNOT, NOT_BUILT
from dhp.core.errors import ConfigError, ModelError
from scripts.limits import TAKEN
from tests.fuzz import refusals
from tests.fuzz.draws import Draw, draws
from tests.fuzz.refusals import ACCEPTED, MISTAKE, count_refusals, kind_of

SLICED = (
    "text.compile=true with text.tensor=4: collectives between the slices of a layer are not compiled here. Set "
    "text.tensor=1, or text.compile=false."
)
WHOLE = (
    "text.pipeline=2 with text.parallelism=autotp: DeepSpeed's layers are not cut into stages. Set "
    "text.parallelism=tensor or pipeline, or text.pipeline=1."
)
HEADS = "text.tensor=2: its layers are of no kind for which one is known"
TOO_MANY = "text.pipeline=2 with text.virtual_stages=2 needs a layer for each run of layers, but text has 3"


@pytest.mark.parametrize(
    ("message", "kind"),
    [(SLICED, NOT_BUILT), (WHOLE, CANNOT), (HEADS, NOT_BUILT), (TOO_MANY, MISTAKE), (f"{SLICED}\n{WHOLE}", CANNOT)],
)
def test_a_message_has_the_kind_of_its_limit(message: str, kind: str) -> None:
    assert kind_of(message) == kind


def test_each_draw_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter([ConfigError(SLICED), [], ["a ring …, which is taken"], ModelError(HEADS), ConfigError(SLICED)])

    def check(draw: Draw, folder: str) -> list[str]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(refusals, "check_draw", check)
    monkeypatch.setattr(refusals, "save_family", lambda name, folder: folder)
    kinds, messages = count_refusals(islice(draws(1), 5), tmp_path)
    assert kinds == {NOT_BUILT: 3, ACCEPTED: 1, TAKEN: 1}
    assert sorted(messages.values()) == [1, 2]


def test_what_is_known_to_be_refused_is_drawn_to_count_it() -> None:
    """And draws that are run are what they were."""
    steered, all_of = ([*islice(draws(4, unbuilt), 400)] for unbuilt in (False, True))
    sharded = lambda drawn: {one.family for one in drawn if one.axes["text norms"] == "sharded"}
    assert "gemma4_moe" in sharded(all_of) and "gemma4_moe" not in sharded(steered)
    chunks = lambda drawn: any(one.axes["mlp_chunks"] == "2" and one.axes["experts"] != "whole" for one in drawn)
    assert chunks(all_of) and not chunks(steered)
