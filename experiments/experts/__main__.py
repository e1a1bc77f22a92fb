"""`python -m experiments.experts [--rounds N] [--tokens N]`: experts shared out among two replicas, against experts cut
over two tensor ranks. A JSON line for each layout."""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3MoeConfig

from experiments.experts.rank import RANKS, measure

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SIZES |= {"intermediate_size": 512, "vocab_size": 512}


def make_model(folder: Path, **sizes: int) -> Path:
    """A LLaVA with random weights and a decoder with experts; its tower is as small as may be."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=Qwen3MoeConfig(**SIZES | sizes), vision_config=vision, image_token_index=505)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def compare(rounds: int, tokens: int, **sizes: int) -> list[dict[str, Any]]:
    """A row for each layout; tokens: of each sample."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder) / "model", **sizes))
        multiprocessing.spawn(measure, (port, model, tokens, rounds, answers), nprocs=RANKS)
    rows = []
    while not answers.empty():
        rows.append(answers.get())
    return rows


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    for row in compare(given.rounds, given.tokens):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
