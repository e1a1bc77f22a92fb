"""What is asked and held out, what chance gives, the goal, and a small run that learns from its pictures or not."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from dhp.engine.encoder_engine import EncoderEngine
from experiments.sight.__main__ import CANARIES, Row, apart, by_kind, chances, goal, main, missed
from experiments.sight.datasets import (
    COLOURS,
    KINDS,
    PALETTE,
    RENAMED,
    Scene,
    Sets,
    draw,
    draw_scene,
    exchanged,
    held_out_answers,
    make_model,
    make_sets,
    named,
    round_of_pairs,
)
from experiments.sight.inject import sitecustomize
from tests.experiments.sight_here import shares


def scenes(kind: str, held_out: bool, count: int = 300) -> list[Scene]:
    random, answers = Random(0), KINDS[kind].asked if held_out else KINDS[kind].answers
    return [draw_scene(random, kind, answers[number % len(answers)], held_out) for number in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_out_combination_is_never_trained_on_and_its_halves_are(kind: str) -> None:
    seen = {one for of in KINDS for scene in scenes(of, False) for one in scene.combinations()}
    held = {one for scene in scenes(kind, True) for one in scene.combinations() if one[0] == kind}
    assert held == {(kind, answer, KINDS[kind].held_out_with(answer)) for answer in KINDS[kind].asked}
    assert not held & seen
    assert {(of, answer) for of, answer, _ in held} <= {(of, answer) for of, answer, _ in seen}
    assert {beside for _, _, beside in held} <= {beside for of, _, beside in seen if of == kind}


def test_a_picture_shows_its_scene() -> None:
    at = (70, 42)  # in the middle of the right cell
    image = draw(Random(0), Scene("red", "square", ((2, 1),)))
    assert image.size == (84, 84)
    found, ground = image.getpixel(at), draw(Random(0), Scene("red", "square", ((0, 1),))).getpixel(at)
    assert isinstance(found, tuple) and max(abs(a - b) for a, b in zip(found, PALETTE["red"], strict=True)) <= 10
    assert isinstance(ground, tuple) and ground[2] > 200


def test_the_next_answer_around_says_nothing_of_ones_own() -> None:
    assert Counter(zip(round_of_pairs(3), [*round_of_pairs(3)[1:], round_of_pairs(3)[0]], strict=True)) == Counter(
        (a, b) for a in range(3) for b in range(3)
    )
    for kind, of in KINDS.items():
        answers = held_out_answers(kind, 2)
        same = sum(a == b for a, b in zip(answers, answers[1:] + answers[:1], strict=True))
        assert len(answers) == 2 * len(of.asked) ** 2 and same / len(answers) == 1 / len(of.asked)


def test_pictures_are_exchanged_with_the_next_sample_of_the_same_question(tmp_path: Path) -> None:
    lines = [{"id": str(n), "image": f"{n}.png"} for n in range(3)]
    assert [one["image"] for one in exchanged(lines)] == ["1.png", "2.png", "0.png"]
    sets = make_sets(tmp_path, 0, samples=10, rounds=1)
    right, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("right", "exchanged"))
    assert [one["conversations"] for one in right] == [one["conversations"] for one in other]
    assert [one["conversations"][1]["value"] for one in right] == [answer for _, answer in sets.asked]
    for (kind, _), one, two in zip(sets.asked, right, other, strict=True):
        assert one["image"].split("/")[0] == two["image"].split("/")[0] == kind and one["image"] != two["image"]


def test_other_names_are_of_colours_alone_and_no_colour_keeps_its_own() -> None:
    assert [named(colour, RENAMED) for colour in COLOURS] == [*COLOURS[1:], COLOURS[0]]
    assert named("cat", RENAMED) == "cat" and named("red", "") == "red"


def test_chance_is_the_share_of_the_commonest_answer() -> None:
    asked = (("shape", "bar"), ("shape", "bar"), ("shape", "cross"), ("word", "cat"))
    assert chances(asked) == {"shape": 0.6667, "word": 1.0}
    assert by_kind(asked, (True, False, True, False)) == {"shape": 0.6667, "word": 0.0}


def row(what: str, right: float, other: float) -> Row:
    every = {kind: 0.2 for kind in KINDS}
    return {
        "seed": 0,
        "what": what,
        "right": dict.fromkeys(every, right),
        "exchanged": dict.fromkeys(every, other),
        "chance": every,
    }


def test_a_row_misses_the_goal_by_what_it_says() -> None:
    assert missed(row("scratch", 0.9, 0.25)) == []
    assert missed(row("scratch", 0.89, 0.26))[0] == "seed 0, scratch: shape 89% right"
    assert len(missed(row("scratch", 0.89, 0.26))) == 8
    assert missed(row(CANARIES[0], 0.25, 0.2)) == []
    assert len(missed(row(CANARIES[0], 0.26, 0.2))) == 4
    assert missed({"what": "exported", "asked": 9, "same": 8}) == ["exported: 8 of 9 answers are the same"]
    assert missed({"what": "layout", "layout": "ring2", "off": 2e-5}) == ["ring2: losses are 2.0e-05 off"]


def test_a_goal_is_open_while_something_was_not_run() -> None:
    assert goal([row("scratch", 0.9, 0.2)])["goal"] == "open"
    assert goal([row("scratch", 0.8, 0.2)])["goal"] == "missed"
    ways = ("scratch", "renamed_projector", "renamed_lora", "renamed_all")
    rows = [row(way, 0.95, 0.2) for way in ways] + [row(way, 0.2, 0.2) for way in CANARIES]
    rows += [{"seed": 0, "what": "exported", "asked": 9, "same": 9}]
    every = [{**one, "seed": seed} for seed in range(3) for one in rows]
    layout = {"seed": 0, "what": "layout", "layout": "ring2", "off": 0.0}
    assert goal(every)["absent"] == ["layouts"]
    assert goal([*every, layout]) == {"goal": "met", "missed": [], "absent": []}


def test_the_largest_difference_of_two_curves_is_relative() -> None:
    assert apart([2.0, 4.0], [2.0, 4.0]) == 0.0
    assert apart([2.0, 4.0], [2.2, 4.1]) == pytest.approx(0.1)


def test_rows_of_earlier_runs_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row("scratch", 0.95, 0.2)) + "\n" + json.dumps({"goal": "met"}) + "\n")
    main(["--seeds", "--read", str(file)])
    said = capsys.readouterr()
    assert json.loads(said.out)["goal"] == "open"
    assert "at least 95% exact" in said.err


STEPS, BATCH = 300, 16


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sets]:
    """A model with random weights, and questions about shapes alone."""
    folder = tmp_path_factory.mktemp("sight")
    return make_model(folder / "model", 0), make_sets(folder / "sets", 0, STEPS * BATCH, 1, ("shape",))


# Half of the target tokens end an answer. With other pictures one of five answers is right at most: 60% of the tokens.
CHANCE = 0.6


@pytest.mark.slow
def test_a_small_run_learns_from_its_pictures(small: tuple[Path, Sets]) -> None:
    found = shares(*small, STEPS, BATCH)
    assert found["right"] >= 0.8
    assert found["exchanged"] <= CHANCE + 0.05


@pytest.mark.slow
def test_with_a_fault_it_does_not(small: tuple[Path, Sets], monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, put_in = sitecustomize.FAULTS["zeroed"]
    assert module == EncoderEngine.__module__
    _, name = function.split(".")
    monkeypatch.setattr(EncoderEngine, name, put_in(getattr(EncoderEngine, name)))
    assert shares(*small, STEPS // 2, BATCH)["right"] <= CHANCE + 0.05
