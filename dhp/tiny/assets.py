"""The tiny model and datasets of the embedded default: made once, found again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from dhp.config.parts import read_datasets
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.process import say_line

SAMPLES = 256


def make_tiny_assets(folder: Path, say: Callable[[str], None] = say_line, further: Collection[str] = ()) -> None:
    """Make `folder`/data (pictures and LLaVA annotations) and `folder`/model (a Hugging Face directory) if absent, and
    of FURTHER the datasets that are asked for. say: receives a line when there is something to make.

    The tokenizer learns the pictures' own text and nothing else, so that the same code gives the same model.
    """
    data, model = folder / "data", folder / "model"
    if not data.is_dir() or not model.is_dir():
        say(f"making the tiny model and dataset in {folder}")
    from dhp.tiny.pictures import make_dataset, texts

    make_dataset(data, samples=SAMPLES)
    for name in further:
        if not (folder / name).is_dir():
            say(f"making the dataset in {folder / name}")
            FURTHER[name](folder / name)
    if not (model / "config.json").is_file():
        from transformers.utils import logging

        from dhp.tiny.model import make_tiny_model

        logging.disable_progress_bar()  # one small file
        make_tiny_model(model, texts(data))


def _make_needles(folder: Path) -> None:
    from dhp.tiny.needles import make_needles  # which imports PyAV

    make_needles(folder, samples=512, frames=(16, 32, 48, 64))


def _make_notes(folder: Path) -> None:
    from dhp.tiny.pictures import make_notes

    make_notes(folder, samples=256, notes=32)


# Further datasets, by the folder of each: videos in which one frame is asked for; long texts.
FURTHER: dict[str, Callable[[Path], None]] = {"needles": _make_needles, "notes": _make_notes}


def make_tiny(config: Config, folder: str, say: Callable[[str], None]) -> None:
    """The tiny model and dataset below `folder`, as far as they are not there. Raises ConfigError."""
    from dhp.tiny.assets import FURTHER, make_tiny_assets

    read = [Path(config.data.data_registry[name].annotation_path).parent for name in read_datasets(config.data)]
    try:
        make_tiny_assets(Path(folder), say, [name for name in FURTHER if Path(folder) / name in read])
    except OSError as error:
        raise ConfigError(f"tiny_assets={folder} cannot be written ({error}); choose another") from error
