from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.media.sources import MediaResolver
from dhp.data.read.annotations import parse_record
from dhp.data.read.records import Turn

ASK = {"from": "human", "value": "What is it?"}
LOOK = {"from": "human", "value": "<image>\nWhat is it?"}
ANSWER = {"from": "gpt", "value": "A circle."}
SYSTEM = {"from": "system", "value": "Be brief."}


def parse(raw, data_path=None):
    return parse_record(raw, "set", 3, "here", "llava", MediaResolver(data_path))


def test_roles_text_and_place():
    record = parse({"conversations": [SYSTEM, ASK, ANSWER, {"from": "human", "value": "Sure?"}, ANSWER]})
    assert record.turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("What is it?",)),
        Turn("assistant", ("A circle.",)),
        Turn("user", ("Sure?",)),
        Turn("assistant", ("A circle.",)),
    )
    assert (record.dataset, record.position, record.where, record.images) == ("set", 3, "here", ())


@pytest.mark.parametrize(
    "text, parts",
    [
        ("<image>\nWhat?", ("a.png", "What?")),
        ("What?\n<image>", ("What?", "a.png")),
        ("<image>", ("a.png",)),
        ("See <image> now", ("See ", "a.png", " now")),
        ("Two\n\n<image>\n\nlines", ("Two\n", "a.png", "\nlines")),
    ],
)
def test_a_tag_becomes_an_image_in_its_place(images, text, parts):
    record = parse({"image": "a.png", "conversations": [{"from": "human", "value": text}, ANSWER]}, images)
    expected = tuple(images.resolve() / part if part == "a.png" else part for part in parts)
    assert record.turns[0].parts == expected


def test_images_of_several_turns_are_taken_in_order(images):
    turns = [{"from": "human", "value": "<image>\n<image>\nCompare."}, ANSWER, LOOK, ANSWER]
    record = parse({"image": ["b.jpg", "a.png", "sub/c.png"], "conversations": turns}, images)
    assert [path.relative_to(images.resolve()) for path in record.images] == [
        Path("b.jpg"),
        Path("a.png"),
        Path("sub/c.png"),
    ]
    assert record.turns[2].parts[0] == images.resolve() / "sub/c.png"


def test_a_tag_in_an_answer_is_text():
    answer = {"from": "gpt", "value": "I wrote <image>."}
    assert parse({"conversations": [ASK, answer]}).turns[1].parts == ("I wrote <image>.",)


@pytest.mark.parametrize(
    "raw, reason",
    [
        ([], "expected an object"),
        ("text", "expected an object"),
        ({"id": 1}, "'conversations' is missing"),
        ({"conversations": "hi"}, "must be a list"),
        ({"conversations": []}, "is empty"),
        ({"conversations": ["hi"]}, "turn 1 must be an object"),
        (
            {"conversations": [{"from": "human"}, ANSWER]},
            "turn 1: 'value' must be a string or a list of parts, got None",
        ),
        ({"conversations": [{"from": 3, "value": "x"}, ANSWER]}, "turn 1: 'from' must be a string, got 3"),
        (
            {"conversations": [ASK, {"from": "gpt", "value": 7}]},
            "turn 2: 'value' must be a string or a list of parts, got 7",
        ),
        ({"conversations": [{"from": "robot", "value": "x"}, ANSWER]}, "turn 1: unknown role 'robot'"),
        ({"conversations": [ASK, {"from": "gpt", "value": " "}]}, "turn 2: the answer is empty"),
        ({"conversations": [ANSWER]}, "must begin with a human turn"),
        ({"conversations": [SYSTEM]}, "must begin with a human turn"),
        ({"conversations": [SYSTEM, ANSWER]}, "must begin with a human turn"),
        ({"conversations": [ASK, SYSTEM, ANSWER]}, "system turn can only be the first"),
        ({"conversations": [ASK, ASK, ANSWER]}, "turns 1 and 2 are both from the user"),
        ({"conversations": [SYSTEM, ASK, ANSWER, ANSWER]}, "turns 3 and 4 are both from the assistant"),
        ({"conversations": [ASK, ANSWER, ASK]}, "last turn must be from gpt"),
        ({"conversations": [LOOK, ANSWER]}, "1 <image> tags in the human turns, but 0 images"),
        ({"conversations": [ASK, ANSWER], "image": "a.png"}, "0 <image> tags in the human turns, but 1 images"),
        ({"conversations": [LOOK, ANSWER], "image": ["a.png", "b.jpg"]}, "1 <image> tags .* but 2 images"),
        ({"conversations": [LOOK, ANSWER], "image": 5}, "'image' must be a path or a list of paths, got 5"),
        ({"conversations": [LOOK, ANSWER], "image": ""}, "1 <image> tags in the human turns, but 0 images"),
        ({"conversations": [LOOK, ANSWER], "image": [None]}, "'image' must be a path"),
        ({"conversations": [ASK, ANSWER], "video": "v.mp4"}, "0 <video> tags in the human turns, but 1 videos"),
    ],
)
def test_defects_of_a_sample_are_named(images, raw, reason):
    with pytest.raises(DataError, match=reason):
        parse(raw, images)


def test_an_image_needs_a_data_path():
    with pytest.raises(DataError, match="no data_path"):
        parse({"image": "a.png", "conversations": [LOOK, ANSWER]})


@pytest.mark.parametrize(
    "name", ["../secret.png", "sub/../../secret.png", "/etc/hostname", "link.png", "out/secret.png"]
)
def test_an_image_outside_data_path_is_refused(images, name):
    outside = images.parent / "secret.png"
    outside.write_bytes((images / "a.png").read_bytes())
    (images / "link.png").symlink_to(outside)
    (images / "out").symlink_to(images.parent)
    with pytest.raises(DataError, match="leaves data_path .* refused"):
        parse({"image": name, "conversations": [LOOK, ANSWER]}, images)


def test_a_neighbour_folder_with_the_same_prefix_is_outside(images):
    with pytest.raises(DataError, match="leaves data_path"):
        parse({"image": "../images2/a.png", "conversations": [LOOK, ANSWER]}, images)


@pytest.mark.parametrize("name", ["sub/../a.png", "inside.png"])
def test_links_and_dots_that_stay_inside_are_allowed(images, name):
    (images / "inside.png").symlink_to(images / "a.png")
    record = parse({"image": name, "conversations": [LOOK, ANSWER]}, images)
    assert record.images == (images.resolve() / "a.png",)


def test_data_path_may_itself_be_a_link(images):
    link = images.parent / "link"
    link.symlink_to(images)
    record = parse({"image": "a.png", "conversations": [LOOK, ANSWER]}, link)
    assert record.images == (images.resolve() / "a.png",)


@pytest.mark.parametrize("name", ["a\0.png", "loop.png"])
def test_a_path_that_cannot_be_resolved_is_a_data_error(images, name):
    (images / "loop.png").symlink_to(images / "loop.png")
    with pytest.raises(DataError, match="cannot be resolved"):
        parse({"image": name, "conversations": [LOOK, ANSWER]}, images)


def test_the_prompt_is_that_of_the_first_answer_that_is_learned():
    unlearned = ANSWER | {"weight": 0}
    record = parse({"conversations": [ASK, unlearned, {"from": "human", "value": "Sure?"}, ANSWER]})
    prompt, said = record.up_to_answer()
    assert said == "A circle." and len(prompt.turns) == 3 and prompt.asks
    nothing = replace(record, turns=(*record.turns[:3], replace(record.turns[3], learned=False)))
    with pytest.raises(DataError, match="no answer of it is learned"):
        nothing.up_to_answer()
