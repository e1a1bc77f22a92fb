"""Pictures, and where files of media lie."""

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from dhp.core.errors import DataError
from dhp.data.media import sources
from dhp.data.media.images import open_image, read_size
from dhp.data.media.sources import (
    Blob,
    Frames,
    Member,
    Remote,
    Settings,
    SizedImage,
    Sound,
    Video,
    open_media,
    stored_bytes,
)


def save(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def pixel(path: Path, at: tuple[int, int] = (0, 0)) -> tuple[int, int, int]:
    image = open_image(path)
    assert image.mode == "RGB"
    return image.getpixel(at)


@pytest.mark.parametrize(
    "mode, colour, expected",
    [
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("LA", (0, 0), (255, 255, 255)),
        ("I;16", 0x8000, (0x80, 0x80, 0x80)),
    ],
)
def test_modes_of_png(tmp_path, mode, colour, expected):
    assert pixel(save(tmp_path / "x.png", Image.new(mode, (2, 2), colour))) == expected


def test_16_bit_values_keep_their_order(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    image = open_image(save(tmp_path / "x.png", Image.fromarray(ramp)))
    assert np.array_equal(np.asarray(image)[:, :, 1], ramp >> 8)


def test_a_palette_with_a_transparent_entry_is_put_on_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putdata([0, 1])
    path = save(tmp_path / "x.png", image, transparency=0)
    assert (pixel(path, (0, 0)), pixel(path, (1, 0))) == ((255, 255, 255), (0, 200, 0))


def test_cmyk_jpeg(tmp_path):
    path = save(tmp_path / "x.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=100)
    red, green, blue = pixel(path)
    assert red > 250 and green < 5 and blue < 5


@pytest.mark.parametrize("name, options", [("x.gif", {}), ("x.webp", {"lossless": True}), ("x.tif", {})])
def test_the_first_frame_of_an_animation(tmp_path, name, options):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    path = save(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
    assert pixel(path) == (255, 0, 0)


def test_the_first_picture_of_a_phones_jpeg(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((200, 200, 200), (0, 0, 0))]
    path = save(tmp_path / "x.jpg", frames[0], format="MPO", save_all=True, append_images=frames[1:])
    assert pixel(path) == (200, 200, 200)


@pytest.mark.parametrize("ending", ["webp", "bmp", "tif", "ppm", "jp2", "tga"])
def test_other_formats(tmp_path, ending):
    path = save(tmp_path / f"x.{ending}", Image.new("RGB", (16, 16), (200, 30, 40)))
    assert np.abs(np.subtract(pixel(path), (200, 30, 40))).max() < 8


def test_transparency_of_webp_is_put_on_white(tmp_path):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert pixel(save(tmp_path / "x.webp", image, lossless=True)) == (255, 255, 255)


def test_16_bits_a_colour_keep_their_upper_half(tmp_path):
    values = np.array([[[0x80FF, 0x01FF, 0xFF00]]], dtype=">u2")
    head = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" + values.tobytes())), (b"IEND", b"")]
    sealed = [struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks]
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(sealed))
    assert pixel(tmp_path / "x.png") == (0x80, 0x01, 0xFF)


def test_exif_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (4, 2), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    path = save(tmp_path / "x.png", image, exif=exif)
    assert open_image(path).size == (2, 4)
    assert pixel(path, (1, 0)) == (255, 255, 255)


ORIENTATION = 0x0112
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="{}"/>'


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def xmp(orientation: int) -> PngInfo:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", XMP.format(orientation))
    return info


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "name, options",
    [
        ("x.jpg", lambda o: {"exif": exif(o)}),
        ("x.png", lambda o: {"exif": exif(o)}),
        ("x.webp", lambda o: {"exif": exif(o)}),
        ("x.tif", lambda o: {"exif": exif(o)}),
        ("x.tif", lambda o: {"exif": exif(o), "compression": "tiff_lzw"}),
        ("x.png", lambda o: {"pnginfo": xmp(o)}),
        ("x.jpg", lambda o: {"xmp": XMP.format(o).encode()}),
        ("x.tif", lambda o: {"tiffinfo": {700: XMP.format(o).encode()}}),
    ],
)
def test_the_size_is_that_of_the_upright_image(tmp_path, monkeypatch, name, options, orientation):
    path = save(tmp_path / name, Image.new("RGB", (40, 20)), **options(orientation))
    upright = open_image(path).size
    assert upright == ((20, 40) if orientation >= 5 else (40, 20))
    assert size_undecoded(path, monkeypatch) == upright


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "I;16"])
@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.gif", "x.webp", "x.bmp", "x.tif", "x.ppm", "x.jp2", "x.tga"])
def test_the_size_by_the_header(tmp_path, monkeypatch, name, mode):
    try:
        path = save(tmp_path / name, Image.new(mode, (41, 22)))
    except (OSError, ValueError, KeyError):
        return  # this format has no such pixels
    assert open_image(path).size == (41, 22)
    assert size_undecoded(path, monkeypatch) == (41, 22)


def size_undecoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    def fail(self: Image.Image) -> None:
        raise AssertionError("the image is decoded")

    with monkeypatch.context() as patched:
        for kind in [ImageFile.ImageFile, *ImageFile.ImageFile.__subclasses__()]:
            patched.setattr(kind, "load", fail)
        return read_size(path)


