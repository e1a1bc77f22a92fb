"""What is learned of a conversation under chat templates of the published forms, with published vocabularies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from dhp.config.data import DataConfig
from dhp.core.errors import DataError
from dhp.data.read.records import Record, Turn
from dhp.data.sample.picture_inputs import NO_MEDIA
from dhp.data.sample.template_check import find_answer_end
from dhp.data.sample.tokens import ConversationTokenizer
from tests.golden.vocabularies import FOLDER, load_mistral, load_qwen, load_smollm2
from tests.helpers.rows import slow

pytestmark = [
    pytest.mark.xdist_group("vocabularies"),  # each takes seconds to be read
    pytest.mark.skipif(not FOLDER.is_dir(), reason="`make test` puts requirements-vocabularies.txt there"),
]
VOCABULARIES: dict[str, Callable[..., Any]] = {"qwen": load_qwen, "mistral": load_mistral, "smollm2": load_smollm2}
TEXT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)


@dataclass(frozen=True)
class Form:
    """A template, without line ends between its pieces. end: the token that ends an answer; None: none does.

    learned: of the answers "red" and "it is blue". system: whether it takes a system turn."""

    template: str
    end: str | None
    learned: tuple[str, str]
    system: bool = True
    tokens: tuple[str, ...] = ()


def each(user: str, answer: str, system: str = "{{ m.content[0].text }}\n\n", ask: str = "") -> str:
    branches = (
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'assistant' %}}{answer}{{% else %}}{system}{{% endif %}}"
    )
    ask = f"{{% if add_generation_prompt %}}{ask}{{% endif %}}" if ask else ""
    return f"{{% for m in messages %}}{branches}{{% endfor %}}{ask}"


MARKED = "{% generation %}" + TEXT + "{% endgeneration %}"
USER, ANSWER = f"<|user|>{TEXT}<|eot|>", f"<|assistant|>{TEXT}<|eot|>"
FORMS = {
    "ChatML": Form(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + TEXT + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
        ("red<|im_end|>", "it is blue<|im_end|>"),
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "LLaVA-1.5: no end token, a space before answers": Form(
        each(f"USER: {TEXT} ", f"ASSISTANT: {MARKED} ", ask="ASSISTANT:"), None, (" red", " it is blue")
    ),
    "Vicuna: a space before answers, whose end token is outside of their block": Form(
        each(f"USER: {TEXT} ", f"ASSISTANT: {MARKED}</s>", ask="ASSISTANT:"),
        "</s>",
        (" red</s>", " it is blue</s>"),
        tokens=("</s>",),
    ),
    "Phi: the end of a turn is not the tokenizer's": Form(
        each(f"<|user|>\n{TEXT}<|end|>\n", f"<|assistant|>\n{TEXT}<|end|>\n", ask="<|assistant|>\n"),
        "<|end|>",
        ("red<|end|>", "it is blue<|end|>"),
        tokens=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "Gemma: system merged into the user's turn, which is the model's": Form(
        "{% set first = messages[0].content[0].text + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        f"{{{{ first if loop.first else '' }}}}{TEXT}<end_of_turn>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        ("red<end_of_turn>", "it is blue<end_of_turn>"),
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    "Mistral: no prompt for an answer": Form(
        each(f"[INST]{TEXT}[/INST]", f"{TEXT}</s>", f"[SYSTEM_PROMPT]{TEXT}[/SYSTEM_PROMPT]"),
        "</s>",
        ("red</s>", "it is blue</s>"),
        tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "</s>"),
    ),
    "SmolVLM: a space before answers, an end of utterance": Form(
        each(f"User: {TEXT}<end_of_utterance>\n", f"Assistant: {TEXT}<end_of_utterance>\n", ask="Assistant:"),
        "<end_of_utterance>",
        (" red<end_of_utterance>", " it is blue<end_of_utterance>"),
        tokens=("<end_of_utterance>",),
    ),
    "strings alone": Form(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|eot|>",
        ("red<|eot|>", "it is blue<|eot|>"),
        tokens=("<|user|>", "<|assistant|>", "<|system|>", "<|eot|>"),
    ),
    "no system": Form(
        each(USER, ANSWER, "{{ raise_exception('no system') }}", "<|assistant|>"),
        "<|eot|>",
        ("red<|eot|>", "it is blue<|eot|>"),
        False,
        ("<|user|>", "<|assistant|>", "<|eot|>"),
    ),
    "a system turn that is left out": Form(
        each(USER, ANSWER, "", "<|assistant|>"),
        "<|eot|>",
        ("red<|eot|>", "it is blue<|eot|>"),
        False,
        ("<|user|>", "<|assistant|>", "<|eot|>"),
    ),
    "thoughts": Form(
        each(
            USER,
            "<|assistant|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            f"{TEXT}<|eot|>",
            ask="<|assistant|>",
        ),
        "<|eot|>",
        ("<think>hm</think>red<|eot|>", "it is blue<|eot|>"),
        tokens=("<|user|>", "<|assistant|>", "<|eot|>"),
    ),
}


@cache
def load(vocabulary: str) -> Any:
    return VOCABULARIES[vocabulary]("", sorted({token for form in FORMS.values() for token in form.tokens}))


def learn(encoder: ConversationTokenizer, tokenizer: Any, system: str | None, thoughts: str = "") -> list[str]:
    turns = [
        *([Turn("system", (system,))] if system else []),
        *(Turn("user", ("What colour?",)), Turn("assistant", ("red",), True, thoughts)),
        *(Turn("user", ("And now?",)), Turn("assistant", ("it is blue",))),
    ]
    own = encoder.tokenize(Record("made", 1, "made", tuple(turns)), [], [], [])
    edges = [at for at, (a, b) in enumerate(zip([False, *own.target], [*own.target, False])) if a != b]
    return [tokenizer.decode(own.ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2])]


CASES = [("smollm2", form) for form in FORMS]
SLOW = [slow(name, form) for name in ("qwen", "mistral") for form in FORMS]


@pytest.mark.parametrize(("vocabulary", "form"), [*CASES, *SLOW])
def test_answers_are_learned_from_their_first_word_to_their_end(vocabulary: str, form: str) -> None:
    tokenizer, own = load(vocabulary), FORMS[form]
    tokenizer.chat_template = own.template
    encoder = ConversationTokenizer(tokenizer, NO_MEDIA, DataConfig())
    thoughts = "hm" if form == "thoughts" else ""
    assert learn(encoder, tokenizer, None, thoughts) == list(own.learned)
    end = find_answer_end(tokenizer)
    assert (None if end is None else tokenizer.convert_ids_to_tokens(end)) == own.end
    if own.system:
        assert learn(encoder, tokenizer, "Be brief.", thoughts) == list(own.learned)
    else:
        with pytest.raises(DataError, match="system"):
            learn(encoder, tokenizer, "Be brief.")
    if not thoughts:
        with pytest.raises(DataError, match="thought"):
            learn(encoder, tokenizer, None, "hm")
