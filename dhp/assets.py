"""The tiny model and dataset of the embedded default: made once, found again afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SAMPLES = 256


def make_tiny_assets(folder: Path) -> None:
    """Make `folder`/data (pictures and LLaVA annotations) and `folder`/model (a Hugging Face directory) if absent."""
    data, model = folder / "data", folder / "model"
    if not (data / "annotations.json").is_file():
        from dhp.data.shapes import make_dataset

        print(f"making the tiny dataset in {data}", flush=True)
        make_dataset(data, samples=SAMPLES)
    if not (model / "config.json").is_file():
        from dhp.models.tiny import make_tiny_model

        print(f"making the tiny model in {model}", flush=True)
        make_tiny_model(model, _corpus(data / "annotations.json"))


def _corpus(annotations: Path) -> Iterator[str]:
    """Text to train the tokenizer on: the conversations, and this project's own words."""
    for record in json.loads(annotations.read_text()):
        for turn in record["conversations"]:
            yield turn["value"]
    root = Path(__file__).parents[1]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        if page.is_file():
            yield page.read_text()
