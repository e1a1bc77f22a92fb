"""The walk of examples/video_questions: its commands in order; what is cut, asked and kept."""

import json
from pathlib import Path

import pytest

from examples.video_questions.questions import CAPTION, KINDS, ask, collect, cut, main, relabel
from tests.helpers.pages import copy_examples, follow
from tests.helpers.runs import ROOT

PAGE = (ROOT / "examples" / "video_questions" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_commands_work(tmp_path: Path) -> None:
    found = follow(PAGE, copy_examples(tmp_path) / "video_questions", tmp_path)
    clips = [json.loads(line) for line in (found.folder / "clips.jsonl").read_text().splitlines()]
    assert [(clip["video"], *clip["clip"]) for clip in clips] == [
        *(("garden.mp4", begin, end) for begin, end in ((0, 10), (10, 20), (20, 25))),
        *(("sea.mp4", begin, end) for begin, end in ((0, 10), (10, 12))),
    ]
    captions = [json.loads(line) for line in (found.folder / "captions.jsonl").read_text().splitlines()]
    assert len(captions) == 5
    asked = [json.loads(line) for line in (found.folder / "ask.jsonl").read_text().splitlines()]
    assert [(one["about"]["video"], one["kind"]) for one in asked] == [
        *(("garden.mp4", "caption"), ("garden.mp4", "order"), ("sea.mp4", "caption"), ("sea.mp4", "time"))
    ]
    text = asked[0]["conversations"][0]["value"]
    assert "\n10 to 20 s: " + captions[1]["answer"].strip() in text
    kept = [json.loads(line) for line in (found.folder / "questions.jsonl").read_text().splitlines()]
    assert [(one["video"], one["kind"]) for one in kept] == [("garden.mp4", "caption"), ("sea.mp4", "caption")]
    assert "questions   caption        2  100.0%" in found.shown("dhp inspect data")
    described = [json.loads(line) for line in (found.folder / "picture_captions.jsonl").read_text().splitlines()]
    assert [one["image"] for one in described] == ["red.png", "green.png", "blue.png", "yellow.png"]
    assert not any("IMG_" in turn["value"] for one in described for turn in one["conversations"][:1])
    captions = json.loads((found.folder / "runs" / "captions" / "summary.json").read_text())
    assert captions["status"] == "completed"
    assert json.loads((found.folder / "runs" / "questions" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(
    "seconds, ends", [(3.0, [3.0]), (10.0, [10.0]), (10.5, [10.5]), (11.0, [10.0, 11.0]), (30.0, [10.0, 20.0, 30.0])]
)
def test_clips_are_of_ten_seconds_and_none_is_very_short(seconds: float, ends: list[float]) -> None:
    assert cut(seconds) == list(zip([0.0, *ends[:-1]], ends, strict=True))


def test_what_has_a_question_and_an_answer_is_kept() -> None:
    asked = [{"about": {"video": name}, "kind": "order"} for name in ("a.mp4", "b.mp4", "c.mp4")]
    said = ["Here it is.\nQ: Which colour comes last?\nA: Blue,\nat the end.", "Q: Which?", "A: Blue.\nQ: Which?"]
    (kept,) = collect(asked, [{"answer": text} for text in said])
    assert (kept["video"], kept["kind"]) == ("a.mp4", "order")
    human, answer = (turn["value"] for turn in kept["conversations"])
    assert (human, answer) == ("<video>\nWhich colour comes last?", "Blue,\nat the end.")


def test_captions_are_kept_as_they_are_but_empty_ones() -> None:
    asked = [{"about": {"video": name}, "kind": "caption"} for name in ("a.mp4", "b.mp4")]
    (kept,) = collect(asked, [{"answer": " A field. "}, {"answer": " "}])
    assert [turn["value"] for turn in kept["conversations"]] == [f"<video>\n{CAPTION}", "A field."]


def test_each_video_has_a_question_of_another_kind() -> None:
    clips = [{"video": f"{number}.mp4", "clip": [0, 10]} for number in range(8)]
    rows = list(ask(clips, [{"answer": "A field."}] * 8))
    assert [row["kind"] for row in rows[::2]] == ["caption"] * 8
    assert [row["kind"] for row in rows[1::2]] == [*KINDS, "order"] and len(KINDS) == 7


def test_a_picture_is_described_anew() -> None:
    talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "<image>IMG_1"}]
    (asked,) = relabel([{"image": "a.png", "conversations": talk}])
    assert asked["image"] == "a.png" and asked["conversations"][0]["value"].endswith("Beside it stood: IMG_1")
    (kept,) = collect([asked], [{"answer": "A red picture."}])
    human, answer = (turn["value"] for turn in kept["conversations"])
    assert (kept["image"], human, answer) == (
        *("a.png", "<image>\nDescribe the picture in one or two sentences.", "A red picture."),
    )


def test_rows_without_exactly_one_picture_are_skipped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A field."}]
    rows = [{"image": name, "conversations": talk} for name in ("a.png", ["b.png", "c.png"], "d.png")]
    assert [row["image"] for row in relabel([*rows, {"conversations": talk}])] == ["a.png", "d.png"]
    assert capsys.readouterr().err == "2 of 4 rows do not have exactly one picture: skipped\n"


def test_tags_of_files_in_an_answer_are_left_out() -> None:
    clips = [{"video": "a.mp4", "clip": [0, 10]}]
    row, _ = ask(clips, [{"answer": "A <video>field<image>."}])
    assert "0 to 10 s: A field.\n" in row["conversations"][0]["value"]


def test_a_step_that_is_none_is_named() -> None:
    with pytest.raises(SystemExit, match="cut is no step: clips, ask, collect, relabel"):
        main("cut", "videos", "clips.jsonl")


def test_an_answer_too_few_is_an_error(tmp_path: Path) -> None:
    clips = [{"video": "a.mp4", "clip": [0, 10]}, {"video": "a.mp4", "clip": [10, 20]}]
    with pytest.raises(SystemExit, match="2 prompts have 1 answers: let `dhp generate` answer all"):
        list(ask(clips, [{"answer": "A field."}]))
    for name, rows in (("clips", clips), ("captions", [{"answer": "A field."}, {"answer": " A cow."}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main("ask", *(str(tmp_path / f"{name}.jsonl") for name in ("clips", "captions", "ask")))
    row, _ = (tmp_path / "ask.jsonl").read_text().splitlines()
    assert "0 to 10 s: A field.\n10 to 20 s: A cow.\n" in json.loads(row)["conversations"][0]["value"]
