"""Decodes images to upright RGB pictures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from dhp.core.errors import DataError
from dhp.data.media.sources import File, decoding, name_of, open_media

MAX_PIXELS = 89_478_485  # a quarter of a GB in RGB: Pillow's own threshold for its warning

# Pillow reads more. What is left out has no pixels of its own, is drawn by another program (EPS by
# Ghostscript), or is decoded while its header is read, whatever its size (ICO).
_KNOWN = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA")
Image.init()
IMAGE_FORMATS = tuple(name for name in _KNOWN if name in Image.OPEN)  # a Pillow built without one does not list it
_REDUCED = ("JPEG", "MPO")  # whose decoder can leave out the finest detail
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height


Wanted = Callable[[tuple[int, int]], tuple[int, int]]  # from a width and height to others, in pixels


def open_image(file: File, max_pixels: int = MAX_PIXELS, least: Wanted | None = None) -> Image.Image:
    """Decode a file into an RGB image: EXIF rotation applied, transparency on white, first frame.

    max_pixels: width × height above which the file is refused before it is decoded. least: of a JPEG file's upright
    size, what it must have at least: it is decoded at a half, a quarter or an eighth where that is enough; None: at all
    of it.
    DataError names the file and the reason: missing, not a file, empty, too large, broken, of another format."""
    with _opened(file, max_pixels) as image:
        if least is not None and image.format in _REDUCED:
            turned = image.getexif().get(Base.Orientation) in _QUARTER_TURNS
            width, height = least(image.size[::-1] if turned else image.size)
            image.draft(None, (height, width) if turned else (width, height))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # else a copy, also of what is upright
        return _to_rgb(image)


def is_dim(file: File) -> bool:
    """Whether it is a grey picture of 16 bits that uses less than an eighth of their range (12 bits of an X-ray, say):
    `open_image`, which keeps the upper 8, shows it nearly black."""
    with suppress(DataError), _opened(file, MAX_PIXELS) as image:
        return image.mode.startswith("I") and bool(np.asarray(image).max() < 1 << 13)
    return False


def read_size(file: File, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) in pixels of the image that `open_image` gives, from the file's header: no pixel is decoded.

    Raises DataError as `open_image` does, for what the header shows: missing, not a file, empty, too large, of another
    format. A rotation that a PNG file states behind its pixels is not seen: such a size has its sides exchanged."""
    with _opened(file, max_pixels) as image:
        exif = Image.Image.getexif(image)  # that of PNG files decodes first, in search of what stands behind the pixels
        # Pillow has turned the size of a TIFF file already, if the rotation is a tag of its own.
        turned = exif.get(Base.Orientation) in _QUARTER_TURNS and Base.Orientation not in getattr(image, "tag_v2", ())
        return (image.height, image.width) if turned else image.size


@contextmanager
def _opened(file: File, max_pixels: int) -> Iterator[Image.Image]:
    """An image of which the header is read. Errors inside become a DataError that names the file."""
    name = name_of(file)
    with open_media(file, "image") as content, decoding(f"image {name}"):
        with Image.open(content, formats=IMAGE_FORMATS) as image:
            _check_size(image, name, max_pixels)
            if image.mode == "F":
                raise ValueError("floating-point pixels have no defined white; convert to 8 or 16 bits")
            yield image


def _check_size(image: Image.Image, name: str, max_pixels: int) -> None:
    # Pillow only warns here, and turning a warning into an error is not safe between threads.
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"image {name} has {width} × {height} = {width * height} pixels, more than the {max_pixels} "
            "that are decoded. Scale it down"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Keep the upper 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    values = np.asarray(image)  # [height, width]; no copy in wider numbers, as pictures may be large
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(f"pixel values {values.min()}..{values.max()} exceed 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
