"""docs/reference/limits.md is made of what the code refuses."""

import re

import pytest

from dhp.config.rules import CANNOT, NOT_BUILT
from scripts.limits import OF_MODELS, PAGE, ROOT, TAKEN, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m scripts.limits`"


@pytest.mark.parametrize("words", [words for _, words, _, _ in OF_MODELS])
def test_what_a_model_is_refused_for_is_said_by_the_code(words: str) -> None:
    parts = [re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8")) for file in (ROOT / "dhp").rglob("*.py")]
    assert any(words in text for text in parts), words


def test_each_limit_is_of_a_kind() -> None:
    assert {kind for _, _, kind, _ in OF_MODELS} == {CANNOT, NOT_BUILT, TAKEN}
    assert f"| {NOT_BUILT} | Collectives between the slices of a layer are not compiled" in page()
