"""Positions and sizes are the publishers'."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, PixtralImageProcessorPil

from dhp.config.data import DataConfig
from dhp.core.errors import DataError
from dhp.data.sample.picture_inputs import ModelMedia, Pictures
from dhp.models.config_file import tell_positions
from dhp.models.family import Family
from dhp.models.pretrained import load_image_processor
from dhp.models.registry import load_family
from dhp.tiny.tiny_model import make_family
from tests.helpers.rows import slow_but

TABLES = {file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "positions").iterdir())}
IMAGE, VIDEO = 151655, 151656
STAMPED = ("qwen3_vl",)
MOVED = {name for name in ("a video of 4", "a video of 16", "a video of 64", "an image and a video")}
MOVED |= {"a video and an image", "two videos", "fractions of a second", "frames of a film"}
# Rows that the installed transformers has otherwise. One more or one less is news: see `data.positions`.
LIBRARY = {"qwen2_vl": MOVED, "qwen2_5_vl": MOVED, "ernie4_5_vl_moe": MOVED, "qwen3_vl": set()}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name, from configurations as they are published, as far as positions go."""

    @cache
    def load(name: str) -> Family:
        config = AutoConfig.for_model(name)
        config.image_token_id, config.video_token_id = IMAGE, VIDEO
        if name == "qwen2_5_vl":
            config.vision_config.tokens_per_second = 2
        folder = tmp_path_factory.mktemp(name)
        config.save_pretrained(folder)
        return load_family(str(folder))

    return load


def find(family: Family, row: dict[str, Any], published: bool) -> list[list[int]]:
    ids = torch.tensor([row["ids"]])
    kinds = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    shown = {kind: [part for part in row["parts"] if part[0] == kind] for kind in ("image", "video")}
    steps = 2 if family.config.model_type == "ernie4_5_vl_moe" else 1  # whose grids count frames
    grids = [[t * (steps if kind == "video" else 1), h, w] for kind in shown for _, (t, h, w), *_ in shown[kind]]
    images, videos = (
        torch.tensor(some) if some else None for some in (grids[: len(shown["image"])], grids[len(shown["image"]) :])
    )
    seconds = torch.tensor([part[2] for part in shown["video"]]) if shown["video"] else None
    family.processor.published_positions = published
    found = family.processor.position_ids(ids, kinds, images, torch.tensor([ids.shape[1]]), videos, seconds)
    return found[:, 0].tolist()


def wanted(row: dict[str, Any]) -> list[list[int]]:
    return [row[axis] for axis in ("time", "height", "width")]


@pytest.mark.parametrize("name", TABLES)
def test_they_are_the_publishers(families: Any, name: str) -> None:
    family = families(name)
    assert [row["row"] for row in TABLES[name]["rows"] if find(family, row, True) != wanted(row)] == []


@pytest.mark.parametrize("name", TABLES)
def test_the_library_has_others_where_it_is_known(families: Any, name: str) -> None:
    family = families(name)
    assert {row["row"] for row in TABLES[name]["rows"] if find(family, row, False) != wanted(row)} == LIBRARY[name]
    for rule in ("published", "library"):
        assert (tell_positions(rule, family) is not None) == (name in ("qwen2_vl", "qwen2_5_vl"))  # with videos here


def test_padded_rows_are_moved_one_by_one(families: Any) -> None:
    family, rows = families("qwen2_5_vl"), {row["row"]: row for row in TABLES["qwen2_5_vl"]["rows"]}
    two = [rows["two videos"], rows["a video of 16"]]
    longest = max(len(row["ids"]) for row in two)
    ids = torch.tensor([row["ids"] + [7] * (longest - len(row["ids"])) for row in two])
    videos = torch.tensor([[6, 4, 4], [10, 2, 4], [16, 4, 4]])
    lengths = torch.tensor([len(row["ids"]) for row in two])
    family.processor.published_positions = True
    found = family.processor.position_ids(
        ids, 2 * (ids == VIDEO).long(), None, lengths, videos, torch.tensor([1.0, 0.5, 1.0])
    )
    for number, row in enumerate(two):
        assert found[:, number, : lengths[number]].tolist() == wanted(row)
        assert not found[:, number, lengths[number] :].any()


SIZES = {file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "sizes").iterdir())}
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
    media = ModelMedia(
        load_image_processor(str(folder)), None, own.image_tokens, own.patches, image_arguments=own.image_arguments
    )
    pictures = Pictures(media, DataConfig())
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


@pytest.mark.parametrize("name", slow_but(sorted(SIZES.keys() - {"mistral3"}), *QUICK))
def test_they_are_the_publishers_of_sizes(name: str, tmp_path: Path) -> None:
    table = SIZES[name]
    sizes = [tuple(row["size"]) for row in table["pictures"]]
    found = count(tmp_path / name, name, table, sizes)
    wanted = [row.get("tokens", REFUSED) for row in table["pictures"]]
    other = {size for size, own, right in zip(sizes, found, wanted, strict=True) if own != right}
    assert other == {size for size, families in FLAT.items() if name in families}


def test_mistrals_are_its_librarys() -> None:
    """By the image processor alone: the model's whole processor needs torchvision."""
    table = SIZES["mistral3"]
    merged = {**table["processor"], "patch_size": {"height": 28, "width": 28}}  # as PixtralProcessor hands it on
    processor = PixtralImageProcessorPil(**merged)
    for row in table["pictures"]:
        ((height, width),) = processor(Image.new("RGB", tuple(row["size"])), return_tensors="np")["image_sizes"]
        assert (height // 28) * (width // 28) == row["tokens"], row