def test_an_icon_is_refused_undecoded(tmp_path, monkeypatch):
    """Pillow decodes what it holds to learn its size: 657 KB that say 16 × 16 took 687 MiB."""
    content = io.BytesIO()
    Image.new("L", (300, 300)).save(content, "PNG")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 8, len(content.getvalue()), 22)
    path = tmp_path / "x.png"
    path.write_bytes(struct.pack("<HHH", 0, 1, 1) + entry + content.getvalue())
    with Image.open(path) as icon:
        assert icon.format == "ICO"  # the name says nothing
    decoded = []
    monkeypatch.setattr("PIL.IcoImagePlugin.IcoFile.__init__", lambda *_: decoded.append(1))
    for read in (read_size, open_image):
        with pytest.raises(DataError, match="cannot identify image file"):
            read(path)
    assert decoded == []


def test_16_bits_take_no_wider_numbers(tmp_path):
    path = save(tmp_path / "x.png", Image.fromarray(np.full((500, 500), 0xA0B0, dtype=np.uint16)))
    open_image(path)  # what is imported at first use does not count
    tracemalloc.start()
    try:
        assert pixel(path) == (0xA0, 0xA0, 0xA0)
        assert tracemalloc.get_traced_memory()[1] < 8 * 500 * 500  # bytes that numpy and Python hold at once
    finally:
        tracemalloc.stop()


def broken(kind: str, folder: Path) -> Path:
    """A file of the kind that a test asks for."""
    path = folder / "x.png"
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "PNG")
    whole = buffer.getvalue()
    contents = {"empty": b"", "text": b"not a picture", "half": whole[: len(whole) // 2], "head": whole[:20]}
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to(folder / "gone.png")
    elif kind == "float":
        path = save(folder / "x.tif", Image.new("F", (2, 2), 0.5))
    return path


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("missing", "does not exist"),
        ("dangling", "does not exist"),
        ("folder", "is a folder"),
        ("pipe", "is not a regular file"),
        ("empty", r"is empty \(0 bytes\)"),
        ("text", "cannot be decoded: cannot identify image file"),
        ("half", "cannot be decoded: .*truncated"),
        ("head", "cannot be decoded"),
        ("float", "cannot be decoded: floating-point pixels"),
    ],
)
def test_unusable_files_are_named_with_the_reason(tmp_path, kind, reason):
    path = broken(kind, tmp_path)
    with pytest.raises(DataError, match=f"image {path} {reason}") as raised:
        open_image(path)
    if kind == "half":
        assert read_size(path) == (64, 64)
    else:
        with pytest.raises(DataError) as by_header:
            read_size(path)
        assert str(by_header.value) == str(raised.value)


def test_a_truncated_jpeg(tmp_path):
    path = save(tmp_path / "x.jpg", Image.effect_noise((64, 64), 50))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"x\.jpg cannot be decoded: .*truncated"):
        open_image(path)


def test_a_picture_with_too_many_pixels_is_refused_before_decoding(tmp_path):
    path = save(tmp_path / "x.png", Image.new("1", (100, 50)))
    with pytest.raises(DataError, match="has 100 × 50 = 5000 pixels, more than the 4999"):
        open_image(path, max_pixels=4999)
    with pytest.raises(DataError, match="has 100 × 50 = 5000 pixels, more than the 4999"):
        read_size(path, max_pixels=4999)
    assert open_image(path, max_pixels=5000).size == read_size(path, max_pixels=5000) == (100, 50)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # ours is the error after it
@pytest.mark.parametrize("side", [10_000, 20_000])  # above Pillow's warning; above its own error
def test_a_decompression_bomb_is_refused_by_default(tmp_path, side):
    path = save(tmp_path / "x.png", Image.new("1", (side, side)))
    reason = r"x\.png (has 10000 × 10000|cannot be decoded: .*decompression bomb)"
    with pytest.raises(DataError, match=reason) as raised:
        open_image(path)
    with pytest.raises(DataError) as by_header:
        read_size(path)
    assert str(by_header.value) == str(raised.value)


def test_bytes_of_each_kind_of_file(tmp_path: Path) -> None:
    path, blob, member = tmp_path / "a", Blob("b", b"12345"), Member("c", tmp_path / "gone.tar", 512, 700)
    path.write_bytes(b"123")
    remote = Remote("https://example.org/a.png")  # nothing is fetched
    assert [stored_bytes(file) for file in (path, blob, member, remote)] == [3, 5, 700, 0]
    assert stored_bytes(Video(Frames((path, blob, path, remote)))) == 11
    assert stored_bytes(SizedImage(blob, Settings(fps=1.0))) == stored_bytes(Video(blob)) == stored_bytes(Sound(blob))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/a cannot be read: No such file"):
        stored_bytes(tmp_path / "a")


@pytest.mark.parametrize(
    "content, what, told",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "image", "is a Git LFS pointer.*git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "video", "is a web page"),
        (b"<html><body>404", "audio", "is a web page"),
        (b"%PDF-1.7", "image", "is a PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "image", "is a HEIC picture"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "video", None),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "image", None),
        (b"\x89PNG\r\n", "image", None),
    ],
)
def test_a_file_of_another_kind_is_named_by_its_first_bytes(
    tmp_path: Path, content: bytes, what: str, told: str | None
):
    (tmp_path / "a").write_bytes(content)
    for file in (Blob("b", content), tmp_path / "a"):
        if told is None:
            with open_media(file, what) as opened:
                assert opened.read() == content
            continue
        with pytest.raises(DataError, match=f"^{what} .*{told}"):
            open_media(file, what)


def test_an_address_of_twice_the_bytes_that_may_lie_in_memory_is_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 20)
    find = sources.MediaResolver(None).find
    assert find("data:image/png;base64," + "A" * 40, "image").content == bytes(30)
    with pytest.raises(DataError, match="data: address of 44 characters; put it into a file below data_path"):
        find("data:image/png;base64," + "A" * 44, "image")
