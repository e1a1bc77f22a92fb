"""experiments.beside_trl: what it gives TRL, and answers that are long."""

import json
from pathlib import Path

from PIL import Image

from dhp.models.pretrained import load_tokenizer
from experiments.beside_trl.__main__ import conversation, write_long

ROW = {
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "blue"}],
}


def test_a_conversation_as_trl_takes_it(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    found = conversation(ROW, tmp_path, "Answer.")
    system, user = found["prompt"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "Answer."}]}
    assert user == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    assert found["completion"] == [{"role": "assistant", "content": [{"type": "text", "text": "blue"}]}]
    assert found["images"][0].getpixel((0, 0)) == (255, 0, 0)


def test_long_answers_have_the_tokens_that_are_asked_for(tmp_path: Path, tiny_assets: Path) -> None:
    model, source = str(tiny_assets / "model"), tmp_path / "train.jsonl"
    source.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    write_long(source, model, 50, tmp_path / "50.jsonl")
    answer = json.loads((tmp_path / "50.jsonl").read_text(encoding="utf-8"))["conversations"][1]["value"]
    assert answer.startswith("what is it? blue. what is it? blue.")
    assert len(load_tokenizer(model)(answer)["input_ids"]) == 50 - 1
