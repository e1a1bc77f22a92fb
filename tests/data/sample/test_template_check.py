"""Conversations that a chat template does not write whole, in the forms that published templates have."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dhp.core.errors import DataError
from dhp.data.read.records import Record, Turn
from dhp.data.sample.chat import Rendered, render, to_messages
from dhp.data.sample.template_check import check_written, find_answer_end
from dhp.data.sample.tokens import AS_THE_TEMPLATE, ConversationTokenizer

PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
STRINGS = "{{ m.content }}"
ENDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + PARTS + "<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAVA = (
    "{% for m in messages %}{{ m.role|upper }}: {% if m.role == 'assistant' %}{% generation %}PARTS {% endgeneration %}"
    "{% else %}PARTS {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
).replace("PARTS", PARTS)


def with_template(tokenizer: Any, template: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def talk(*texts: str, system: str | None = None) -> tuple[Turn, ...]:
    turns = tuple(Turn(role, (text,)) for role, text in zip(("user", "assistant") * len(texts), texts))
    return turns if system is None else (Turn("system", (system,)), *turns)


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[start:stop].strip() for start, stop in rendered.spans]


def learned(tokenizer: Any, turns: tuple[Turn, ...]) -> list[str]:
    text = ConversationTokenizer(tokenizer, AS_THE_TEMPLATE, None, None, None, None, None)
    tokens = text.tokenize(Record("set", 1, "line 1", turns), [], [], [])
    return [tokenizer.convert_ids_to_tokens(int(one)) for one in tokens.ids[np.flatnonzero(tokens.target)]]


def of_words(*words: str, ends: tuple[str, ...] = ("<end>",)) -> Any:
    """A tokenizer whose words begin with their space, as those of real vocabularies."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", *words))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": list(ends)})
    return made


def test_the_first_word_of_an_answer_is_learned_with_the_space_before_it() -> None:
    tokenizer = of_words("USER:", " What?", " ASSISTANT:", " red", " square", " ", " Yes.")
    tokenizer.chat_template = LLAVA
    assert learned(tokenizer, talk("What?", "red square"))[:2] == [" red", " square"]
    assert learned(tokenizer, talk("What?", "Yes."))[0] == " Yes."


def test_an_end_of_turn_that_is_not_eos_is_learned_behind_its_block() -> None:
    tokenizer = of_words("USER:", " What?", " ASSISTANT:", " red")
    tokenizer.chat_template = LLAVA.replace(" {% endgeneration %}", "{% endgeneration %}<end>")
    assert find_answer_end(tokenizer) == tokenizer.convert_tokens_to_ids("<end>") != tokenizer.eos_token_id
    assert learned(tokenizer, talk("What?", "red", "What?", "red")) == [" red", "<end>", " red", "<end>"]


@pytest.mark.parametrize(
    "template, end", [(ENDS, "<|im_end|>"), (ENDS.replace(PARTS, STRINGS), "<|im_end|>"), (LLAVA, None), ("x", None)]
)
def test_the_token_that_ends_an_answer(tokenizer: Any, template: str, end: str | None) -> None:
    found = find_answer_end(with_template(tokenizer, template))
    assert found == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_a_template_of_strings_is_handed_strings(tokenizer: Any) -> None:
    strings = with_template(tokenizer, ENDS.replace(PARTS, STRINGS) + ASKS)
    assert answers(render(strings, to_messages(talk("hi", "there")))) == ["there<|im_end|>"]
    pictured = to_messages((Turn("user", ("Look: ", b"picture")), Turn("assistant", ("Red.",))))
    with pytest.raises(DataError, match="turn 1 shows 1 images, and the chat template takes text alone"):
        render(strings, pictured)


@pytest.mark.parametrize("block", [False, True])
def test_a_system_text_that_the_template_leaves_out_is_told(tokenizer: Any, block: bool) -> None:
    without = ENDS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}") + ASKS
    if block:
        without = without.replace(PARTS, "{% generation %}" + PARTS + "{% endgeneration %}")
    messages = to_messages(talk("hi", "salut", system="Answer in French."))
    with pytest.raises(DataError, match=r"leaves out or rewrites text of turn 1 \(system\): 'Answer in French.'"):
        render(with_template(tokenizer, without), messages)


