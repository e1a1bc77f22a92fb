"""Image files to upright RGB pictures, or a DataError that says what is wrong with the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dhp.errors import DataError

MAX_PIXELS = 89_478_485  # a quarter of a GB in RGB: Pillow's own threshold for its warning


def open_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a file into an RGB image: EXIF rotation applied, transparency on white, first frame.

    max_pixels: width × height above which the file is refused before it is decoded.
    DataError names the path and the reason: missing, not a file, empty, too large, broken.
    """
    _check_file(path)
    try:
        with Image.open(path) as image:
            _check_size(image, path, max_pixels)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    # Decoders raise whatever the damaged bytes lead them to (OSError, SyntaxError, struct.error, …),
    # and every one of these means the same to the reader: this file is not a usable picture.
    except Exception as error:
        raise DataError(f"image {path} cannot be decoded: {error or type(error).__name__}") from error


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"image {path} is a folder")
    if not path.exists():
        raise DataError(f"image {path} does not exist")
    if not path.is_file():
        raise DataError(f"image {path} is not a regular file")  # reading a pipe would block for ever
    if path.stat().st_size == 0:
        raise DataError(f"image {path} is empty (0 bytes)")


def _check_size(image: Image.Image, path: Path, max_pixels: int) -> None:
    # Pillow only warns here, and turning a warning into an error is not safe between threads.
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"image {path} has {width} × {height} = {width * height} pixels, more than the {max_pixels} "
            "that are decoded. Scale it down"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined white; convert to 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Keep the upper 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    values = np.asarray(image).astype(np.int64)  # [height, width]
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(f"pixel values {values.min()}..{values.max()} exceed 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
