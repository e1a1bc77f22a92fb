"""Writes a tiny MixerVL with random weights; tokenizer and image processor are those of a tiny LLaVA."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from mixer_vl import MixerVlConfig, MixerVlForConditionalGeneration
from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor, Qwen2Config

SIDE, PATCH = 28, 7


def main(llava: Path, out: Path) -> None:
    """llava: the directory of a LLaVA. out: a new one."""
    tokenizer = AutoTokenizer.from_pretrained(llava)
    text = Qwen2Config(
        vocab_size=416, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    vision = {"image_size": SIDE, "patch_size": PATCH}
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = MixerVlForConditionalGeneration(MixerVlConfig(vision_config=vision, text_config=text, image_token_id=image))
    size = {"height": SIDE, "width": SIDE}
    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    # Sixteen patches are sixteen tokens: no token of a class in front of them.
    processor = LlavaProcessor(pictures, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full")
    model.save_pretrained(out)
    processor.save_pretrained(out)
    print(f"{out}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
