"""Twenty-four conversations, and what other trainers make of them: `python -m tests.golden.dialogues TRAINER MODEL`.

TRAINER: llama_factory (0.9.5) | swift (ms-swift 4.6.0) | mistral (mistral-common 1.13.1), which have to be installed
beside; MODEL: a directory with the tokenizer of `tests.golden.vocabularies.load_qwen` and a Qwen2.5-VL's configuration.
tests/golden/dialogues/TRAINER.json holds token ids and what is learned."""

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

IMAGE_TOKEN = 151655
PIXELS = (3136, 1003520)  # least and most of a picture
SIZES = [(640, 480), (333, 777), (300, 75), (28, 28), (56, 84), (400, 400)]  # of pictures 0 to 5


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


# Turns, and the numbers of the pictures that they show.
DIALOGUES: list[tuple[list[dict[str, str]], list[int]]] = [
    ([user("<image>What is this?"), answer("A picture of 3 cats.")], [0]),
    (
        [
            *(user("<image>\nDescribe."), answer("Ein schönes Bild — straße № 5.")),
            *(user("And now?"), answer("Yes.\n\nMore text here:\n```python\nprint(1)\n```")),
        ],
        [1],
    ),
    ([system("You are terse."), user("First <image> second <image> which is wider?"), answer("The second.")], [2, 3]),
    ([user("No picture at all."), answer("Right.")], []),
    ([user("<image>"), answer("42")], [4]),
    ([user("<image> leading space "), answer(" trailing space ")], [5]),
    ([user("中文问题<image>是什么?"), answer("这是一张图片。😀")], [0]),
    ([user("<image>Q1"), answer("A1"), user("<image>Q2"), answer("A2"), user("Q3"), answer("A3")], [1, 4]),
    ([user("<image>Numbers: 1234567890 and tabs\t\tand   spaces"), answer("1,234.50\n\n\n- a\n- b")], [3]),
    ([user("<image>Empty then"), answer("x")], [5]),
    ([user("Compare <image><image> please"), answer("same")], [3, 4]),
    ([user("A question that says <|im_end|> inside <image>"), answer("An answer")], [4]),
    ([user("What is left?\n<image>"), answer("A boat")], [2]),
    ([user("<image>\n<image>\nWhich is brighter?"), answer("The first\n")], [3, 5]),
    ([system("Antworte kurz.\n"), user("Was ist das?\n<image>\nGenau bitte."), answer("Ein Haus.")], [4]),
    ([user("One\n\n<image>\n\nTwo"), answer("\nThree")], [4]),
    ([user("<image>x = {'a': 1, \"b\": [2]}"), answer('{"bbox_2d": [12, 40, 199, 240], "label": "cat"}')], [0]),
    ([user("Обьясни <image> пожалуйста"), answer("Это кошка — и «собака».")], [3]),
    ([user("<image>Say hello 👋🏽"), answer("你好 👋🏽 hello\r\nbye")], [5]),
    ([user("Count:"), answer("1"), user("<image>again"), answer("2"), user("\nand more\n"), answer(" 3")], [3]),
    ([user("<image>The tag in an answer?"), answer("It is written as img, so.")], [4]),
    ([user("user\nassistant\n<image>"), answer("<|im_start|> is a token.")], [2]),
    ([user("<image>" + "long " * 60), answer("word " * 40 + "end")], [1]),
    ([user("   <image>   "), answer("...")], [0]),
]


def main(trainer: str, model: str) -> None:
    """Write what the trainer makes of them beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(SIZES):
            Image.new("RGB", size, (number * 40, 90, 200)).save(f"{folder}/{number}.png")
        found = []
        encode, version = {"llama_factory": _llama_factory, "swift": _swift, "mistral": _mistral}[trainer](model)
        for turns, pictures in DIALOGUES:
            ids, labels = encode(turns, [f"{folder}/{number}.png" for number in pictures])
            found.append({"ids": shortened(ids), "learned": spans(labels)})
    made = {"source": version, "command": f"python -m tests.golden.dialogues {trainer} MODEL"}
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in found)
    path = Path(__file__).parent / "dialogues" / f"{trainer}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"made": {json.dumps(made)},\n"dialogues": [\n{lines}\n]}}\n', encoding="utf-8")


def shortened(ids: list[int]) -> list[Any]:
    """Token ids, where a run of a picture's placeholders is [number of them]."""
    found: list[Any] = []
    for token in ids:
        if token != IMAGE_TOKEN:
            found.append(token)
        elif found and isinstance(found[-1], list):
            found[-1][0] += 1
        else:
            found.append([1])
    return found


