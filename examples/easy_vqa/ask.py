"""Asks the exported model by plain transformers, without dhp: its answers are exact where dhp's evaluation says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from prepare import answer_of, question_of, read_rows
from transformers import AutoModelForImageTextToText, AutoProcessor

MOST, SYSTEM = 200, "Answer."


@torch.no_grad()
def main(exported: Path, samples: Path, data: Path) -> int:
    """0 where of the first MOST of the evaluated questions the same ones are answered exactly."""
    model = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32, trust_remote_code=False)
    processor = AutoProcessor.from_pretrained(exported, trust_remote_code=False)
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    evaluated = [one for one in lines if one.get("images", "own") == "own"][:MOST]
    rows = read_rows(data / f"{evaluated[0]['dataset']}.jsonl")
    same = right = 0
    for one in evaluated:
        sample = rows[one["row"]]
        picture = {"type": "image", "image": Image.open(data / sample["image"]).convert("RGB")}
        asked = [picture, {"type": "text", "text": question_of(sample)}]
        turns = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, {"role": "user", "content": asked}]
        inputs = processor.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answer = processor.decode(tokens, skip_special_tokens=True).strip()
        right += answer == answer_of(sample)
        same += (answer == answer_of(sample)) == one["exact"]
    count = len(evaluated)
    print(f"plain transformers: {right} of {count} answers are exact; of {same} dhp's evaluation says the same")
    return 0 if same == count else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
