"""Layouts for fewer devices are found and checked before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config, with_words
from dhp.config.resolve import training_stages
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.supervise.attempt import ElasticLayout, ElasticLayouts
from dhp.trainer.planned_layout import _fewer, find_layouts
from dhp.trainer.preflight import prepare

ONE = "vision.num_actors=1 vision.parallelism=none vision.zero_stage=0 text.num_actors=1 text.parallelism=none"


@pytest.fixture
def compose(tiny_assets: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A run of the embedded default with these layouts."""

    def made(elastic: Sequence[str], *overrides: str) -> tuple[Config, Config]:
        own = [f"tiny_assets={tiny_assets}", f"run_dir={tmp_path / 'run'}", "training.max_restarts=1"]
        config = compose_config("tiny", overrides=[*own, *overrides])
        config.training.elastic = list(elastic)
        return config, prepare(config)

    return made


def test_named_layouts_are_ordered_by_devices(compose) -> None:  # type: ignore[no-untyped-def]
    said: list[str] = []
    three = "text.num_actors=3 text.parallelism=data training.empty_rows=true"
    config, prepared = compose([ONE, three], "text.num_actors=4")
    assert find_layouts(config, prepared, said.append) == ElasticLayouts(
        ElasticLayout(4), (ElasticLayout(3, tuple(three.split())), ElasticLayout(1, tuple(ONE.split())))
    )
    assert said[1] == f"training.elastic: with 1 of 4 devices, {ONE}"


def test_planned_layouts_are_layouts_of_the_same_run(compose) -> None:  # type: ignore[no-untyped-def]
    config, prepared = compose(["auto"])
    layouts = find_layouts(config, prepared)
    (one,) = layouts.smaller
    assert (layouts.own.devices, one.devices) == (2, 1)
    assert "layout=given" in one.words and "text.num_actors=1" in one.words
    assert f"training.micro_batch_size={prepared.training.micro_batch_size}" in one.words or not any(
        word.startswith("training.micro_batch_size") for word in one.words
    )
    again = prepare(with_words(config, one.words), new_run=False)
    assert again.training.batch_size == prepared.training.batch_size


def test_a_planned_layout_is_named_whole_as_are_those_beside_it(compose) -> None:  # type: ignore[no-untyped-def]
    """With layout=auto a word alone would be lost: a resumed run has the layout of its record."""
    config, prepared = compose([ONE], "text.num_actors=2", "text.tensor=2")
    layouts = find_layouts(config, prepared, planned=True)
    own, one = layouts.own.words, layouts.smaller[0].words
    assert own[0] == one[0] == "layout=given" and "text.tensor=2" in own and "text.num_actors=2" in own
    assert prepare(with_words(config, own), new_run=False).text == prepared.text
    assert not any(word.startswith("text.tensor=2") for word in one) and one[-5:] == tuple(ONE.split())
    assert len({word.partition("=")[0] for word in one}) == len(one)


@pytest.mark.parametrize(
    ("elastic", "said"),
    [
        (["text.num_actors=2"], r"training.elastic\[0\]=text.num_actors=2: it takes 2 devices, and the run itself 2"),
        ([f"{ONE} training.batch_size=4"], "neither data nor training: training.batch_size would be 4, not 8"),
        ([f"{ONE} training.learning_rate=1"], "training.learning_rate would be 1.0, not 0.0015"),
        ([ONE, "text.num_actor=1"], r"training.elastic\[1\].*did you mean text.num_actors"),
        (["text.num_actors"], "text.num_actors is no setting; write key=value"),
        (["text.num_actors=one"], "text.num_actors"),
        (["text.num_actors=3 vision.num_actors=1"], r"training.elastic\[0\]"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(compose, elastic: list[str], said: str) -> None:  # type: ignore[no-untyped-def]
    config, prepared = compose(elastic)
    with pytest.raises(ConfigError, match=said):
        find_layouts(config, prepared)


def test_it_needs_restarts_and_one_layout(compose, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="training.max_restarts > 0"):
        compose([ONE], "training.max_restarts=0")
    config, _ = compose([ONE])
    with pytest.raises(ConfigError, match="each stage has a layout of its own"):
        training_stages(config, tmp_path)


def test_numbers_of_devices_that_are_planned() -> None:
    assert _fewer(4) == [3, 2, 1] and _fewer(1) == []
    assert _fewer(64) == [56, 48, 40, 32, 24, 16, 8]
