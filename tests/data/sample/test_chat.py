"""Conversations through chat templates, and templates that fail."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dhp.config.data import DataConfig
from dhp.core.errors import ConfigError, DataError
from dhp.data.read.records import Record, Turn
from dhp.data.sample import chat
from dhp.data.sample.chat import MAX_BYTES, Rendered, read_template, render, to_messages
from dhp.data.sample.picture_inputs import NO_MEDIA
from dhp.data.sample.template_check import check_written, find_answer_end
from dhp.data.sample.tokens import ConversationTokenizer

EMPTY = "<think>\n\n</think>\n\n"

# As reasoning models have it: thoughts are kept in the last answer alone, where an answer without any gets an empty
# block. OPENED is what the prompt for an answer opens, MARKS where the template marks its answers.
REASONING = """\
{%- for message in messages -%}
{%- set said = message['content'][-1]['text'] -%}
{%- if message['role'] == 'assistant' -%}
{%- set thoughts, answer = '', said -%}
{%- if '</think>' in said -%}
{%- set thoughts = said.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set answer = said.split('</think>')[-1].lstrip() -%}
{%- endif -%}
BEGIN{{ '<|im_start|>assistant\\n' }}MIDDLE
{%- if loop.last -%}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{%- endif -%}
LATE{{ answer + '<|im_end|>' }}DONE{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + said + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\nOPENED' }}{%- endif -%}
"""


def reasoning(opened: str = "", mark: str = "") -> str:
    """The template with its blocks of answers beginning at BEGIN, MIDDLE or LATE; "" has none."""
    template = REASONING.replace("OPENED", opened).replace("DONE", "{% endgeneration %}" if mark else "")
    for place in ("BEGIN", "MIDDLE", "LATE"):
        template = template.replace(place, "{% generation %}" if place == mark else "")
    return template


def talk(*texts: str) -> list[dict]:
    return to_messages(tuple(Turn(role, (text,)) for role, text in zip(("user", "assistant") * len(texts), texts)))


def answers(tokenizer, template: str, *texts: str, **more: bool) -> list[str]:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    rendered: Rendered = render(changed, talk(*texts), **more)
    return [rendered.text[start:stop].removesuffix("\n") for start, stop in rendered.spans]


TEMPLATES = {
    "no blocks": reasoning(),
    "no blocks, opened by the prompt": reasoning(opened="<think>\\n"),
    "blocks with the prompt in them": reasoning(mark="BEGIN"),
    "blocks with the prompt in them, opened by it": reasoning(opened="<think>\\n", mark="BEGIN"),
    "blocks with the thoughts in them": reasoning(mark="MIDDLE"),
    "blocks with the thoughts in them, opened by the prompt": reasoning(opened="<think>\\n", mark="MIDDLE"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_neither_the_prompt_nor_an_empty_block_of_thoughts_is_learned(tokenizer, name):
    assert answers(tokenizer, TEMPLATES[name], "Hi?", "Yes.") == ["Yes.<|im_end|>"]
    assert answers(tokenizer, TEMPLATES[name], "Hi?", " </p>") == [" </p><|im_end|>"]


def test_a_block_that_begins_at_the_answer_is_left_alone(tokenizer):
    assert answers(tokenizer, reasoning(mark="LATE"), "Hi?", "Yes.") == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_thoughts_that_there_are_are_learned(tokenizer, name):
    (found,) = answers(tokenizer, TEMPLATES[name], "Hi?", "<think>hm</think>Yes.")
    # What the prompt for an answer has opened already is the prompt's.
    assert found == ("" if "opened" in name else "<think>\n") + "hm\n</think>\n\nYes.<|im_end|>"


@pytest.mark.parametrize("name", TEMPLATES)
def test_earlier_answers_may_lose_an_empty_block(tokenizer, name):
    found = answers(tokenizer, TEMPLATES[name], "Hi?", "Yes.", "Sure?", "No.")
    assert found == ["Yes.<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("name", ["no blocks", "no blocks, opened by the prompt"])
def test_earlier_answers_may_not_lose_thoughts(tokenizer, name):
    with pytest.raises(DataError, match="writes turn 2 differently once more turns follow"):
        answers(tokenizer, TEMPLATES[name], "Hi?", "<think>hm</think>Yes.", "Sure?", "No.")


@pytest.mark.parametrize("name", ["no blocks", "blocks with the prompt in them", "blocks with the thoughts in them"])
def test_the_empty_block_is_learned_where_that_is_asked_for(tokenizer, name):
    found = answers(tokenizer, TEMPLATES[name], "Hi?", "Yes.", learn_empty_thoughts=True)
    assert found == [f"{EMPTY}Yes.<|im_end|>"]


def test_an_empty_block_of_the_samples_own_is_learned(tokenizer):
    plain = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'][-1]['text'] }}{% endfor %}"
    plain += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert answers(tokenizer, plain, "Hi?", f"{EMPTY}Yes.") == [f"{EMPTY}Yes."]
    assert answers(tokenizer, plain, "Hi?", "Yes <think></think> no.") == ["Yes <think></think> no."]


@pytest.mark.parametrize(
    "block", ["<think></think>\\n", "◁think▷◁/think▷", "[THINK]\\n[/THINK]", "<seed:think></seed:think>"]
)
def test_the_blocks_of_several_families(tokenizer, block):
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}<A>BLOCK{% else %}<U>{% endif %}"
    template += "{{ m['content'][-1]['text'] }}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
    assert answers(tokenizer, template.replace("BLOCK", f"{{{{ '{block}' }}}}"), "Hi?", "Yes.") == ["Yes."]


def test_a_prompt_that_opens_thoughts_of_which_answers_tell_nothing(tokenizer):
    bare = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'][-1]['text'] }}{% endfor %}"
    for opened in ("<think>\\n", "<think></think>\\n"):
        template = bare + f"{{% if add_generation_prompt %}}{{{{ '<|assistant|>{opened}' }}}}{{% endif %}}"
        assert answers(tokenizer, template, "Hi?", "Yes.", "Sure?", "No.") == ["Yes.", "No."]


@pytest.mark.parametrize(
    ("header", "marks", "expected"),
    [
        ("<|im_start|>assistant\\n", "", "Yes.<|im_end|>"),
        ("<|im_start|>assistant\\n", "BEGIN", "Yes.<|im_end|>"),
        ("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", "", "Yes.<|im_end|>"),
        ("ASSISTANT: ", "", " Yes.<|im_end|>"),  # the space is of the answer's first token
        (" ", "", " Yes.<|im_end|>"),
    ],
)
def test_templates_that_write_no_prompt_for_an_answer(tokenizer, header, marks, expected):
    block, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + block + f"{{{{ '{header}' }}}}"
    template += "{{ m['content'][-1]['text'] + '<|im_end|>' }}" + end
    template += "{{ '\\n' }}{% else %}{{ '<U>' + m['content'][-1]['text'] }}{% endif %}{% endfor %}"
    found = answers(tokenizer, template, "ANSWER?", "Yes.", "Sure?", "ANSWER: no.")
    assert found == [expected, expected.replace("Yes.", "ANSWER: no.")]


def test_a_template_may_write_its_prompt_behind_a_question_alone(tokenizer):
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ '<bot>' }}"
    template += "{{ m['content'][-1]['text'] + '</s>' }}{% endgeneration %}"
    template += "{% else %}{{ '<U>' + m['content'][-1]['text'] }}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt and messages[-1]['role'] == 'user' %}<bot>{% endif %}"
    assert answers(tokenizer, template, "Is it?", "Yes.", "Sure?", "No.") == ["Yes.</s>", "No.</s>"]


def test_what_opens_an_answer_may_depend_on_the_turn_before(tokenizer):
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    template += "{{ '<bot>' if loop.previtem['role'] == 'user' else '<more>' }}{{ m['content'][-1]['text'] + '</s>' }}"
    template += "{% else %}{{ '<U>' + m['content'][-1]['text'] }}{% endif %}{% endfor %}"
    assert answers(tokenizer, template, "Is it?", "Yes.", "Sure?", "No.") == ["Yes.</s>", "No.</s>"]


def test_a_system_text_for_conversations_without_one():
    turns = (Turn("user", ("Hi?",)), Turn("assistant", ("Yes.",)))
    own = (Turn("system", ("Mine.",)), *turns)
    assert [m["role"] for m in to_messages(turns)] == ["user", "assistant"]
    for given in ("Be brief.", ""):
        assert to_messages(turns, given) == to_messages((Turn("system", (given,)), *turns))
    assert to_messages(own, "Be brief.") == to_messages(own)


@pytest.mark.parametrize("block", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("end", ["", "m['role'] == 'assistant' and "])
def test_a_template_whose_loops_do_not_end_is_a_defect(tokenizer, monkeypatch, block, end):
    """Ten thousand million rounds, with which a foreign model would hold up a run for an hour a sample."""
    monkeypatch.setattr(chat, "LIMIT_S", 0.2)
    tokenizer = copy.deepcopy(tokenizer)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = f"{{% for m in messages if {end}true %}}{loops}{{% endfor %}}{block}"
    turns = (Turn("user", ("Hi?",)), Turn("assistant", ("Yes.",)))
    with pytest.raises(DataError, match="has not written it within 0.2 s: its loops may never end"):
        render(tokenizer, to_messages(turns))
    monkeypatch.setattr(chat, "LIMIT_S", 600)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}"
    assert render(tokenizer, to_messages(turns)).text == "Hi?Yes."  # and the next one is written


@pytest.mark.parametrize(
    "template", ["{% include 'a' %}", "{{ messages[0].content + 1 }}", "{{ [1][messages | length + 9] + 1 }}"]
)
def test_a_template_that_fails_as_a_program_does_is_a_defect(tokenizer, template):
    with pytest.raises(DataError, match=r"the chat template of .* refuses it: ."):
        answers(tokenizer, template, "a", "b")


WRITES_THOUGHTS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message.reasoning_content -%}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif -%}
BEGIN{{ message['content'][-1]['text'] + '<|im_end|>' }}DONE{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
PLAIN = WRITES_THOUGHTS.replace("BEGIN", "").replace("DONE", "")


def rendered_of(tokenizer, template: str, turns: tuple[Turn, ...]) -> list[str]:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    learned = [turn.learned for turn in turns if turn.role == "assistant"]
    found = render(changed, to_messages(turns), learned=learned)
    return [found.text[start:stop].removesuffix("\n") for start, stop in found.spans]


ASKED = Turn("user", ("Who?",))
THOUGHT = Turn("assistant", ("Ann.",), thoughts="I look.")


def test_thoughts_reach_the_template_and_are_learned(tokenizer):
    assert rendered_of(tokenizer, PLAIN, (ASKED, THOUGHT)) == ["<think>\nI look.\n</think>\nAnn.<|im_end|>"]


def test_thoughts_that_the_template_leaves_out_are_told(tokenizer):
    without = PLAIN.replace("message.reasoning_content", "false")
    for turns in ((ASKED, THOUGHT), (ASKED, Turn("assistant", ("Bob.",)), ASKED, THOUGHT)):
        number = len(turns) // 2
        with pytest.raises(DataError, match=f"answer {number} has reasoning_content, which the chat template does not"):
            rendered_of(tokenizer, without, turns)


def test_answers_that_are_not_learned_have_no_span(tokenizer):
    turns = (ASKED, Turn("assistant", ("Ann.",), learned=False), ASKED, Turn("assistant", ("Bob.",)))
    assert rendered_of(tokenizer, PLAIN, turns) == ["Bob.<|im_end|>"]
    assert rendered_of(tokenizer, reasoning(mark="MIDDLE"), turns) == ["Bob.<|im_end|>"]


def test_a_template_that_marks_answers_as_one_piece_cannot_leave_one_out(tokenizer):
    turns = (ASKED, Turn("assistant", ("Ann.",), learned=False), ASKED, Turn("assistant", ("Bob.",)))
    whole = "{% generation %}" + PLAIN + "{% endgeneration %}"
    with pytest.raises(DataError, match="2 answers, of which some are not to be learned, .* marks 1"):
        rendered_of(tokenizer, whole, turns)


def test_a_template_is_its_files_text(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    text = "{% for m in messages %}{% generation %}é{{ m }}{% endgeneration %}{% endfor %}"
    file.write_text(text, encoding="utf-8")
    assert read_template(str(file)) == text and read_template(None) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory. Give a file with a Jinja template"),
        (b"", "is empty. Give a file with a Jinja template, or null"),
        (b" \n", "is empty"),
        (b"ab\xff", r"is not UTF-8 text \(byte 2\)"),
        (b"\n{% for x in %}", "is no Jinja template: line 2: "),
        (b"{{ open", "is no Jinja template: line 1: "),
        (b"x" * (MAX_BYTES + 1), "has 1048577 bytes, more than any template"),
    ],
)
def test_what_is_no_template_is_told(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data\.chat_template={file} {reason}"):
        read_template(str(file))


def test_a_folder_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_template(str(tmp_path))


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


def turns_of(*texts: str, system: str | None = None) -> tuple[Turn, ...]:
    turns = tuple(Turn(role, (text,)) for role, text in zip(("user", "assistant") * len(texts), texts))
    return turns if system is None else (Turn("system", (system,)), *turns)


def answers_of(rendered: Rendered) -> list[str]:
    return [rendered.text[start:stop].strip() for start, stop in rendered.spans]


def learned(tokenizer: Any, turns: tuple[Turn, ...]) -> list[str]:
    text = ConversationTokenizer(tokenizer, NO_MEDIA, DataConfig())
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
    assert learned(tokenizer, turns_of("What?", "red square"))[:2] == [" red", " square"]
    assert learned(tokenizer, turns_of("What?", "Yes."))[0] == " Yes."


def test_an_end_of_turn_that_is_not_eos_is_learned_behind_its_block() -> None:
    tokenizer = of_words("USER:", " What?", " ASSISTANT:", " red")
    tokenizer.chat_template = LLAVA.replace(" {% endgeneration %}", "{% endgeneration %}<end>")
    assert find_answer_end(tokenizer) == tokenizer.convert_tokens_to_ids("<end>") != tokenizer.eos_token_id
    assert learned(tokenizer, turns_of("What?", "red", "What?", "red")) == [" red", "<end>", " red", "<end>"]


@pytest.mark.parametrize(
    "template, end", [(ENDS, "<|im_end|>"), (ENDS.replace(PARTS, STRINGS), "<|im_end|>"), (LLAVA, None), ("x", None)]
)
def test_the_token_that_ends_an_answer(tokenizer: Any, template: str, end: str | None) -> None:
    found = find_answer_end(with_template(tokenizer, template))
    assert found == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_a_template_of_strings_is_handed_strings(tokenizer: Any) -> None:
    strings = with_template(tokenizer, ENDS.replace(PARTS, STRINGS) + ASKS)
    assert answers_of(render(strings, to_messages(turns_of("hi", "there")))) == ["there<|im_end|>"]
    pictured = to_messages((Turn("user", ("Look: ", b"picture")), Turn("assistant", ("Red.",))))
    with pytest.raises(DataError, match="turn 1 shows 1 images, and the chat template takes text alone"):
        render(strings, pictured)


@pytest.mark.parametrize("block", [False, True])
def test_a_system_text_that_the_template_leaves_out_is_told(tokenizer: Any, block: bool) -> None:
    without = ENDS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}") + ASKS
    if block:
        without = without.replace(PARTS, "{% generation %}" + PARTS + "{% endgeneration %}")
    messages = to_messages(turns_of("hi", "salut", system="Answer in French."))
    with pytest.raises(DataError, match=r"leaves out or rewrites text of turn 1 \(system\): 'Answer in French.'"):
        render(with_template(tokenizer, without), messages)


def test_a_system_text_in_the_users_turn_is_written() -> None:
    messages = to_messages(turns_of("hi", "salut", system="Answer in  French."))
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
    messages = to_messages(turns_of("a", "b", "c", "d"))
    if lost is None:
        check_written(text, spans, messages)
        return
    with pytest.raises(DataError, match=f"leaves out or rewrites text of {lost} "):
        check_written(text, spans, messages)


def test_words_of_an_answer_that_become_a_thought_are_told() -> None:
    said = "Write </think> behind the block, then go on."
    torn = "q<think>\nWrite \n</think>\n\n behind the block, then go on."
    with pytest.raises(DataError, match="rewrites text of turn 2"):
        check_written(torn, ((1, len(torn)),), to_messages(turns_of("q", said)))
    check_written(f"q{said}", ((1, len(said) + 1),), to_messages(turns_of("q", said)))


def test_a_thought_that_an_earlier_answer_loses_is_told() -> None:
    messages = to_messages(turns_of("a", "<think>x</think>b", "c", "<think>y</think>d"))
    both = "a<think>\nx\n</think>\n\nb;c<think>\ny\n</think>\n\nd"
    middle = both.index(";")
    check_written(both, ((1, middle), (middle + 2, len(both))), messages)
    one = "a b;c<think>\ny\n</think>\n\nd"
    with pytest.raises(DataError, match="rewrites text of turn 2"):
        check_written(one, ((2, 3), (5, len(one))), messages)


def test_an_answer_without_a_character_learns_its_end_alone() -> None:
    tokenizer = of_words("USER:", " What?", " ASSISTANT:", " red")
    tokenizer.chat_template = LLAVA.replace(" {% endgeneration %}", "{% endgeneration %}<end>")
    assert learned(tokenizer, turns_of("What?", "", "What?", "red")) == ["<end>", " red", "<end>"]


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
