"""The tiny model and dataset of the embedded default: made once, found again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dhp.base.startup import say_line

SAMPLES = 256
NEEDLES = "needles"
_NEEDLE_SAMPLES, _NEEDLE_FRAMES = 512, (16, 32, 48, 64)


def make_tiny_assets(folder: Path, say: Callable[[str], None] = say_line, needles: bool = False) -> None:
    """Make `folder`/data (pictures and LLaVA annotations) and `folder`/model (a Hugging Face directory) if absent, and
    `folder`/needles (videos, in each of which one frame is asked for) if wanted. say: is told when there is something
    to make.

    The tokenizer learns the pictures' own text and nothing else, so that the same code gives the same model.
    """
    data, model = folder / "data", folder / "model"
    if not data.is_dir() or not model.is_dir():
        say(f"making the tiny model and dataset in {folder}")
    from dhp.data.tiny_dataset import make_dataset, texts

    make_dataset(data, samples=SAMPLES)
    if needles and not (folder / NEEDLES).is_dir():
        say(f"making {_NEEDLE_SAMPLES} videos in {folder / NEEDLES}")
        from dhp.data.needle import make_needles  # which brings PyAV along

        make_needles(folder / NEEDLES, _NEEDLE_SAMPLES, _NEEDLE_FRAMES)
    if not (model / "config.json").is_file():
        from transformers.utils import logging

        from dhp.models.tiny import make_tiny_model

        logging.disable_progress_bar()  # one small file
        make_tiny_model(model, texts(data))
