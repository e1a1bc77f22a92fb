"""dhp.data.read.preferences: rows as TRL, LLaMA-Factory and ms-swift publish them, as two records."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dhp.core.errors import DataError
from dhp.core.preferences import PAIRS, SINGLES
from dhp.data.read.annotations import read_annotations
from dhp.data.read.records import Record, Turn

USER, GOOD, BAD = "What is on it?", "A circle.", "A square."
OTHER, BEFORE = "Which colour?", [("user", "Is it a shape?"), ("assistant", "Yes.")]


def said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def value(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


SHOWN = [{"type": "image"}, {"type": "text", "text": USER}]
# By format, a row of its documentation's form; all mean the same.
ROWS = {
    "TRL, explicit prompt": {"prompt": USER, "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
    "TRL, turns": {
        "images": ["a.png"],
        "prompt": [said("user", SHOWN)],
        "chosen": [said("assistant", [{"type": "text", "text": GOOD}])],
        "rejected": [said("assistant", [{"type": "text", "text": BAD}])],
    },
    "TRL, implicit prompt": {
        "image": "a.png",
        "chosen": [said("user", USER), said("assistant", GOOD)],
        "rejected": [said("user", USER), said("assistant", BAD)],
    },
    "LLaMA-Factory, ShareGPT": {
        "conversations": [value("human", f"<image>{USER}")],
        "chosen": value("gpt", GOOD),
        "rejected": value("gpt", BAD),
        "images": ["a.png"],
    },
    "LLaMA-Factory, Alpaca": {"instruction": USER, "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
    "LLaMA-Factory, messages": {
        "chosen_messages": [said("user", f"<image>{USER}"), said("assistant", GOOD)],
        "rejected_messages": [said("user", f"<image>{USER}"), said("assistant", BAD)],
        "images": ["a.png"],
    },
    "ms-swift, response": {
        "messages": [said("user", f"<image>{USER}"), said("assistant", GOOD)],
        "rejected_response": BAD,
        "images": ["a.png"],
    },
    "ms-swift, messages": {
        "messages": [said("user", f"<image>{USER}"), said("assistant", GOOD)],
        "rejected_messages": [said("user", f"<image>{USER}"), said("assistant", BAD)],
        "images": ["a.png"],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    return tmp_path


def read(folder: Path, *rows: Any, compares: str = PAIRS) -> list[Record]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_annotations("set", folder / "rows.jsonl", folder, compares=compares)
    return [found.record(index) for index in range(len(rows))]


def texts(record: Record) -> list[str]:
    return ["".join(part for part in turn.parts if isinstance(part, str)) for turn in record.turns]


@pytest.mark.parametrize("name", ROWS)
def test_both_sides_of_a_row(name: str, folder: Path) -> None:
    (record,) = read(folder, ROWS[name])
    assert record.other is not None and record.liked is None
    assert texts(record) == [USER, GOOD] and texts(record.other) == [USER, BAD]
    assert [turn.role for turn in record.turns] == ["user", "assistant"]
    assert record.media == record.other.media and len(record.images) == 1
    assert (record.unread, record.other.unread) == ((), ())


def test_the_second_side_may_show_other_pictures_where_the_format_says_so(folder: Path) -> None:
    (record,) = read(folder, ROWS["ms-swift, response"] | {"rejected_images": ["b.png"]})
    assert record.other is not None
    assert [str(one) for one in record.images] != [str(one) for one in record.other.images]


EARLIER = [said(*one) for one in BEFORE]
LONGER = {
    "TRL": {"prompt": [*EARLIER, said("user", USER)], "chosen": [said("assistant", GOOD)], "rejected": BAD},
    "TRL, implicit": {
        f"{side}": [*EARLIER, said("user", USER), said("assistant", answer)]
        for side, answer in (("chosen", GOOD), ("rejected", BAD))
    },
    "LLaMA-Factory": {
        "conversations": [value("human", BEFORE[0][1]), value("gpt", BEFORE[1][1]), value("human", USER)],
        "chosen": value("gpt", GOOD),
        "rejected": value("gpt", BAD),
    },
    "ms-swift": {"messages": [*EARLIER, said("user", USER), said("assistant", GOOD)], "rejected_response": BAD},
}


@pytest.mark.parametrize("name", LONGER)
def test_answers_before_the_compared_ones_are_not_learned(name: str, folder: Path) -> None:
    (record,) = read(folder, LONGER[name])
    assert record.other is not None and texts(record)[1] == BEFORE[1][1] == texts(record.other)[1]
    for side in (record, record.other):
        assert [turn.learned for turn in side.turns if turn.role == "assistant"] == [False, True]


def test_of_single_answers_the_completion_is_learned(folder: Path) -> None:
    asked, again = [said("user", USER)], [said("assistant", GOOD), said("user", OTHER), said("assistant", BAD)]
    rows: list[Any] = [
        {"messages": [*EARLIER, *asked, said("assistant", GOOD)], "label": False},
        {"prompt": [*EARLIER, *asked], "completion": [said("assistant", GOOD)], "label": True},
        {"prompt": [*EARLIER, *asked], "completion": again, "label": True},
        SINGLE["ms-swift"] | {"messages": [said("user", OTHER), said("assistant", GOOD)]},
    ]
    found = read(folder, *rows, compares=SINGLES)
    assert found[2].other is not None and found[1].other is not None
    assert texts(found[2].other) == [BEFORE[0][1], BEFORE[1][1], USER, GOOD]  # none of its answers, of several turns
    assert texts(found[1].other)[3:] == [GOOD] == texts(found[3])[1:]  # the row behind it asks the same
    assert [turn.learned for turn in found[2].other.turns[1::2]] == [False, True]
    learned = [[turn.learned for turn in one.turns if turn.role == "assistant"] for one in found]
    assert learned == [[False, True], [False, True], [False, True, True], [True]]


def test_the_other_answer_is_one_to_another_prompt(folder: Path) -> None:
    """Answers to a prompt stand together, and the row between the two prompts is defective."""
    rows = [{"prompt": USER, "completion": f"It is {number}.", "label": number % 2 == 0} for number in range(5)]
    rows += [{"prompt": OTHER, "completion": ["?"], "label": True}, *({**one, "prompt": OTHER} for one in rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_annotations("set", folder / "rows.jsonl", folder, compares=SINGLES)
    for index in (*range(5), *range(6, 11)):
        record = found.record(index)
        assert record.other is not None and texts(record.other)[0] == texts(record)[0]
        answered = [row["completion"] for row in rows if row["prompt"] != texts(record)[0]]
        assert texts(record.other)[1] in answered
    many = [{"prompt": USER if at != 3 else OTHER, "completion": f"{at}", "label": True} for at in range(5)]
    first, *_ = read(folder, *many, compares=SINGLES)  # 1, 2 and 4 rows on stands the same prompt
    assert first.other is not None and texts(first.other) == [USER, "3"]
    with pytest.raises(DataError, match="line 1 .*no row was found that asks something else"):
        read(folder, *rows[:5], compares=SINGLES)


SINGLE = {
    "TRL": {"prompt": USER, "completion": GOOD, "label": True, "images": ["a.png"]},
    "TRL, turns": {
        "prompt": [said("user", USER)],
        "completion": [said("assistant", GOOD)],
        "label": True,
        "image": "a.png",
    },
    "LLaMA-Factory": {
        "messages": [said("user", f"<image>{USER}"), said("assistant", GOOD)],
        "kto_tag": True,
        "images": ["a.png"],
    },
    "ms-swift": {"messages": [said("user", USER), said("assistant", GOOD)], "label": True, "images": ["a.png"]},
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_answers_and_those_of_the_next_row(name: str, folder: Path) -> None:
    row = SINGLE[name]
    label = "kto_tag" if "kto_tag" in row else "label"
    changed = json.loads(json.dumps(row).replace(GOOD, BAD).replace(USER, OTHER)) | {label: False}
    liked, disliked = read(folder, row, changed, compares=SINGLES)
    assert (liked.liked, disliked.liked) == (True, False)
    assert liked.other is not None and texts(liked) == [USER, GOOD] and texts(liked.other) == [USER, BAD]
    assert disliked.other is not None and texts(disliked.other) == [OTHER, GOOD]
    assert liked.sides == (1, 0) and disliked.sides == (-1, 0)


@pytest.mark.parametrize(
    ("row", "compares", "message"),
    [
        ({"prompt": USER, "chosen": GOOD}, PAIRS, "'rejected' is missing or empty: a preference has two sides"),
        ({"prompt": USER, "chosen": "", "rejected": BAD}, PAIRS, "'chosen' is missing or empty"),
        ({"prompt": USER, "chosen": GOOD, "rejected": GOOD}, PAIRS, "both sides are the same"),
        ({"prompt": USER, "response": GOOD}, PAIRS, r"no preference: the row has \['prompt', 'response'\]"),
        (
            {"prompt": USER, "chosen": 3, "rejected": 4},
            PAIRS,
            "'chosen' must be a text, a turn or a list of turns, got int",
        ),
        ({"messages": [said("user", USER)], "rejected_response": BAD}, PAIRS, "needs 'messages' to end with an answer"),
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD, "tools": ["x"]}, PAIRS, "tool calls are not read"),
        ({"prompt": USER, "completion": GOOD}, SINGLES, "kto needs one of 'label' and 'kto_tag', true or false"),
        ({"prompt": USER, "completion": GOOD, "label": 3}, SINGLES, "needs one of 'label'.*the row has label=3"),
        ({"prompt": USER, "completion": GOOD, "label": None}, SINGLES, "the row has label=None. Correct"),
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD}, SINGLES, r"the row has \['chosen', 'prompt', 'rejected'\]"),
        ({"prompt": USER, "completion": "", "label": True}, SINGLES, "its answer, 'completion', is empty"),
        ({"prompt": USER, "completion": GOOD, "label": True}, PAIRS, "train with training.objective=kto"),
        (
            {
                "chosen": [said("user", USER), said("assistant", GOOD)],
                "rejected": [said("user", "Who?"), said("assistant", BAD)],
            },
            PAIRS,
            "turn 1 of both sides differs, and is user: they answer different questions",
        ),
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD}, "", "set training.objective=dpo or orpo"),
        ({"prompt": USER, "response": GOOD, "label": False}, "", "set training.objective=kto"),
    ],
)
def test_rows_that_are_no_preference_are_refused(row: Any, compares: str, message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(folder, row, compares=compares)


def test_prompts_have_one_side(folder: Path) -> None:
    (record,) = read(folder, ROWS["TRL, turns"])
    prompt, answer = record.up_to_answer()
    assert prompt.other is None and answer == GOOD
    assert isinstance(prompt.turns[0], Turn)


def test_a_column_that_a_table_left_empty_is_no_answer(folder: Path) -> None:
    row = {"query": USER, "answer": GOOD, "output": None, "label": True}
    first, _ = read(folder, row, row | {"query": OTHER}, compares=SINGLES)
    assert texts(first) == [USER, GOOD]
