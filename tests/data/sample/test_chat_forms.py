"""What a template wrote around one conversation's texts, found again around another's: equal to looking at each."""

import copy
from typing import Any

import pytest

from dhp.core.errors import DataError
from dhp.data.read.records import Turn
from dhp.data.sample import chat
from dhp.data.sample.chat import Rendered, render, to_messages
from dhp.data.sample.chat_forms import Forms
from tests.data.sample.test_chat import REASONING, reasoning
from tests.golden.test_forms import FORMS

TEXT = "{{ m.content[0].text }}<|im_end|>"
MARKED = f"{{% generation %}}{TEXT}{{% endgeneration %}}"
EMPTY, SAID = "<think>\\n\\n</think>\\n\\n", "m.content[0].text.split('</think>')[-1]"
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}MARKED{% else %}"
    "{{ m.content[0].text }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{% endif %}"
)
TEMPLATES = {name: form.template for name, form in FORMS.items()} | {
    "thoughts that the prompt opens": reasoning("<think>\n"),
    "marked late": reasoning(mark="LATE"),
    "ChatML that opens thoughts": OPENING.replace("MARKED", TEXT).replace("OPENED", "<think>\\n"),
    "ChatML that opens thoughts, marked": OPENING.replace("MARKED", MARKED).replace("OPENED", "<think>\\n"),
    "ChatML with an empty block of thoughts": OPENING.replace("MARKED", TEXT).replace("OPENED", EMPTY),
    "thoughts outside of what is marked": OPENING.replace("MARKED", MARKED)
    .replace("m.content[0].text", SAID)
    .replace("OPENED", ""),
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}
TALKS = [
    ("What colour?", "red"),
    ("What is it?", "it is blue\nand green", "And now?", "assistant: no"),
    (" What is it?\n", " a circle ", "Why?", "user"),
    ("Think.", "<think>\nit is round\n</think>\n\ncircle", "And?", "<think>\n\n</think>\n\nred"),
    ("What is it?", "", "And?", "red"),
    ("Hi", "you"),
    ("Hi", "<think>\nit is round\n</think>\n\ncircle"),
    ("Hi", "<think>\n\n</think>\n\nred"),
    ("a", "a", "a", "a", "a", "a"),
]


def talk(texts: tuple[str, ...]) -> list[dict]:
    return to_messages(tuple(Turn(role, (text,)) for role, text in zip(("user", "assistant") * len(texts), texts)))


def rendered(tokenizer: Any, texts: tuple[str, ...]) -> Rendered | str:
    try:
        return render(tokenizer, talk(texts))
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_looking_at_each(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATES[name]
    alone = []
    for texts in TALKS:
        monkeypatch.setattr(chat, "_FORMS", Forms())
        alone.append(rendered(tokenizer, texts))
    monkeypatch.setattr(chat, "_FORMS", Forms())
    for _ in range(2):
        assert [rendered(tokenizer, texts) for texts in TALKS] == alone


def test_the_second_of_a_form_is_rendered_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls = copy.deepcopy(tokenizer), []
    tokenizer.chat_template = TEMPLATES["ChatML"]
    monkeypatch.setattr(chat, "_FORMS", Forms())
    render(tokenizer, talk(TALKS[1]))
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *given, **named: calls.append(1) or apply(*given, **named)
    )
    found = render(tokenizer, talk(("Who?", "you", "Who?", "me")))
    assert len(calls) == 1
    assert [found.text[slice(*span)] for span in found.spans] == ["you<|im_end|>\n", "me<|im_end|>\n"]


def test_what_a_template_rewrites_is_looked_at_by_itself(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thoughts are left out of all answers but the last: no conversation with some is like the one learned from."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = REASONING.replace("OPENED", "").replace("DONE", "")
    for place in ("BEGIN", "MIDDLE", "LATE"):
        tokenizer.chat_template = tokenizer.chat_template.replace(place, "")
    monkeypatch.setattr(chat, "_FORMS", Forms())
    render(tokenizer, talk(("Who?", "you")))
    seen: list[Any] = []
    slow = chat._render_by_prefix
    monkeypatch.setattr(chat, "_render_by_prefix", lambda *given: seen.append(given) or slow(*given))
    assert render(tokenizer, talk(("Who?", "<think>\nit is\n</think>\n\nme"))).spans and len(seen) == 1