def test_a_system_text_in_the_users_turn_is_written() -> None:
    messages = to_messages(talk("hi", "salut", system="Answer in  French."))
    check_written("<user>Answer in French.\n\nhi<end><bot>salut<end>", ((35, 45),), messages)


@pytest.mark.parametrize(
    "text, spans, lost",
    [
        ("a b c d", ((2, 3), (6, 7)), None),
        ("a c d", ((2, 3), (4, 5)), "turn 2"),
        ("b a c d", ((0, 1), (6, 7)), "turn 1"),  # another order
        ("a b c", ((2, 3), (5, 5)), "turn 4"),
        ("a b d c", ((2, 3), (4, 5)), "turn 3"),
        ("a b c d", ((1, 2), (6, 7)), "turn 2"),  # not in its own span
    ],
)
def test_texts_are_found_in_order_and_answers_in_their_spans(
    text: str, spans: tuple[tuple[int, int], ...], lost: str | None
) -> None:
    messages = to_messages(talk("a", "b", "c", "d"))
    if lost is None:
        check_written(text, spans, messages)
        return
    with pytest.raises(DataError, match=f"leaves out or rewrites text of {lost} "):
        check_written(text, spans, messages)


def test_words_of_an_answer_that_become_a_thought_are_told() -> None:
    said = "Write </think> behind the block, then go on."
    torn = "q<think>\nWrite \n</think>\n\n behind the block, then go on."
    with pytest.raises(DataError, match="rewrites text of turn 2"):
        check_written(torn, ((1, len(torn)),), to_messages(talk("q", said)))
    check_written(f"q{said}", ((1, len(said) + 1),), to_messages(talk("q", said)))


def test_a_thought_that_an_earlier_answer_loses_is_told() -> None:
    messages = to_messages(talk("a", "<think>x</think>b", "c", "<think>y</think>d"))
    both = "a<think>\nx\n</think>\n\nb;c<think>\ny\n</think>\n\nd"
    middle = both.index(";")
    check_written(both, ((1, middle), (middle + 2, len(both))), messages)
    one = "a b;c<think>\ny\n</think>\n\nd"
    with pytest.raises(DataError, match="rewrites text of turn 2"):
        check_written(one, ((2, 3), (5, len(one))), messages)


def test_an_answer_without_a_character_learns_its_end_alone() -> None:
    tokenizer = of_words("USER:", " What?", " ASSISTANT:", " red")
    tokenizer.chat_template = LLAVA.replace(" {% endgeneration %}", "{% endgeneration %}<end>")
    assert learned(tokenizer, talk("What?", "", "What?", "red")) == ["<end>", " red", "<end>"]


PICTURE, A = {"type": "image"}, {"type": "text", "text": "a"}
FIRST, SECOND = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}
MOVED = {
    "where they stand": ([PICTURE, FIRST, PICTURE, SECOND], "<i>one<i>two", True),
    "those of a turn, to its front": ([FIRST, PICTURE, PICTURE], "<i><i>one", True),
    "one, to the end": ([PICTURE, FIRST, SECOND], "onetwo<i>", True),
    "from between, to the front": ([FIRST, PICTURE, SECOND, PICTURE], "<i><i>onetwo", False),
    "apart": ([PICTURE, PICTURE, FIRST], "<i>one<i>", False),
    "texts that stand elsewhere too": ([PICTURE, A, PICTURE, SECOND], "<|im_start|>user\n<i>a<i>two", True),
    "a number that is told elsewhere": ([PICTURE, FIRST], "<i><i>one", True),
}


@pytest.mark.parametrize("case", MOVED)
def test_pictures_stay_between_their_words(case: str) -> None:
    parts, written, right = MOVED[case]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    messages = [{"role": "user", "content": parts}, answer, {"role": "user", "content": [PICTURE, SECOND]}, answer]
    text, at = f"{written}yes<i>two yes", len(written)
    spans = ((at, at + 3), (len(text) - 3, len(text)))
    check = lambda: check_written(text, spans, messages, {"image": "<i>"})
    if right:
        return check()
    with pytest.raises(DataError, match="moves pictures of turn 1 to another place among its words"):
        check()
