"""A stage kind is a record: what docs/developers/adding-a-stage-kind.md adds has an engine and tokens of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dhp.core import kinds
from dhp.core.kinds import StageKind, tokens_of
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.engines import make_rank

TOKENS = np.array([0, 1, 2, 3, 4, 0])
RADAR = StageKind("radar", "dhp.engine.encoder_engine:EncoderEngine", tokens=(4,), counted="echoes")


@pytest.fixture
def radar(monkeypatch: pytest.MonkeyPatch) -> StageKind:
    monkeypatch.setitem(kinds.KINDS, "radar", RADAR)
    return RADAR


def test_each_encoder_has_the_tokens_of_its_kind(radar: StageKind) -> None:
    parts = ("vision", "audio", "radar", "text")
    found = {part: tokens_of(part, TOKENS, parts).tolist() for part in parts[:-1]}
    assert found["vision"] == [False, True, True, False, False, False]
    assert found["audio"] == [False, False, False, True, False, False]
    assert found["radar"] == [False, False, False, False, True, False]


def test_tokens_of_a_part_that_a_run_has_not_are_visions() -> None:
    """Some families number kinds of pictures on from 2."""
    assert tokens_of("vision", TOKENS, ("vision", "text")).tolist() == [False, True, True, True, True, False]


def test_its_ranks_are_of_its_engine(radar: StageKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderEngine, "__init__", lambda self, settings: None)
    settings: Any = SimpleNamespace(spec=SimpleNamespace(part="radar", name="radar"))
    assert type(make_rank(settings)) is EncoderEngine


def test_its_count_says_whether_a_step_has_work_for_it(radar: StageKind) -> None:
    engine = object.__new__(EncoderEngine)
    engine.spec = SimpleNamespace(part="radar")
    for echoes in (0, 3):
        assert engine.is_active(SimpleNamespace(images=1, echoes=echoes, total_weight=2)) == (echoes > 0)
