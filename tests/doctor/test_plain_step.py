"""The first step of a run beside the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.core.errors import ConfigError
from dhp.doctor import plain_step
from dhp.doctor.plain_step import FirstStep, PlainStep, compare_first_step
from tests.helpers.runs import train


def test_the_first_step_of_a_layout_is_the_plain_models(tiny_assets: Path) -> None:
    done = train("doctor", "loss", "--config-name=tiny", f"tiny_assets={tiny_assets}", module="dhp")
    assert (done.status, done.left) == (0, ()), done.stdout + done.stderr
    assert "run directory" not in done.stdout  # it is gone by then
    *_, loss_line, norm_line, last = done.stdout.splitlines()
    assert last.startswith("the first step is the plain model's")
    for line, name in ((loss_line, "loss"), (norm_line, "gradient norm")):
        assert line.startswith(name) and float(line.split()[-2]) < 1e-5


def test_a_difference_is_named() -> None:
    found = FirstStep(6.1, 12.5, PlainStep(6.1, 12.0), 1e-4)
    assert not found.equal and found.deviations == {"loss": 0.0, "gradient norm": pytest.approx(0.5 / 12)}
    assert "differs by more than rounding" in found.lines()[-1]


def test_adapters_have_a_loss_to_compare_and_no_norm() -> None:
    found = FirstStep(6.1, None, PlainStep(6.1, 12.0), 1e-4, "text trains adapters")
    assert found.equal and "not compared: text trains adapters" in found.lines()[1]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["vision.dtype=bfloat16"], "different dtypes"),
        (["training.objective=x"], "compared by sft"),
    ],
)
def test_what_cannot_be_compared_is_refused(given: list[str], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_step, "run", lambda *given: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=match):
        compare_first_step(compose_config("tiny", None, given))
