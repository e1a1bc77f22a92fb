"""How many tiles an image becomes, and processors that cut none."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from transformers import GotOcr2ImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.models.kosmos2_5.image_processing_pil_kosmos2_5 import Kosmos2_5ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from dhp.core.errors import ConfigError
from dhp.data.read.records import Record, Turn
from dhp.data.sample.lengths import tile_arguments
from tests.data.sample.made import make_preprocessor

SIDE = 28


def tiled() -> GotOcr2ImageProcessorPil:
    """As InternVL's: tiles of one side, a thumbnail beside several."""
    return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=12)


@pytest.mark.parametrize(("most", "tiles"), [(None, 5), (12, 5), (4, 5), (3, 4), (2, 3), (1, 1)])
def test_a_wide_image_becomes_so_many(tokenizer, tmp_path: Path, most: int | None, tiles: int) -> None:
    """4:1, so it is cut into 4 in a row, or as many as there may be, and a thumbnail beside several."""
    Image.new("RGB", (400, 100)).save(tmp_path / "wide.png")
    processor = tiled()

    def patches(output):
        pixels = output["pixel_values"]
        return pixels.reshape(len(pixels), -1), (len(pixels), 1, 1)

    seen = {"image_processor": processor, "image_tokens": lambda grid: grid[0], "patches": patches}
    reader = make_preprocessor(tokenizer, **seen, image_arguments=tile_arguments(processor, most))
    turns = (Turn("user", (tmp_path / "wide.png", "What?")), Turn("assistant", ("A wall.",)))
    record = Record("a", 1, "a: row 1", turns)
    sample = reader(record)
    assert sample.grids == ((tiles, 1, 1),) and sample.pixels[0].shape == (tiles, 3 * SIDE * SIDE)
    assert reader.measure(record)[:2] == (tiles, len(sample.input_ids))
    other = make_preprocessor(tokenizer, image_processor=processor, image_arguments=tile_arguments(processor, 9))
    assert reader.fingerprint() != other.fingerprint()


def test_the_name_is_the_processors_own() -> None:
    assert tile_arguments(tiled(), None) == {} and tile_arguments(tiled(), 6) == {"max_patches": 6}
    assert tile_arguments(MllamaImageProcessorPil(), 3) == {"max_image_tiles": 3}


@pytest.mark.parametrize("kind", [Qwen2VLImageProcessorPil, Kosmos2_5ImageProcessorPil])
def test_a_processor_without_tiles_is_refused(kind: type) -> None:
    """Kosmos has a max_patches that counts patches."""
    with pytest.raises(ConfigError, match=f"data.max_tiles=4, but {kind.__name__} has no setting"):
        tile_arguments(kind(), 4)


def test_fewer_than_the_processors_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="data.max_tiles=1 < min_patches=2"):
        tile_arguments(GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=2), 1)
