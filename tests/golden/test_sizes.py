"""Tokens of pictures by their size, beside the publishers' own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PixtralImageProcessorPil

from dhp.core.errors import DataError
from dhp.data.sample.picture_inputs import Pictures
from dhp.models.pretrained import load_image_processor
from dhp.models.registry import load_family
from dhp.tiny.tiny_model import make_family
from tests.helpers.rows import slow_but

TABLES = {file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "sizes").iterdir())}
REFUSED = "refused"


def count(folder: Path, name: str, table: dict[str, Any], sizes: list[tuple[int, int]]) -> list[int | str]:
    """Tokens of pictures of these sizes, from headers, by a small model that cuts pictures as the published one."""
    make_family(name, folder)
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config["vision_config"]):
        section |= {key: value for key, value in table["config"].items() if key in section}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("preprocessor_config.json", "processor_config.json"):
        if (folder / file).exists():
            given = json.loads((folder / file).read_text())
            given |= {key: value for key, value in table["processor"].items() if key in given}
            given.get("image_processor", given).update(table["processor"])
            (folder / file).write_text(json.dumps(given))
    own = load_family(str(folder)).processor
    pictures = Pictures(
        load_image_processor(str(folder)), own.image_tokens, own.patches, None, None, None, own.image_arguments
    )
    found: list[int | str] = []
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / f"{number}.png")
        try:
            (seen,) = pictures.outline([folder / f"{number}.png"])
            found.append(own.image_tokens(seen.grid))
        except DataError:
            found.append(REFUSED)
    return found


# Pictures less than half a patch group high, which the installed library counts otherwise than the makers' own code
# does, and which are counted as it does here: a server that loads the model has the library's processor.
FLAT = {(1000, 10): ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe")}


QUICK = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma4")


@pytest.mark.parametrize("name", slow_but(sorted(TABLES.keys() - {"mistral3"}), *QUICK))
def test_they_are_the_publishers(name: str, tmp_path: Path) -> None:
    table = TABLES[name]
    sizes = [tuple(row["size"]) for row in table["pictures"]]
    found = count(tmp_path / name, name, table, sizes)
    wanted = [row.get("tokens", REFUSED) for row in table["pictures"]]
    other = {size for size, own, right in zip(sizes, found, wanted, strict=True) if own != right}
    assert other == {size for size, families in FLAT.items() if name in families}


def test_mistrals_are_its_librarys() -> None:
    """By the image processor alone: the model's whole processor needs torchvision."""
    table = TABLES["mistral3"]
    merged = {**table["processor"], "patch_size": {"height": 28, "width": 28}}  # as PixtralProcessor hands it on
    processor = PixtralImageProcessorPil(**merged)
    for row in table["pictures"]:
        ((height, width),) = processor(Image.new("RGB", tuple(row["size"])), return_tensors="np")["image_sizes"]
        assert (height // 28) * (width // 28) == row["tokens"], row
