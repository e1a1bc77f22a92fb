"""Which characters of a conversation are answers, under templates that write more than the sample says."""

from __future__ import annotations

import copy

import pytest

from dhp.core.errors import DataError
from dhp.data.read.records import Turn
from dhp.data.sample import chat
from dhp.data.sample.chat import Rendered, render, to_messages

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
    "template",
    [
        "{% include 'a' %}",
        "{{ messages[0].content + 1 }}",
        "{{ [1][messages | length + 9] + 1 }}",
    ],
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
