"""Bad lines, files and pictures are named."""

import base64
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.images import open_image
from dhp.data.media.sources import Blob, MediaResolver
from dhp.data.media.video import map_frames
from dhp.data.read.annotations import FORMATS, detect, parse_record
from dhp.data.read.formats import renamed
from dhp.data.sampling.dataset import BatchSource, open_dataset
from dhp.data.sampling.sampler import BatchLayout, RandomSampler
from tests.data.read.test_formats import shard
from tests.data.rows import ROWS

QUESTION = {"from": "human", "value": "What?"}
ANSWER = {"from": "gpt", "value": "A circle."}
LAYOUT = BatchLayout(replicas=1, micro_batches=1, micro_batch_size=3)


def talk(*turns: Any, **more: Any) -> dict:
    return {"conversations": list(turns), **more}


def shown(name: Any, tag: str = "image", **more: Any) -> dict:
    return talk({"from": "human", "value": f"<{tag}>\nWhat?"}, ANSWER, **{tag: name}, **more)


def messages(*contents: Any, **more: Any) -> dict:
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents)], **more}


GOOD = shown("a.png")
GOOD_MESSAGES = messages("What?", "A circle.")


def png(size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG whose header promises 50,000 × 50,000 pixels."""
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    sealed = [struct.pack(">I", len(body)) + kind + body + _checksum(kind + body) for kind, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def _checksum(content: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(content))


def file(content: bytes, name: str = "x.png", tag: str = "image") -> Callable[[Path], dict]:
    """A sample whose image or video is a file with this content."""

    def make(folder: Path) -> dict:
        (folder / name).write_bytes(content)
        return shown(name, tag)

    return make


def link(target: str) -> Callable[[Path], dict]:
    def make(folder: Path) -> dict:
        (folder.parent / "secret.png").write_bytes(png())
        (folder / "link.png").symlink_to(target)
        return shown("link.png")

    return make


def pipe(folder: Path) -> dict:
    os.mkfifo(folder / "pipe.png")
    return shown("pipe.png")


def unreadable(folder: Path) -> dict:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / "x.png").write_bytes(png())
    (folder / "x.png").chmod(0)
    return shown("x.png")


def sound(folder: Path) -> dict:
    with av.open(str(folder / "x.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return shown("x.mp4", "video")


def picture_address(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part(**fields: Any) -> dict:
    return messages([{"type": "text", "text": "What?"}, fields], "A circle.")


# What stands in the second of three lines → why it cannot be used. The lines around it are good.
LINES: dict[str, tuple[Any, str]] = {
    "audio": (shown("a.wav", "audio"), r"audio .*a\.wav, but audio\.num_actors=0, so this run hears nothing\. Set au"),
    "audio under a name that is not known": (
        talk({"from": "human", "value": "<audio>Who?"}, ANSWER, audio_path="a.wav"),
        r"'audio_path' \('a\.wav'\) is not read.* Set columns=\{audios: audio_path\}"),
    "audios": (shown("a.png", audios=["a.wav"]), r"0 <audio> tags in the human turns, but 1 audios: \['a.wav'\]"),
    "audio under two keys": (shown("a.wav", "audio", audios=["b.wav"]), "both 'audio' and 'audios' name clips"),
    "audio elsewhere": (shown("../a.wav", "audio"), r"audio path '../a\.wav' leaves data_path"),
    "JSON cut off": (b'{"conversations": [', "malformed JSON at column"),
    "two values in a line": (b"{} {}", "malformed JSON at column 4"),
    "no UTF-8": ('{"x": "é"}'.encode("latin-1"), r"not UTF-8 \(byte 0xe9\)"),
    "nested too deep": (b"[" * 100_000, "JSON cannot be read"),
    "number too long": (b"1" * 5000, "JSON cannot be read"),
    "zero bytes in the text": (b'{"a": "\0"}', "malformed JSON"),
    "no object": ([1], "expected an object with 'conversations' or 'messages', got list"),
    "null": (None, "got NoneType"),
    "no conversation": ({"image": "a.png"}, "key 'conversations' is missing"),
    "empty conversation": (talk(), "'conversations' is empty"),
    "conversation of another type": ({"conversations": "What?"}, "must be a list of turns, got str"),
    "turn of another type": (talk("What?", ANSWER), "turn 1 must be an object with 'from' and 'value', got str"),
    "turn without text": (
        talk({"from": "human"}, ANSWER), "turn 1: 'value' must be a string or a list of parts, got None"),
    "text of another type": (
        talk({"from": "human", "value": 5}, ANSWER), "'value' must be a string or .*, got 5. Write it as a string"),
    "turns of unequal lists": (
        {"conversations": {"from": ["human", "gpt"], "value": ["What?"]}}, r"different lengths \(from: 2, value: 1\)"),
    "unknown role": (talk({"from": "tool", "value": "x"}, ANSWER), "turn 1: role 'tool': tool calls are not read"),
    "assistant first": (talk(ANSWER), "must begin with a human turn"),
    "two questions": (talk(QUESTION, QUESTION, ANSWER), "turns 1 and 2 are both from the user"),
    "no last answer": (talk(QUESTION, ANSWER, QUESTION), "last turn must be from gpt"),
    "system in the middle": (talk(QUESTION, {"from": "system", "value": "x"}, ANSWER), "can only be the first"),
    "empty answer": (talk(QUESTION, {"from": "gpt", "value": " \n"}), "turn 2: the answer is empty"),
    "half a character": (talk(QUESTION, {"from": "gpt", "value": "\ud83d"}), "turn 2: .* half a character"),
    "more tags than images": (
        talk({"from": "human", "value": "<image><image>"}, ANSWER, image="a.png"), "2 <image> tags .* but 1 images"),
    "more images than tags": (shown(["a.png", "b.jpg"]), "1 <image> tags in the human turns, but 2 images"),
    "video without its tag": (talk(QUESTION, ANSWER, video="v.mp4"), "0 <video> tags in the human turns, but 1 videos"),
    "image of another type": (shown(7), "'image' must be a path or a list of paths, got 7"),
    "empty image path": (shown(""), "1 <image> tags in the human turns, but 0 images"),
    "path in a path": (shown({"path": {"path": "a.png"}}), "'image' must be a path, got {'path': 'a.png'}"),
    "the model's own placeholder": (
        talk({"from": "human", "value": "<|image_pad|>"}, ANSWER), "1 image placeholder tokens for 0 images"),
    "too many tokens": (talk({"from": "human", "value": "what " * 1200}, ANSWER), r"more than data\.max_tokens=500"),
    "too many characters for any tokens": (
        talk({"from": "human", "value": "what " * 3000}, ANSWER),
        r"15128 characters are more than 500 tokens \(data\.max_tokens\) can hold"),
    "an empty question": (talk({"from": "human", "value": " "}, ANSWER), "turn 1: the question is empty"),
    "an unknown role": (talk({"from": "judge", "value": "x"}, ANSWER), "turn 1: unknown role 'judge'"),
    "missing file": (shown("gone.png"), r"gone\.png does not exist"),
    "folder": (shown("sub"), "sub is a folder"),
    "zero bytes": (file(b""), r"x\.png is empty \(0 bytes\)"),
    "no image": (file(b"not a picture"), r"x\.png cannot be decoded: cannot identify image file"),
    "an image cut off": (file(png()[:1000]), r"x\.png cannot be decoded: .*truncated"),
    "only the head of an image": (file(png()[:20]), r"x\.png cannot be decoded"),
    "decompression bomb": (file(bomb()), r"x\.png cannot be decoded: .*decompression bomb"),
    "drawn by another program": (file(b"%!PS-Adobe-3.0 EPSF-3.0\n", "x.eps"), "cannot identify image file"),
    "sides too unequal": (file(png((2000, 2))), r"x\.png \(2000 × 2\) cannot be scaled"),
    "pipe": (pipe, "is not a regular file"),
    "unreadable file": (unreadable, "cannot be read: Permission denied"),
    "name too long": (shown("x" * 300), "cannot be read: File name too long|does not exist"),
    "NUL in the path": (shown("a\0.png"), "cannot be resolved"),
    "path escape": (shown("../secret.png"), r"leaves data_path .*; refused"),
    "absolute path": (shown("/etc/hostname"), r"leaves data_path .*; refused"),
    "link escape": (link("../secret.png"), r"leaves data_path .*; refused"),
    "link to nothing": (link("gone.png"), "does not exist"),
    "link to itself": (link("link.png"), "cannot be resolved"),
    "http address": (shown("http://127.0.0.1:9/a.png"), r"an address on the network; refused.* data\.allow_http=true"),
    "https address": (shown("https://127.0.0.1:9/a.png"), "an address on the network; refused"),
    "other address": (shown("s3://bucket/a.png"), "s3 addresses are not read"),
    "file address outside": (shown("file:///etc/hostname"), "leaves data_path"),
    "data address without base64": (shown("data:image/png;base64,@@@"), "is not base64"),
    "data address of another kind": (shown(picture_address(png(), "text/html")), "must begin as data:image/FORMAT"),
    "data address with half an image": (
        shown(picture_address(png()[:500])), "image in a data: address .* cannot be decoded"),
    "empty video": (file(b"", "v.mp4", "video"), r"v\.mp4 is empty"),
    "no video": (file(b"not a video" * 100, "v.mp4", "video"), r"v\.mp4 cannot be decoded"),
    "playlist": (file(b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n", "v.mp4", "video"), "cannot be decoded"),
    "video without pictures": (sound, r"x\.mp4 has no video stream"),
}  # fmt: skip

MESSAGES: dict[str, tuple[Any, str]] = {
    "no messages": ({"text": "What?"}, "key 'messages' is missing"),
    "message without content": ({"messages": [{"role": "user"}]}, "turn 1: 'content' must be a string or a list"),
    "role of another type": ({"messages": [{"role": 1, "content": "x"}]}, "turn 1: 'role' must be a string"),
    "message of another type": ({"messages": [3]}, "turn 1 must be an object with 'role' and 'content', got int"),
    "audio": (messages("<audio>Who?", "Ann.", audios=["a.wav"]), r"audio .*a\.wav, but audio\.num_actors=0"),
    "part with sound": (part(type="audio", audio="a.wav"), r"audio .*a\.wav, but audio\.num_actors=0, so this run"),
    "sound that is an address": (
        part(type="input_audio", input_audio="a.wav"), "'input_audio' must hold 'data' in base64 and 'format'"),
    "sound that is not base64": (
        part(type="input_audio", input_audio={"data": "?", "format": "wav"}), "is not base64"),
    "tool call": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "'tool_calls' is not read"),
    "an answer that is not to be learned": (
        {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "turn 1: 'weight' 0.5"),
    "part of another type": (part(type="file"), "turn 1: a part must be an object of type text, image, image_url"),
    "part without its image": (part(type="image_url"), "a part of type image_url must hold 'image_url'"),
    "part whose text is none": (part(type="text", text=3), "'text' of a part must be a string, got 3"),
    "address of another type": (part(type="image_url", image_url={"url": 3}), "'image' must be a path, got 3"),
    "image in an answer": (messages("What?", [{"type": "image", "image": "a.png"}]), "can only be in user turns"),
}  # fmt: skip


def source(entry: DatasetEntry, preprocess: Any, on_bad_sample: str) -> BatchSource:
    dataset = open_dataset(["set"], {"set": entry})
    return BatchSource(dataset, preprocess, RandomSampler(len(dataset), LAYOUT, 0, False), on_bad_sample)


def check(entry: DatasetEntry, preprocess: Any, place: str, reason: str) -> None:
    """The second of three samples is bad: skipped alone, by name, or an error in the same words."""
    step = source(entry, preprocess, "skip").step(0)
    assert [sample.position for row in step.samples for slot in row for sample in slot] == [1, 3]
    (told,) = step.skipped
    with pytest.raises(DataError, match=rf"^dataset 'set', {place}: (?s:.)*{reason}") as raised:
        source(entry, preprocess, "error").step(0)
    assert str(raised.value) == told


def write(path: Path, bad: Any, good: Any, folder: Path) -> Path:
    raw = bad(folder) if callable(bad) else bad
    line = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    path.write_bytes(b"\n".join([json.dumps(good).encode(), line, json.dumps(good).encode()]))
    return path


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line(tmp_path, images, preprocessor, kind):
    bad, reason = LINES[kind]
    path = write(tmp_path / "a.jsonl", bad, GOOD, images)
    entry = DatasetEntry(str(path), str(images))
    check(entry, preprocessor(max_tokens=500), rf"line 2 of {path}", reason)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_bad_line_of_messages(tmp_path, images, preprocessor, kind):
    bad, reason = MESSAGES[kind]
    path = write(tmp_path / "a.jsonl", bad, GOOD_MESSAGES, images)
    check(DatasetEntry(str(path), str(images), "openai"), preprocessor(), rf"line 2 of {path}", reason)


def test_a_video_that_is_cut_off(tmp_path, images, preprocessor, write_video):
    whole = write_video(images / "v.avi", frames=40).read_bytes()
    (images / "v.avi").write_bytes(whole[: len(whole) // 2])
    path = write(tmp_path / "a.jsonl", shown("v.avi", "video"), GOOD, images)
    check(DatasetEntry(str(path), str(images)), preprocessor(), rf"line 2 of {path}", r"v\.avi (is cut off|cannot be)")


def test_a_video_for_a_model_without(tmp_path, images, preprocessor, write_video):
    write_video(images / "v.mp4")
    path = write(tmp_path / "a.jsonl", shown("v.mp4", "video"), GOOD, images)
    check(DatasetEntry(str(path), str(images)), preprocessor(videos=None), rf"line 2 of {path}", "sees images only")


WITHOUT_NAME = json.dumps(talk({"from": "human", "value": "<image>\nWhat?"}, ANSWER)).encode()


@pytest.mark.parametrize(
    "second, reason",
    [
        ({"2.png": png()}, r"needs one \.json member with its conversation; it has \['2\.png'\]. .*tar --sort=name"),
        ({"2.json": b"{"}, "malformed JSON at line 1"),
        ({"2.json": WITHOUT_NAME}, "1 <image> tags in the human turns, but 0 images"),
        ({"2.json": WITHOUT_NAME, "2.png": b""}, r"2\.png in .* is empty"),
        ({"2.json": WITHOUT_NAME, "2.png": png()[:300]}, r"2\.png in .* cannot be decoded"),
        ({"2.json": json.dumps(shown("../1.png")).encode(), "2.png": png()}, "is 0 members of the sample's archive"),
        ({"2.json": json.dumps(shown("1.png")).encode(), "2.png": png()}, "is 0 members of the sample's archive"),
        (
            {"2.json": WITHOUT_NAME, "2.png": png(), "2.WAV": b"RIFF"},
            r"0 <audio> tags in the human turns, but 1 audios: \['2\.WAV'\]",
        ),
    ],
    ids=[
        "no json",
        "bad json",
        "no image",
        "empty image",
        "broken image",
        "escape",
        "image of another sample",
        "audio",
    ],
)
def test_a_bad_sample_of_a_shard(tmp_path, preprocessor, second, reason):
    good = {"{}.json": WITHOUT_NAME, "{}.png": png()}
    members = {name.format(n): c for n in (1, 2, 3) for name, c in (second if n == 2 else good).items()}
    path = shard(tmp_path / "a.tar", members)
    check(DatasetEntry(str(path)), preprocessor(), rf"sample 2 of {path}", reason)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"conversations": None}, "'conversations' must be a list of turns, got NoneType"),
        ({"image": {"bytes": b"", "path": None}}, r"is empty \(0 bytes\)"),
        ({"image": {"bytes": png()[:300], "path": "b.png"}}, "cannot be decoded"),
        ({"image": {"bytes": None, "path": None}}, "'image' must be a path, got None"),
        ({"image": {"bytes": None, "path": "../b.png"}}, "no data_path"),
        ({"image": None}, "1 <image> tags in the human turns, but 0 images"),
    ],
)
def test_a_bad_row(tmp_path, preprocessor, changes, reason):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = {"image": {"bytes": png(), "path": "a.png"}, "conversations": GOOD["conversations"]}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([good, good | changes, good]), path)
    check(DatasetEntry(str(path)), preprocessor(), rf"row 2 of {path}", reason)


def test_text_of_a_row_that_is_no_utf_8(tmp_path, preprocessor):
    """Libraries raise whatever such bytes lead them to."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = json.dumps(GOOD["conversations"]).encode()
    texts = pyarrow.array([b"fine", b"caf\xe9", b"fine"], pyarrow.binary()).view(pyarrow.string())
    turns = pyarrow.array([json.loads(good)] * 3)
    pictures = pyarrow.array([{"bytes": png(), "path": "a.png"}] * 3)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"note": texts, "conversations": turns, "image": pictures}), path)
    check(DatasetEntry(str(path)), preprocessor(), rf"row 2 of {path}", "cannot be read: .*utf-8")


