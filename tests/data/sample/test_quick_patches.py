"""Patches by look-up: the processor's own, bit for bit, or none at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from dhp.core.errors import ConfigError, DataError
from dhp.data.media import images
from dhp.data.media.images import open_image
from dhp.data.sample.quick_patches import QuickPatches, quick_patches
from tests.data.sample.made import make_preprocessor

BOUNDS = {"size": {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}}


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "processor",
    [
        Qwen2VLImageProcessorPil(**BOUNDS),
        Qwen2VLImageProcessorPil(**BOUNDS, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        Qwen2VLImageProcessorPil(**BOUNDS, temporal_patch_size=1, merge_size=1),
        Qwen2VLImageProcessorPil(**BOUNDS, do_normalize=False),
        Qwen2VLImageProcessorPil(**BOUNDS, do_rescale=False, do_normalize=False),
        Qwen2VLImageProcessorPil(**BOUNDS, resample=2),
    ],
)
@pytest.mark.parametrize("scaling", [{}, {"size": {"shortest_edge": 28 * 28, "longest_edge": 280 * 280}}])
def test_bits_are_the_processors(processor: Any, scaling: dict[str, Any]) -> None:
    quick = quick_patches(processor, {}, scaling)
    assert quick is not None
    for number, size in enumerate([(31, 200), (640, 480), (97, 97), (1500, 40)]):
        image = drawn(*size, number)
        ours, theirs = quick([image], scaling), processor(images=[image], return_tensors="np", **scaling)
        assert ours.keys() == theirs.keys() and ours["pixel_values"].dtype == theirs["pixel_values"].dtype
        for name in ours:
            assert np.array_equal(ours[name], theirs[name])


def test_several_pictures_and_pictures_as_they_are() -> None:
    processor = Qwen2VLImageProcessorPil(**BOUNDS)
    quick, images = QuickPatches(processor), [drawn(56, 84), drawn(84, 28, 1)]
    for scaling in ({}, {"do_resize": False}):
        ours, theirs = quick(images, scaling), processor(images=images, return_tensors="np", **scaling)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_sides_too_unequal_are_refused_in_the_processors_words() -> None:
    processor = Qwen2VLImageProcessorPil(**BOUNDS)
    with pytest.raises(ValueError, match="absolute aspect ratio") as ours:
        QuickPatches(processor)([drawn(3000, 4)], {})
    with pytest.raises(ValueError, match="absolute aspect ratio") as theirs:
        processor(images=[drawn(3000, 4)], return_tensors="np")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("kind", [CLIPImageProcessorPil, GotOcr2ImageProcessorPil, PaddleOCRVLImageProcessorPil])
def test_processors_of_another_kind_do_it_themselves(kind: type) -> None:
    assert quick_patches(kind(), {}, {}) is None


def test_a_processor_with_arguments_of_its_own_does_it_itself() -> None:
    assert quick_patches(Qwen2VLImageProcessorPil(**BOUNDS), {"merge_size": 1}, {}) is None


def test_one_bit_that_differs_is_enough() -> None:
    class Brighter(Qwen2VLImageProcessorPil):
        def patchify(self, image: np.ndarray, **sides: int) -> Any:
            patches, *grid = super().patchify(image, **sides)
            patches = patches.copy()
            patches[-1, -1] = np.nextafter(patches[-1, -1], 9.0)
            return patches, *grid

    Brighter.__module__ = Qwen2VLImageProcessorPil.__module__
    assert quick_patches(Brighter(**BOUNDS), {}, {}) is None


def test_glms_processor_is_not_taken_for_qwens() -> None:
    """Its rule of sizes has frames too; whatever comes out, bits are its own."""
    processor = Glm4vImageProcessorPil()
    quick = quick_patches(processor, {}, {})
    if quick is not None:
        image = drawn(300, 200)
        theirs = processor(images=[image], return_tensors="np")
        assert np.array_equal(quick([image], {})["pixel_values"], theirs["pixel_values"])


# JPEG files that are decoded at less than their size


def photograph(path: Path, size: tuple[int, int], **options: Any) -> Path:
    """Smooth, as photographs are at this scale."""
    drawn(size[0] // 40, size[1] // 40).resize(size, Image.Resampling.BICUBIC).save(path, quality=95, **options)
    return path


def test_a_reduced_jpeg_has_the_grid_of_the_whole_and_nearly_its_pixels(tokenizer: Any, tmp_path: Path) -> None:
    file = photograph(tmp_path / "large.jpg", (1600, 1200))
    whole, reduced = (make_preprocessor(tokenizer, reduced_jpeg=own).pictures for own in (False, True))
    ((ours,), (theirs,)) = (one.decode([file]) for one in (reduced, whole))
    assert ours.grid == theirs.grid and np.prod(reduced.outline([file])[0].grid) == len(ours.pixels)
    apart = np.abs(ours.pixels - theirs.pixels)
    assert 0 < apart.mean() < 0.02 and apart.max() < 0.3  # of about four units from black to white


def test_a_turned_jpeg_is_reduced_by_its_sides_as_shown(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = photograph(tmp_path / "turned.jpg", (1600, 400), exif=exif)
    assert open_image(file).size == (400, 1600)
    seen: list[tuple[int, int]] = []
    assert open_image(file, least=lambda size: seen.append(size) or (100, 400)).size == (100, 400)
    assert open_image(file, least=lambda size: (101, 400)).size == (200, 800)
    assert seen == [(400, 1600)]


def test_a_rotation_behind_the_pixels_of_a_png_is_applied(tokenizer: Any, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    drawn(800, 400).save(tmp_path / "late.png", exif=exif)
    content = (tmp_path / "late.png").read_bytes()
    at = content.index(b"eXIf") - 4
    chunk = content[at : at + 12 + int.from_bytes(content[at : at + 4], "big")]
    end = content.index(b"IEND") - 4
    (tmp_path / "late.png").write_bytes(content[:at] + content[at + len(chunk) : end] + chunk + content[end:])
    whole, reduced = (make_preprocessor(tokenizer, reduced_jpeg=own).pictures for own in (False, True))
    ((ours,), (theirs,)) = (one.decode([tmp_path / "late.png"]) for one in (reduced, whole))
    assert ours.grid == theirs.grid and ours.grid[1] > ours.grid[2] and np.array_equal(ours.pixels, theirs.pixels)


def test_a_file_is_opened_once(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind an address would be fetched again."""
    file, opened = photograph(tmp_path / "large.jpg", (1600, 1200)), list[Any]()
    load = images.open_media
    monkeypatch.setattr(images, "open_media", lambda *given: opened.append(given) or load(*given))
    make_preprocessor(tokenizer, reduced_jpeg=True).pictures.decode([file])
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["small.jpg", "large.png"])
def test_what_is_not_reduced_has_the_same_bits(tokenizer: Any, tmp_path: Path, name: str) -> None:
    side = 200 if name.endswith("jpg") else 800
    file = photograph(tmp_path / name, (side, side))
    whole, reduced = (make_preprocessor(tokenizer, reduced_jpeg=own).pictures for own in (False, True))
    assert np.array_equal(reduced.decode([file])[0].pixels, whole.decode([file])[0].pixels)


def test_features_of_reduced_files_are_others(tokenizer: Any) -> None:
    about = [make_preprocessor(tokenizer, reduced_jpeg=own).pictures.about() for own in (False, True)]
    assert about[0] != about[1]


def test_reducing_is_refused_where_sizes_are_not_known(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.reduced_jpeg=true, but CLIPImageProcessorPil does not scale"):
        make_preprocessor(tokenizer, image_processor=CLIPImageProcessorPil(), reduced_jpeg=True)
    reduced = make_preprocessor(tokenizer, reduced_jpeg=True).pictures
    with pytest.raises(DataError, match=r"narrow.jpg \(3000 × 8\) cannot be scaled"):
        Image.new("RGB", (3000, 8)).save(tmp_path / "narrow.jpg")
        reduced.decode([tmp_path / "narrow.jpg"])