def spans(labels: list[int]) -> list[tuple[int, int]]:
    """[start, stop) of what is learned."""
    edges = [0, *(int(label != -100) for label in labels), 0]
    changes = [at for at, (a, b) in enumerate(zip(edges, edges[1:])) if a != b]
    return list(zip(changes[::2], changes[1::2]))


def _llama_factory(model: str) -> Any:
    import importlib.machinery
    import os
    import types

    absent = types.ModuleType("torchaudio")  # which it imports, and text and pictures do not need
    absent.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = absent
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from importlib.metadata import version

    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model)
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]})
    processor = types.SimpleNamespace(
        image_processor=images, tokenizer=tokenizer, image_min_pixels=PIXELS[0], image_max_pixels=PIXELS[1]
    )
    given = import_module("llamafactory.hparams").DataArguments(template="qwen2_vl", cutoff_len=8192)
    template = import_module("llamafactory.data.template").get_template_and_fix_tokenizer(tokenizer, given)
    encoder = import_module("llamafactory.data.processor.supervised").SupervisedDatasetProcessor(
        template, tokenizer, processor, given
    )

    def encode(turns: list[dict[str, str]], pictures: list[str]) -> tuple[list[int], list[int]]:
        said = turns[0]["content"] if turns[0]["role"] == "system" else None
        rest = turns[1:] if said is not None else turns
        return encoder._encode_data_example(rest[:-1], rest[-1:], said, None, pictures, [], [])

    return encode, f"llamafactory {version('llamafactory')} (PyPI), SupervisedDatasetProcessor, template qwen2_vl"


def _swift(model: str) -> Any:
    import os
    from importlib.metadata import version

    os.environ |= {"MIN_PIXELS": str(PIXELS[0]), "MAX_PIXELS": str(PIXELS[1])}

    processor = import_module("swift.model").get_processor(model, model_type="qwen2_5_vl")
    template = import_module("swift.template").get_template(processor, template_type="qwen2_5_vl")
    template.set_mode("train")

    def encode(turns: list[dict[str, str]], pictures: list[str]) -> tuple[list[int], list[int]]:
        found = template.encode({"messages": turns, "images": pictures})
        return list(map(int, found["input_ids"])), list(map(int, found["labels"]))

    return encode, f"ms-swift {version('ms-swift')} (PyPI), get_template, template qwen2_5_vl"


def _mistral(_: str) -> Any:
    from importlib.metadata import version

    file = Path(str(import_module("mistral_common").__file__)).parent / "data" / "tekken_240911.json"
    instruct = import_module("mistral_common.protocol.instruct.messages")
    request = import_module("mistral_common.protocol.instruct.request").ChatCompletionRequest
    mode = import_module("mistral_common.protocol.instruct.validator").ValidationMode.finetuning
    tokenizers = import_module("mistral_common.tokens.tokenizers.mistral")
    tokenizer = tokenizers.MistralTokenizer.from_file(str(file), mode=mode)
    kinds = {"user": instruct.UserMessage, "assistant": instruct.AssistantMessage, "system": instruct.SystemMessage}

    def encode(turns: list[dict[str, str]], pictures: list[str]) -> tuple[list[int], list[int]]:
        said = [kinds[turn["role"]](content=without_tags(turn["content"])) for turn in turns]
        return tokenizer.encode_chat_completion(request(messages=said)).tokens, []

    return encode, f"mistral-common {version('mistral-common')} (PyPI), MistralTokenizer of tekken_240911.json"


def without_tags(text: str) -> str:
    """A turn without its pictures."""
    return text.replace("<image>", "P")


if __name__ == "__main__":
    main(*sys.argv[1:])