def test_a_shard_that_is_gone(tmp_path, preprocessor):
    members = {name: c for n in (1, 2) for name, c in ((f"{n}.json", WITHOUT_NAME), (f"{n}.png", png()))}
    path = shard(tmp_path / "a.tar", members)
    dataset = open_dataset(["set"], {"set": DatasetEntry(str(path))})
    path.unlink()
    with pytest.raises(DataError, match=rf"sample 2 of {path}: cannot be read: .*No such file"):
        dataset.record(1, 0)


def test_a_byte_order_mark_in_a_shard_is_no_defect(tmp_path, preprocessor):
    path = shard(tmp_path / "a.tar", {"1.json": b"\xef\xbb\xbf" + WITHOUT_NAME, "1.png": png()})
    assert source(DatasetEntry(str(path)), preprocessor(), "error").step(0).skipped == ()


def test_a_byte_order_mark_is_no_defect(tmp_path, preprocessor):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(talk(QUESTION, ANSWER)).encode())
    assert source(DatasetEntry(str(path)), preprocessor(), "error").step(0).skipped == ()


def test_there_are_enough_kinds():
    assert len(LINES) + len(MESSAGES) >= 60


FILES: dict[str, tuple[str, bytes, str]] = {
    "empty JSON": ("a.json", b"", "malformed JSON at line 1, column 1"),
    "empty JSONL": ("a.jsonl", b"", "holds no sample"),
    "blank JSONL": ("a.jsonl", b"\n \n\n", "holds no sample"),
    "empty array": ("a.json", b"[]", "holds no sample"),
    "JSON error in line 3": ("a.json", b'[\n{"a": 1},\n{"b" 2}\n]', "malformed JSON at line 3, column 6"),
    "JSON of another type": ("a.json", b'{"a": 1}', "one JSON object, not an array"),
    "samples under a key": ("a.json", b'{"version": 1, "data": [{}]}', "samples stand under 'data'. Save that list"),
    "JSONL called JSON": ("a.json", b'{"a": 1}\n{"a": 2}\n', r"call the file \.jsonl"),
    "array called JSONL": ("a.jsonl", b'[\n{"a": 1},\n{"a": 2}]', "malformed JSON at column 2"),
    "no UTF-8": ("a.json", b'[\n"\xff"]', r"line 2 is not UTF-8 \(byte 0xff\)"),
    "UTF-16": ("a.jsonl", '{"a": 1}'.encode("utf-16"), "the file is UTF-16"),
    "CSV without a line of names": ("a.csv", b"", "the first line must name the columns, each once"),
    "CSV with two columns of a name": ("a.csv", b"query,query\nx,y\n", "each once; it has .'query', 'query'"),
    "CSV with a longer row": (
        "a.csv", b"query,response\nx,y\nx,y,z\n", "line 3 has 3 cells, and the first line names 2"),
    "CSV with an open quote": ("a.csv", b'query,response\nx,"y\n', "the file is no CSV: "),
    "CSV that is no UTF-8": ("a.csv", b"query,response\nx,\xff\n", r"not UTF-8 \(byte"),
    "CSV of names alone": ("a.csv", b"query,response\n", "holds no sample"),
    "text": ("a.txt", b"What?", r"is a \.txt file, and read are \.json, .*\.csv.* Convert it"),
    "a sheet": ("a.xlsx", b"PK", r"is a \.xlsx file"),
    "compressed": ("a.json", b"\x1f\x8b\x08\0", "the file is compressed by gzip"),
    "compressed shard": ("a.tar.gz", b"\x1f\x8b\x08\0", "is compressed"),
    "no tar": ("a.tar", b"not an archive" * 100, "no readable tar file"),
    "empty tar": ("a.tar", b"", "no readable tar file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file(tmp_path, kind):
    name, content, reason = FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^dataset 'set': (?s:.)*{name}(?s:.)*{reason}"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / name))})


@pytest.mark.parametrize("name", ["gone.jsonl", "x" * 300, "a\0.json", "a.json/b.json"])
def test_a_file_that_is_not_there(tmp_path, name):
    (tmp_path / "a.json").write_bytes(b"[{}]")
    with pytest.raises(DataError, match=r"^dataset 'set': annotation file .* does not exist"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / name))})
    with pytest.raises(DataError, match=r"^dataset 'set': data_path .* is not a folder"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / "a.json"), str(tmp_path / name))})


