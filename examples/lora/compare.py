"""Asks the exported model by plain transformers, without dhp, what `dhp generate` has asked; counts like answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


def main(exported: Path, answers: Path) -> int:
    """0 where all are the same. answers: lines of `dhp generate dataset=held_out`, in the order of held_out.jsonl."""
    model = AutoModelForImageTextToText.from_pretrained(exported, dtype="float32")
    processor = AutoProcessor.from_pretrained(exported)
    asked = [json.loads(line) for line in Path("held_out.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    same = 0
    for sample, answer in zip(asked, found, strict=True):
        picture = {"type": "image", "image": Image.open(Path("pictures") / sample["image"])}
        question = {"type": "text", "text": sample["conversations"][0]["value"].removeprefix("<image>\n")}
        turns, form = [{"role": "user", "content": [picture, question]}], {"tokenize": True, "return_dict": True}
        inputs = processor.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", **form)
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        same += processor.decode(tokens, skip_special_tokens=True).strip() == answer["answer"].strip()
    print(f"{same} of {len(found)} answers of plain transformers are those of dhp")
    return 0 if same == len(found) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
