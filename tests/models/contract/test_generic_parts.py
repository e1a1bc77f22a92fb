"""A sample of a family without code of its own is what the family's own processor makes of the conversation."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dhp.core.batch import ProcessorOutput
from dhp.core.errors import ModelError
from dhp.data.read.records import Record, Turn
from dhp.data.sample.preprocess import Preprocessor
from dhp.models.contract.random_pictures import joined, unpack
from dhp.models.pretrained import load_image_processor, load_tokenizer
from dhp.models.registry import load_family
from tests.helpers.tiny_families import SIDE, make_config
from tests.helpers.tiny_processors import MAKERS, save_processor

SIZES = ((90, 40), (50, 64), (28, 28))


def make_preprocessor(folder: Path) -> Preprocessor:
    processor = load_family(str(folder)).processor
    return Preprocessor(
        load_tokenizer(str(folder)),
        load_image_processor(str(folder)),
        processor.image_token_id,
        processor.image_tokens,
        processor.patches,
        written=(processor.placeholder, processor.written),
        about=processor.about(),
        image_arguments=processor.image_arguments,
        frame_patches=processor.frame_patches,
    )


def make_pictures(folder: Path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(len(SIZES))]
    for path, (width, height) in zip(paths, SIZES, strict=True):
        Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_and_pixels_are_those_of_the_familys_processor(name: str, tmp_path: Path) -> None:
    library = save_processor(name, tmp_path)
    paths = make_pictures(tmp_path)
    shown = tuple(path for path in paths)
    turns = (Turn("user", (shown[0], "What is in", *shown[1:], " the picture?")), Turn("assistant", ("A red square.",)))
    sample = make_preprocessor(tmp_path)(Record("set", 1, "line 1", turns))
    placeholder = MAKERS[name][2]
    text = (
        f"<|im_start|>user\n{placeholder}What is in{placeholder}{placeholder} the picture?<|im_end|>\n"
        "<|im_start|>assistant\nA red square.<|im_end|>\n"
    )
    pictures = [Image.open(path).convert("RGB") for path in paths]
    wanted = library(images=pictures, text=text, return_tensors="pt", add_special_tokens=False)
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    kinds = (sample.input_ids == load_family(str(tmp_path)).processor.image_token_id).astype(int)
    assert np.array_equal(sample.mm_token_type_ids, kinds)
    forms = [form for form in sample.grids if isinstance(form, ProcessorOutput)]
    assert sum(form.tokens for form in forms) == kinds.sum()
    pairs = zip(forms, sample.pixels, strict=True)
    found = joined([unpack(form, torch.from_numpy(pixels), torch.float32) for form, pixels in pairs])
    for argument, tensor in found.items():
        assert torch.equal(tensor, wanted[argument].to(tensor.dtype)), argument
    assert sample.target_tokens > 0


@pytest.mark.parametrize("name", MAKERS)
def test_lengths_come_from_headers(name: str, tmp_path: Path) -> None:
    save_processor(name, tmp_path)
    shown = tuple(path for path in make_pictures(tmp_path))
    record = Record("set", 1, "line 1", (Turn("user", (*shown, "What?")), Turn("assistant", ("Red.",))))
    preprocess = make_preprocessor(tmp_path)
    sample, length = preprocess(record), preprocess.measure(record)
    assert (length.text, length.vision) == (len(sample.input_ids), int(sample.mm_token_type_ids.sum()))
    assert (length.targets, length.pictures) == (sample.target_tokens, len(SIZES))
    assert length.encoded_bytes == sum(path.stat().st_size for path in shown)
    layouts = [load_family(str(tmp_path)).tower.image_layout(form) for form in sample.grids]
    tiles = sum(prod(form.pixels[0][1][:-3]) for form in sample.grids)
    assert length.patches == tiles * (SIDE // 7) ** 2 == sum(layout.patches for layout in layouts)
    assert length.squares == tiles * (SIDE // 7) ** 4
    if tiles == len(SIZES):  # a layout takes a picture whole, whatever its tiles
        assert length.squares == sum(patches**2 for layout in layouts for patches in layout.frame_lengths)


def test_a_processor_that_lacks_what_it_needs_is_told(tmp_path: Path) -> None:
    save_processor("llava_next", tmp_path)
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="image processor"):
        make_preprocessor(tmp_path)(Record("set", 1, "line 1", (Turn("user", ("Hi",)), Turn("assistant", ("Ho",)))))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the library's processor can be made here")
def test_a_processor_that_needs_another_package_is_named(tmp_path: Path) -> None:
    save_processor("llava_next", tmp_path)
    make_config("mistral3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"PixtralProcessor cannot be made from this directory: ImportError: .*Torchv"):
        load_family(str(tmp_path)).processor.load()
