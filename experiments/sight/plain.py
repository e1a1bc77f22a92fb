"""Answers of an exported model by plain transformers, greedily, one question at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil


class Said(NamedTuple):
    """An answer: its text, and its tokens, the one that ended it included."""

    text: str
    tokens: int


@torch.inference_mode()
def plain_answers(model: Path, annotations: Path, limit: int, max_new_tokens: int = 6) -> list[Said]:
    """Of the first `limit` samples. The prompt is written out here, not taken from the code that dhp asks with."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        Qwen2VLImageProcessorPil.from_pretrained(model),
    )
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    found = []
    for sample in json.loads(annotations.read_text(encoding="utf-8"))[:limit]:
        pixels = processor(images=[Image.open(annotations.parent / sample["image"])], return_tensors="pt")
        places = "<|image_pad|>" * (int(pixels["image_grid_thw"].prod()) // processor.merge_size**2)
        # The newline behind the tag belongs to the tag, as docs/data.md has it.
        question = sample["conversations"][0]["value"].replace("<image>\n", f"<|vision_start|>{places}<|vision_end|>")
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        kinds = (ids == plain.config.image_token_id).long()
        named = {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        new = plain.generate(**named, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :]
        found.append(Said(tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return found
