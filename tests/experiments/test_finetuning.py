"""What is not trained keeps no bytes, and the plain loop has the adapters that ours has."""

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from dhp.core.parameters import ADAPTER
from dhp.models.registry import load_family
from experiments.finetuning import __main__
from experiments.finetuning.__main__ import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Left,
    Step,
    Timed,
    measure,
    require_bytes,
    share_left,
)
from experiments.pair import VISION
from tests.helpers.tiny_families import save_family


@pytest.mark.slow
def test_what_is_not_trained_takes_no_bytes() -> None:
    rows = {row["train"]: row for row in measure(1, {"tower": 32, "decoder": 32, "layers": 2}, side=8)}
    assert list(rows) == ["all", "projector", "nothing"]
    # Of widths 4 × 32 and 32: the norm, two matrices and their biases, in float32.
    projector = 4 * (32 + 128 * 128 + 128 + 128 * 32 + 32)
    assert rows["projector"]["gradient_bytes"] == projector
    assert rows["projector"]["optimizer_bytes"] == 2 * projector
    assert rows["all"]["optimizer_bytes"] == 2 * rows["all"]["gradient_bytes"] > 2 * projector
    assert rows["nothing"]["optimizer_bytes"] == rows["nothing"]["gradient_bytes"] == 0
    assert rows["nothing"]["vision_backward_s"] == 0
    assert rows["all"]["speed_ratio"] == rows["all"]["bound_ratio"] == 1


def test_the_bound_leaves_what_is_trained() -> None:
    full = Step(10.0, {FORWARD: 2.0, BACKWARD: 3.0, OPTIMIZER: 1.0}, 0.0)
    assert share_left(full, Left(1.0, 1.0)) == 1
    assert share_left(full, Left(0.0, 0.0)) == pytest.approx(0.6)
    assert share_left(full, Left(0.5, 0.0)) == pytest.approx(0.75)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "save_model", lambda name, folder: str(save_family(name, folder)))


@pytest.mark.usefixtures("tiny")
@pytest.mark.slow
def test_adapters_alone_are_kept_and_the_plain_loop_keeps_as_much() -> None:
    rows = {row["train"]: row for row in __main__.measure_lora(1)}
    assert list(rows) == ["all", "lora_text", "lora_both"]
    kept = [row["optimizer_bytes"] for row in rows.values()]
    assert kept[1] < kept[2] < kept[0] and kept == [row["plain_optimizer_bytes"] for row in rows.values()]
    assert all(row["optimizer_bytes"] == 2 * row["gradient_bytes"] for row in rows.values())
    assert rows["all"]["speed_ratio"] == 1
    for row in rows.values():
        assert row["to_plain"] == pytest.approx(row["step_s"] / row["plain_step_s"], rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_step_that_is_not_the_same_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "CLOSE", -1.0)
    with pytest.raises(AssertionError, match="losses before any update differ"):
        next(__main__.measure_lora(1))


def test_peft_puts_the_plain_models_adapters_where_ours_are(tmp_path: Path) -> None:
    model = str(save_family(__main__.MODEL, tmp_path))
    adapted = __main__.add_peft(
        AutoModelForImageTextToText.from_pretrained(model), load_family(model), __main__.ADAPTED[__main__.OF_TEXT]
    )
    trained = {name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(f".{ADAPTER}." in name and "language_model.layers" in name for name in trained)
    layers = load_family(model).config.text_config.num_hidden_layers
    assert len(trained) == layers * 7 * 2  # matrices of each, A and B


def test_bytes_that_nobody_needs_are_told() -> None:
    class CachedPicture:
        gradient_bytes = 8
        trainer = type("Trainer", (), {"optimizer": None})()
        trained_bytes = staticmethod(lambda: 4)
        optimizer_bytes = staticmethod(lambda: 8)

    stage: Timed = CachedPicture()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="all: 4 bytes of vision are trained, but it keeps 8 of gradients"):
        require_bytes("all", {VISION: stage})
