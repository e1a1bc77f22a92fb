"""Runs that are bound by one thing each: the sentence names it, and expects the gain that its removal gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dhp.report.bound import HEALTHY, Cause, find_causes, sentence, times_of
from dhp.report.run_record import read_run
from tests.helpers.made_runs import healthy_ranks, make_run


def slow_text_rank(step: int) -> Mapping[str, Any]:
    """Rank 1 of text takes 1.5 times as long, for which rank 0 waits in collectives."""
    ranks = healthy_ranks()
    ranks["text"] = {
        "forward": [0.15, 0.225],
        "backward": [0.3, 0.45],
        "optimizer": [0.02, 0.03],
        "comm": [0.245, 0.01],
    }
    return ranks


def uneven_vision(step: int) -> Mapping[str, Any]:
    """One rank of vision has 1.4 times the mean's work, the other 0.6 times."""
    ranks = healthy_ranks()
    ranks["vision"] = {"forward": [0.21, 0.09], "backward": [0.42, 0.18], "comm": [0.01, 0.37]}
    return ranks


def sending(step: int) -> Mapping[str, Any]:
    """Collectives of text take 0.6 s."""
    ranks = healthy_ranks()
    ranks["text"]["comm"] = [0.6, 0.61]
    return ranks


def tower_on_one_device(step: int) -> Mapping[str, Any]:
    """Vision has one rank of two devices."""
    ranks = healthy_ranks()
    ranks["vision"] = {"forward": [0.3], "backward": [0.6], "comm": [0.0]}
    return ranks


def largest(run_dir: Path) -> Cause:
    record = read_run(run_dir)
    times = times_of(record)
    assert times is not None
    return find_causes(record, times)[0]