def test_a_shard_that_is_cut_off(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("1.png")
        info.size = 4000
        archive.addfile(info, io.BytesIO(b"x" * 4000))
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(DataError, match=r"^dataset 'set': .*a\.tar: .*(cut off|unexpected end of data)"):
        open_dataset(["set"], {"set": DatasetEntry(str(path))})


@pytest.mark.parametrize("ending", ["PNG", "JPEG", "WEBP", "GIF", "mp4", "mkv"])
def test_damaged_bytes_give_a_picture_or_a_data_error(tmp_path, write_video, ending):
    """Decoders raise whatever such bytes lead them to."""
    if ending.isupper():
        buffer = io.BytesIO()
        Image.effect_noise((40, 40), 50).convert("RGB").save(buffer, ending)
        whole, decode = buffer.getvalue(), open_image
    else:
        whole = write_video(tmp_path / f"v.{ending}").read_bytes()
        decode = lambda blob: map_frames(blob, FrameSampling(2.0, 8, 2), len)
    draw = Random(0)
    for _ in range(60):
        damaged = bytearray(whole[: draw.choice([len(whole), draw.randrange(1, len(whole))])])
        for _ in range(draw.choice([1, 10, 50])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(DataError):
            decode(Blob("x", bytes(damaged)))


TALK = [{"from": "human", "value": "<image>\n<video>What?"}, {"from": "gpt", "value": "A circle."}]
PARTS = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
SHORT_ANSWER = {"role": "assistant", "content": "A circle."}
SAMPLES = {
    "llava": {"conversations": TALK, "image": "a.png", "video": ["v.mp4"]},
    "sharegpt": {
        "messages": [{"role": "user", "content": "<image>?"}, SHORT_ANSWER],
        "images": ["a.png"],
        "system": "",
    },
    "openai": {"messages": [{"role": "user", "content": PARTS}, SHORT_ANSWER]},
    "alpaca": {"instruction": "<image>?", "input": "x", "output": "y", "history": [["a", "b"]], "images": ["a.png"]},
    "swift": {"query": "?", "response": "y", "history": [["a", "b"]], "images": ["a.png"], "system": "", "objects": {}},
    "unknown": {"text": "What?"},
}
OTHERS = [row.raw for row in ROWS if isinstance(row.raw, dict)]
JUNK = [
    None, 0, 1.5, True, "", [], {}, "x", b"x", b"", [None], {"bytes": 5}, {"path": []}, {"type": []},
    {"url": {"url": 3}}, "data:", "data:image/png,%zz", "data:image/png;base64,é", "http://[", "file://", "://",
    "a" * 5000, "\0", "\ud800", 10**400,
]  # fmt: skip


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner):
        yield value, key
        yield from places_in(item)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_samples_give_a_record_or_a_data_error(tmp_path, form):
    """Types are checked before they are relied on, at every place of a sample."""
    draw = Random(0)
    for _ in range(3000):
        raw = deepcopy(draw.choice([SAMPLES.get(form, {"text": "A square is red."}), *OTHERS]))
        for _ in range(draw.choice([1, 2, 3])):
            container, key = draw.choice(list(places_in(raw)) or [({"": 0}, "")])
            container[key] = deepcopy(draw.choice(JUNK))
        assert detect([raw]) in FORMATS
        with suppress(DataError):
            members = draw.choice([None, {}])
            raw = renamed(raw, draw.choice([{}, {"messages": "instruction", "role": "content"}]))
            parse_record(raw, "set", 1, "here", form, MediaResolver(draw.choice([None, tmp_path]), members=members))
