"""What holds for every test of layouts beside the plain model."""

import pytest

from dhp.models import lora as adapters
from tests.helpers.layouts import FIRST_OUT


@pytest.fixture(autouse=True)
def from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """B begins with something in the plain model, as it does on the ranks: A has a gradient in the first step, too."""
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