MADE: dict[str, tuple[dict[str, Any], str, float, str]] = {
    # made with, kind, the share of the step that would go, what the sentence names
    "data": ({"step_s": lambda step: 1.5, "data_s": 0.5}, "data", 0.5 / 1.5, "data.num_workers higher than 1"),
    "rank": ({"seconds": slow_text_rank, "step_s": lambda step: 1.2}, "slow rank", 0.235 / 1.2, "text rank 1"),
    "work": (
        {
            "seconds": uneven_vision,
            "work": lambda step: {"vision": [1.4, 0.6], "text": [1.0, 1.0]},
            "step_s": lambda step: 1.2,
        },
        "uneven work",
        0.18 / 1.2,
        "data.balance=balanced",
    ),
    "link": ({"seconds": sending, "step_s": lambda step: 1.6}, "link", 0.6 / 1.6, "text.tensor is 2: try fewer"),
    "saves": (
        {"saves": {step: 0.8 for step in range(2, 21, 2)}, "config": {"training": {"save_steps": 2}}},
        "save",
        0.4 / 1.4,
        "training.save_steps=2",
    ),
    "tower": (
        {
            "seconds": tower_on_one_device,
            "work": lambda step: {"vision": [1.0], "text": [1.0, 1.0]},
            "step_s": lambda step: 1.4,
        },
        "heavy part",
        0.45 / 1.4,
        "vision.num_actors=2",
    ),
    "long sample": (
        {
            "step_s": lambda step: 8.0 if step in (9, 17) else 1.0,
            "flops": lambda step: 9000 if step in (9, 17) else 1000,
        },
        "long sample",
        14.0 / 32.0,
        "data.max_tokens",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_the_sentence_names_what_bounds_a_run_and_its_gain(name: str, tmp_path: Path) -> None:
    made, kind, share, words = MADE[name]
    run_dir = make_run(tmp_path / "run", **made)
    cause = largest(run_dir)
    assert cause.kind == kind
    assert cause.share == pytest.approx(share, rel=0.1)
    record = read_run(run_dir)
    said = sentence(record, times_of(record))
    assert words in said and f"{1 / (1 - cause.share):.2f} times as fast" in said


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run"))
    times = times_of(record)
    assert times is not None and all(cause.share < HEALTHY for cause in find_causes(record, times))
    assert sentence(record, times).startswith("This run is healthy")


def test_a_slow_rank_is_not_taken_for_uneven_work_nor_the_other_way_round(tmp_path: Path) -> None:
    for name, other in (("rank", "uneven work"), ("work", "slow rank")):
        record = read_run(make_run(tmp_path / name, **MADE[name][0]))
        times = times_of(record)
        assert times is not None
        assert all(cause.share < HEALTHY for cause in find_causes(record, times) if cause.kind == other)


def test_two_stages_with_devices_of_their_own_wait_for_the_heavier_one(tmp_path: Path) -> None:
    def seconds(step: int) -> Mapping[str, Any]:
        return {
            "vision": {"forward": [0.2, 0.2], "comm": [0.0, 0.0]},
            "text": {"forward": [1.0, 1.0], "comm": [0.0, 0.0]},
        }

    run_dir = make_run(tmp_path / "run", seconds=seconds, config={"cluster": {"collocate": False}})
    cause = largest(run_dir)
    assert (cause.kind, round(cause.share, 3)) == ("heavy part", 0.4)
    assert "text" in cause.what and "text.num_actors" in cause.change


@pytest.mark.parametrize(
    ("cluster", "text", "gain"),
    [
        ({"collocate": True}, ["text"], None),
        ({}, ["text"], None),
        ({"collocate": False}, ["text"], "text.num_actors), or share them"),
        ({"collocate": True}, ["text.0", "text.1"], "text.partition=exact"),
        ({"collocate": True, "chain": True}, ["text"], "(text.num_actors): a step"),
    ],
)
def test_what_shares_its_devices_is_not_told_to_share_them(
    cluster: dict[str, bool], text: list[str], gain: str | None, tmp_path: Path
) -> None:
    """Processes that compete for one device are busy for more seconds than the step takes."""

    def seconds(step: int) -> Mapping[str, Any]:
        heavy = {name: {"forward": [0.9 - 0.5 * at], "comm": [0.0]} for at, name in enumerate(text)}
        return {"vision": {"forward": [0.45], "comm": [0.0]}, **heavy}

    work = {name: [1.0] for name in ("vision", *text)}
    made = make_run(tmp_path / "run", seconds=seconds, work=lambda step: work, config={"cluster": cluster})
    record = read_run(made)
    said = sentence(record, times_of(record))
    if gain is None:
        assert said.startswith("This run is healthy") and "num_actors" not in said
        assert "text computes most of the step (90%): that is the model's own work." in said
    else:
        assert said.startswith("This run is bound by text") and gain in said


def test_three_steps_are_too_few_to_say(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run", steps=1))
    assert "Too few steps" in sentence(record, times_of(record))


def test_work_of_four_ranks_is_held_against_their_mean(tmp_path: Path) -> None:
    """One rank has five times the others' work: with even work the stage would take 0.4 of its time."""
    work = [2.5, 0.5, 0.5, 0.5]
    seconds = {"text": {"forward": [0.4 * one for one in work], "comm": [1.0 - 0.4 * one for one in work]}}
    run_dir = make_run(tmp_path / "run", seconds=lambda step: seconds, work=lambda step: {"text": work})
    cause = next(one for one in _causes(run_dir) if one.kind == "uneven work")
    assert cause.share == pytest.approx(0.6)


def _causes(run_dir: Path) -> list[Cause]:
    record = read_run(run_dir)
    times = times_of(record)
    assert times is not None
    return find_causes(record, times)


def test_where_collectives_are_not_apart_no_rank_is_called_slow(tmp_path: Path) -> None:
    """As on GPUs: all ranks are as long at work, those that wait among them."""
    seconds = {"text": {"forward": [0.9, 0.9]}}
    work = {"text": [1.4, 0.6]}
    run_dir = make_run(tmp_path / "run", seconds=lambda step: seconds, work=lambda step: work)
    (cause, *_) = _causes(run_dir)
    assert (cause.kind, round(cause.share, 4)) == ("uneven work", round(0.9 * (1 - 1 / 1.4), 4))
    assert all(one.kind != "slow rank" for one in _causes(run_dir))


def test_what_was_not_measured_is_not_called_healthy(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", seconds=lambda step: {"text": {"forward": [0.9, 0.9]}})
    record = read_run(run_dir)
    said = sentence(record, times_of(record))
    assert "healthy" not in said and "Of text collectives are not measured apart" in said
    run_dir = make_run(tmp_path / "b")
    (run_dir / "ranks.jsonl").unlink()
    record = read_run(run_dir)
    assert "there is no ranks.jsonl" in sentence(record, times_of(record))


def test_a_checkpoint_at_the_end_bounds_no_run(tmp_path: Path) -> None:
    assert all(one.kind != "save" for one in _causes(make_run(tmp_path / "run", saves={20: 20.0})))
