"""Formats of rows and files, read and refused."""

import base64
import io
import json
import sys
import tarfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.config.ranges import DATA_FORMATS
from dhp.core.errors import ConfigError, DataError
from dhp.data.media.images import open_image
from dhp.data.media.sources import Blob, MediaResolver, Member, Remote, Sound, Video
from dhp.data.read import annotation_files
from dhp.data.read.annotation_files import JsonlRows, find_lines
from dhp.data.read.annotations import FORMATS, detect, parse_record, read_annotations
from dhp.data.read.formats import KNOWN, renamed
from dhp.data.read.records import Turn
from dhp.data.sampling.dataset import open_dataset


def parse(form, raw, data_path=None, **more):
    return parse_record(raw, "set", 1, "here", form, MediaResolver(data_path, **more)).turns


def llava(text, **media):
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A circle."}], **media}


def sharegpt(text, **media):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A circle."}], **media}


def url(value, kind="image_url"):
    return {"type": kind, kind: {"url": value}}


def test_one_conversation_in_three_formats(images):
    a, video = images.resolve() / "a.png", Video(images.resolve() / "v.mp4")
    expected = (Turn("user", (a, "What?", video)), Turn("assistant", ("A circle.",)))
    parts = [url("a.png"), {"type": "text", "text": "What?"}, url("v.mp4", "video_url")]
    text = "<image>\nWhat?\n<video>"
    assert parse("llava", llava(text, image="a.png", video="v.mp4"), images) == expected
    assert parse("sharegpt", sharegpt(text, images=["a.png"], videos=["v.mp4"]), images) == expected
    assert parse("sharegpt", llava(text, images=["a.png"], videos=["v.mp4"]), images) == expected
    assert parse("openai", sharegpt(parts), images) == expected


def test_sound_in_three_formats(images):
    sounds = (Sound(images.resolve() / "a.wav"), Sound(images.resolve() / "b.wav"))
    expected = (Turn("user", (sounds[0], "Who?", sounds[1])), Turn("assistant", ("A circle.",)))
    parts = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "Who?"}, url("b.wav", "audio_url")]
    text, names = "<audio>\nWho?\n<audio>", ["a.wav", "b.wav"]
    for form, write in (("llava", llava), ("sharegpt", sharegpt), ("sharegpt", llava)):
        for key in ("audio", "audios"):
            assert parse(form, write(text, **{key: names}), images) == expected
    assert parse("openai", sharegpt(parts), images) == expected


def test_sound_in_a_message_itself():
    data = base64.b64encode(b"RIFF").decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    ((sound,), _) = (turn.parts for turn in parse("openai", sharegpt([part])))
    assert isinstance(sound, Sound) and isinstance(sound.file, Blob) and sound.file.content == b"RIFF"


def test_where_no_sound_is_named_its_tag_is_text():
    assert parse("llava", llava("Is <audio> a tag?"))[0].parts == ("Is <audio> a tag?",)


@pytest.mark.parametrize(("key", "form"), [("audio", "llava"), ("audios", "sharegpt")])
def test_sound_tells_the_format(key, form):
    assert detect([llava("<audio>Who?", **{key: ["a.wav"]})]) == form


def test_llavas_own_video_sets_write_image_where_the_video_is(images):
    assert parse("llava", llava("<image>\nWhat?", video="v.mp4"), images)[0].parts == (
        Video(images.resolve() / "v.mp4"),
        "What?",
    )


def test_a_system_text_beside_the_turns():
    assert parse("sharegpt", sharegpt("Hi?", system="Be brief."))[0] == Turn("system", ("Be brief.",))
    assert parse("sharegpt", sharegpt("Hi?", system=""))[0].role == "user"


def test_parts_are_read_in_every_format(images):
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    for form in ("sharegpt", "openai", "swift"):
        assert parse(form, sharegpt(parts), images)[0].parts == (images.resolve() / "a.png", "What?")


def test_openai_parts_of_answers_are_joined_and_tags_are_text():
    answer = [{"type": "text", "text": "A "}, {"type": "text", "text": "circle."}]
    raw = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "<image>?"}]}
    raw["messages"].append({"role": "assistant", "content": answer, "weight": 1})
    assert [turn.parts for turn in parse("openai", raw)] == [("Be brief.",), ("<image>?",), ("A circle.",)]


@pytest.mark.parametrize(
    "name, found",
    [
        ("sub/c.png", "sub/c.png"),
        ("file://{folder}/a.png", "a.png"),
        ("file://localhost{folder}/a%2Epng", "a.png"),
        ({"bytes": None, "path": "a.png"}, "a.png"),
    ],
)
def test_paths_are_found_below_data_path(images, name, found):
    name = name.format(folder=images.resolve()) if isinstance(name, str) else name
    assert MediaResolver(images).find(name, "image") == images.resolve() / found


def test_pictures_inside_the_annotation(images):
    content = (images / "b.jpg").read_bytes()
    address = f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
    for value in (content, {"bytes": content, "path": None}, address):
        blob = MediaResolver(None).find(value, "image")
        assert isinstance(blob, Blob) and blob.content == content and open_image(blob).size == (112, 56)


@pytest.mark.parametrize(
    "samples, form",
    [
        ([llava("Hi?")], "llava"),
        ([llava("Hi?"), llava("<image>", images=["a.png"])], "sharegpt"),
        ([llava("Hi?"), llava("<image>", image="a.png"), llava("<image>", images=["a.png"])], "llava"),
        ([sharegpt("Hi?")], "sharegpt"),
        ([sharegpt("Hi?"), sharegpt([url("a.png")])], "openai"),
        ([sharegpt("Hi?"), sharegpt("<image>", images=["a.png"])], "sharegpt"),
        ([sharegpt("Hi?"), sharegpt("What?", images=["a.png"])], "swift"),
        ([sharegpt("<image>", image="a.png")], "swift"),
        ([{"query": "Hi?", "response": "Yes."}], "swift"),
        ([{"conversation": [{"human": "Hi?", "assistant": "Yes."}]}], "swift"),
        ([{"instruction": "Hi?", "output": "Yes.", "messages": None}], "alpaca"),
        ([{"messages": None}], "sharegpt"),
        ([{"text": "Hi?"}, llava("Hi?")], "llava"),
        ([5, {}, None], "unknown"),
        ([{"text": "Hi?"}], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_dataset_is_recognised_by_its_keys(samples, form):
    assert detect(samples) == form and form in FORMATS


def test_alpaca_rows(images):
    a = images.resolve() / "a.png"
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "history": [["Hi?", "Yes."]], "system": "Be brief."}
    assert parse("alpaca", row) == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("Hi?",)),
        Turn("assistant", ("Yes.",)),
        Turn("user", ("Add.\n1 + 1",)),
        Turn("assistant", ("2",)),
    )
    null = dict.fromkeys(("input", "history", "system", "images"))
    assert parse("alpaca", {"instruction": "Hi?", "output": "Yes."} | null) == parse("sharegpt", talk_of("Hi?", "Yes."))
    for key, value in (("image", "a.png"), ("images", ["a.png"])):
        for question in ("<image>\nWhat?", "What?"):
            told = parse("alpaca", {"instruction": question, "output": "A circle.", key: value}, images)
            assert told[0] == Turn("user", (a, "What?"))


def talk_of(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    "row",
    [
        {"query": "Sure?", "response": "No.", "history": [["Hi?", "Yes."]], "system": "Be brief."},
        {
            "conversation": [{"human": "Hi?", "assistant": "Yes."}, {"human": "Sure?", "assistant": "No."}],
            "system": "Be brief.",
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *talk_of("Hi?", "Yes.")["messages"],
                *talk_of("Sure?", "No.")["messages"],
            ]
        },
        {
            "conversations": [
                {"from": role, "value": text}
                for role, text in (("system", "Be brief."), ("user", "Hi?"), ("assistant", "Yes."), ("user", "Sure?"),
                                   ("assistant", "No."))
            ]
        },
    ],
    ids=lambda row: next(iter(row)),
)  # fmt: skip
def test_swift_rows(row, images):
    a, b = images.resolve() / "a.png", images.resolve() / "b.jpg"
    expected = [
        ("system", "Be brief."),
        ("user", "Hi?"),
        ("assistant", "Yes."),
        ("user", "Sure?"),
        ("assistant", "No."),
    ]
    assert parse("swift", row) == tuple(Turn(role, (text,)) for role, text in expected)
    in_front = parse("swift", row | {"images": ["a.png", {"path": "b.jpg", "bytes": None}]}, images)
    assert in_front[1] == Turn("user", (a, b, "Hi?")) and in_front[3] == Turn("user", ("Sure?",))


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        ("alpaca", {"output": "x"}, r"'instruction' is missing or empty; the sample has \['output'\]"),
        ("alpaca", {"instruction": "x"}, "key 'output' is missing; the sample has"),
        ("alpaca", {"instruction": ["x"], "output": "x"}, r"'instruction' must be a string, got \['x'\]"),
        ("alpaca", {"instruction": "x", "output": " "}, "turn 2: the answer is empty"),
        ("alpaca", {"instruction": "x", "output": "y", "history": ["a"]}, "'history' 1 must be a pair of question"),
        ("alpaca", {"instruction": "x", "output": "y", "history": "a"}, "'history' must be a list of pairs"),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a", ""]]}, "turn 2: the answer is empty"),
        ("alpaca", {"instruction": "<image>", "output": "y"}, "1 <image> tags in the human turns, but 0 images"),
        ("swift", {"query": "x"}, "key 'response' is missing"),
        ("swift", {"query": "<image>", "response": "y", "images": ["a", "b"]}, "1 <image> tags .* but 2 images"),
        ("swift", {"query": "x", "response": "y", "image": "a", "images": ["b"]}, "both 'image' and 'images' name"),
        ("swift", {"query": "x", "response": "y", "objects": {"bbox": [[1]]}}, r"'objects' .* not read: write boxes"),
        ("swift", {"conversation": [{"human": "x"}]}, "turn 1: 'human' and 'assistant' must be strings"),
        ("swift", {"conversation": ["x"]}, "turn 1 must be an object"),
        (
            "swift",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "loss": False}]},
            "no answer is to be learned",
        ),
        (
            "unknown",
            {"text": "x"},
            r"keys \['text'\] are of no known format. Known are: llava \(.*; sharegpt .*; openai .*; alpaca .*; "
            r"swift .*"
            r"columns=\{messages: dialogue\}",
        ),
    ],
)  # fmt: skip
def test_rows_that_lack_something(form, row, reason):
    with pytest.raises(DataError, match=reason):
        parse(form, row)


def test_columns_of_other_names():
    columns = {"messages": "dialogue", "images": "photos", "role": "who", "content": "says"}
    raw = {"dialogue": [{"who": "user", "says": "Hi?", "role": 7}, 5], "photos": [], "images": 3, "id": 1}
    assert renamed(raw, columns) == {"messages": [{"role": "user", "content": "Hi?"}, 5], "images": [], "id": 1}
    assert renamed({"id": 1}, columns) == {"id": 1} and renamed(3, columns) == 3
    swapped = renamed({"input": "a", "instruction": "b"}, {"input": "instruction", "instruction": "input"})
    assert swapped == {"input": "b", "instruction": "a"}
    assert renamed(raw, {}) is raw


def test_what_is_known_and_what_the_configuration_allows_are_the_same():
    assert set(DATA_FORMATS) - {"auto"} == set(FORMATS) - {"unknown"} == set(KNOWN)


class _Pictures(BaseHTTPRequestHandler):
    content = b""

    def do_GET(self):
        moved = {"/moved": "/a.png", "/file": "file:///etc/hostname", "/ftp": "ftp://127.0.0.1/a.png"}
        found = self.path in ("/a.png", "/short", "/slow")
        self.send_response(302 if self.path in moved else 200 if found else 404)
        if self.path in moved:
            self.send_header("Location", moved[self.path])
        if self.path == "/short":
            self.send_header("Content-Length", str(len(self.content) + 1))
        self.end_headers()
        if self.path == "/slow":
            with suppress(OSError):  # the other side hangs up
                for byte in self.content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.01)
        self.wfile.write(self.content if found else b"")

    def log_message(self, *_):
        pass


@pytest.fixture
def server(images, monkeypatch):
    """The address of a server that has a.png, and three ways from it to elsewhere."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    _Pictures.content = (images / "a.png").read_bytes()
    with HTTPServer(("127.0.0.1", 0), _Pictures) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_addresses_are_fetched_only_where_allowed(server):
    with pytest.raises(DataError, match="refused"):
        MediaResolver(None).find(f"{server}/a.png", "image")
    for path in ("/a.png", "/moved"):
        remote = MediaResolver(None, allow_http=True).find(server + path, "image")
        assert isinstance(remote, Remote) and open_image(remote).size == (56, 56)


@pytest.mark.parametrize("path", ["/gone.png", "/file", "/ftp"])
def test_an_address_that_leads_nowhere_or_elsewhere_is_a_data_error(server, path):
    with pytest.raises(DataError, match=rf"image {server}{path} cannot be fetched"):
        open_image(Remote(server + path))


def test_an_address_that_gives_less_than_it_says_is_a_data_error(server):
    with pytest.raises(DataError, match=rf"image {server}/short cannot be fetched: cut off after \d+ of \d+ bytes"):
        open_image(Remote(f"{server}/short"))


def test_an_address_that_gives_a_byte_now_and_then_is_a_data_error(server, monkeypatch):
    monkeypatch.setattr("dhp.data.media.sources.FETCH_S", 0.05)
    with pytest.raises(DataError, match=rf"image {server}/slow cannot be fetched: \d+ bytes came within 0.05 s"):
        open_image(Remote(f"{server}/slow"))


TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A circle."}]


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def shade(file) -> int:
    return open_image(file).getpixel((0, 0))[0]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 24])
@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"\n", b"ab\n\nc", b"\n\nabc\n", b"a  \n \t\r\n" + b" " * 20])
def test_lines_begin_after_line_ends(tmp_path, monkeypatch, chunk, content):
    monkeypatch.setattr(annotation_files, "_CHUNK_BYTES", chunk)
    (tmp_path / "a").write_bytes(content)
    lines = content.split(b"\n")
    lines = lines[:-1] if not lines[-1] else lines
    bounds, blank = find_lines(tmp_path / "a")
    assert bounds.dtype == np.int64 and bounds[-1] == len(content)
    cut = [content[a:b].rstrip(b"\n") for a, b in zip(bounds, bounds[1:])]
    assert cut == lines
    assert blank.tolist() == [number for number, line in enumerate(lines) if not line.strip()]


def test_lines_are_read_where_they_are_and_blank_ones_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n[0]\n\n\n[1]\r\n   \n[2]")
    rows = JsonlRows(path)
    assert [rows.read(i).value for i in range(len(rows))] == [[0], [1], [2]]
    assert [rows.locate(i) for i in range(3)] == [f"line {n} of {path}" for n in (2, 5, 7)]


def test_blank_lines_cost_no_file_each(tmp_path, monkeypatch):
    """A file of a hundred megabytes of line ends took a quarter of an hour."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * 3000 + b"[0]\n")
    opened = []
    whole = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *rest: opened.append(self) or whole(self, *rest))
    rows = JsonlRows(path)
    assert (len(rows), rows.locate(0), len(opened)) == (1, f"line 3001 of {path}", 2)


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_shards_of_a_folder_are_read_one_after_another(tmp_path):
    said = json.dumps({"conversations": TALK}).encode()
    for number in range(2):
        members = {}
        for n in (1, 2):
            members |= {f"{n}.png": picture(10 * number + n), f"{n}.json": said}
        shard(tmp_path / f"{number}.tar", members)
    annotations = read_annotations("set", tmp_path, None)
    assert [shade(annotations.record(n).images[0]) for n in (3, 0, 2, 1)] == [12, 1, 11, 2]
    assert annotations.where(3) == f"dataset 'set', sample 2 of {tmp_path / '1.tar'}"
    assert [annotations.record(n).position for n in range(4)] == [1, 2, 3, 4]  # of the dataset, not of a file


def test_members_are_named_by_name_or_ending_and_long_names_work(tmp_path):
    two = [{"from": "human", "value": "<image><image>"}, TALK[1]]
    key = "x" * 150 + "/1"  # longer than a plain tar header
    said = {"conversations": two, "image": ["right.png", f"{key}.left.png"]}
    members = {f"{key}.left.png": picture(1), f"{key}.right.png": picture(2), f"{key}.json": json.dumps(said).encode()}
    path = shard(tmp_path / "a.tar", {"0.json": json.dumps({"conversations": TALK}).encode(), **members})
    record = read_annotations("set", path, None).record(1)
    assert [shade(file) for file in record.images] == [2, 1]
    assert all(isinstance(file, Member) for file in record.images)


def test_videos_of_a_shard_and_messages(tmp_path):
    said = {"messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A circle."}]}
    path = shard(tmp_path / "a.tar", {"1.mp4": b"x", "1.json": json.dumps(said).encode()})
    (part, _) = read_annotations("set", path, None).record(0).turns[0].parts
    assert isinstance(part, Video) and part.file.name == "1.mp4"


def test_sounds_of_a_shard(tmp_path):
    said = {"conversations": [{"from": "human", "value": "<audio>Who?"}, TALK[1]]}
    path = shard(tmp_path / "a.tar", {"1.flac": b"x", "1.json": json.dumps(said).encode()})
    (part, _) = read_annotations("set", path, None).record(0).turns[0].parts
    assert isinstance(part, Sound) and part.file.name == "1.flac"


def test_links_in_a_shard_are_no_members(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        said = json.dumps({"conversations": TALK, "image": "png"}).encode()
        info = tarfile.TarInfo("1.json")
        info.size = len(said)
        archive.addfile(info, io.BytesIO(said))
        escape = tarfile.TarInfo("1.png")
        escape.type, escape.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(escape)
    with pytest.raises(DataError, match=r"0 members of the sample's archive: \['1\.json'\]"):
        read_annotations("set", path, None).record(0)


def raw_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header with any size: below 0 in base 256, as GNU's tar writes what octal digits cannot."""
    info = tarfile.TarInfo(name)
    info.type = kind
    buffer = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    buffer[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    buffer[148:156] = b" " * 8
    buffer[148:156] = b"%06o\0 " % sum(buffer)
    return bytes(buffer)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"X"])
def test_a_header_that_leads_back_ends_the_reading(tmp_path, kind, place):
    """Python's tarfile goes back to the same header for ever."""
    first = raw_header("0.json", 2) + b"{}".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(first * place + raw_header("1.json", -512, kind) + first)
    with pytest.raises(DataError, match=r"a\.tar: no readable tar file"):
        read_annotations("set", tmp_path / "a.tar", None)


def test_a_size_below_nothing_in_an_attribute(tmp_path):
    record = b"13 size=-512\n"
    pax = raw_header("p", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")
    file = raw_header("1.json", 2) + b"{}".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(file + pax + file)
    with pytest.raises(DataError, match=r"a\.tar: no readable tar file"):
        read_annotations("set", tmp_path / "a.tar", None)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.SOLARIS_XHDTYPE])
def test_attributes_are_not_read_without_a_bound(tmp_path, kind):
    """Three gigabytes in a sparse file of a few blocks were read into memory."""
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(raw_header("p", 3 << 30, kind))
        file.truncate(3 << 30)
    with pytest.raises(DataError, match=f"a header says {3 << 30} bytes"):
        read_annotations("set", path, None)


def test_a_conversation_is_not_read_without_a_bound(tmp_path):
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(raw_header("1.json", 3 << 30))
        file.truncate((3 << 30) + 512)
    with pytest.raises(DataError, match=rf"1\.json has {3 << 30} bytes, more than the"):
        read_annotations("set", path, None)


def test_shards_of_the_webdataset_package(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(3):
            writer.write({"__key__": f"a/{number}", "png": picture(number), "json": {"conversations": TALK}})
    annotations = read_annotations("set", path, None)
    assert [shade(annotations.record(n).images[0]) for n in (2, 0, 1)] == [2, 0, 1]


def rows_of_pictures(samples: int) -> list[dict]:
    stored = [{"bytes": picture(number), "path": None} for number in range(samples)]
    return [{"image": image, "conversations": TALK} for image in stored]


def test_parquet_files_with_pictures_inside(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = rows_of_pictures(7)
    (tmp_path / "data").mkdir()
    for name, part in (("0.parquet", rows[:5]), ("1.parquet", rows[5:])):
        parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / "data" / name, row_group_size=2)
    annotations = read_annotations("set", tmp_path, None)
    assert [shade(annotations.record(n).images[0]) for n in (6, 0, 3, 5, 4)] == [6, 0, 3, 5, 4]
    assert annotations.where(6) == f"dataset 'set', row 2 of {tmp_path / 'data' / '1.parquet'}"
    assert annotations.where(4) == f"dataset 'set', row 5 of {tmp_path / 'data' / '0.parquet'}"
    assert [annotations.record(n).position for n in range(7)] == [1, 2, 3, 4, 5, 6, 7]


def test_csv_and_tsv(tmp_path):
    lines = ["query,response,system", '"What,', 'now?",[red],', "Sure?,Yes.,Be brief."]
    for name, text in (("a.csv", "\ufeff" + "\r\n".join(lines)), ("a.tsv", "query\tresponse\nWhat,\tnow\n")):
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    rows = read_annotations("set", tmp_path / "a.csv", None)
    said = [[turn.parts[0] for turn in rows.record(index).turns] for index in range(len(rows))]
    assert said == [["What,\r\nnow?", "[red]"], ["Be brief.", "Sure?", "Yes."]]
    assert rows.record(0).where == f"dataset 'set', the row that ends at line 3 of {tmp_path / 'a.csv'}"
    assert read_annotations("set", tmp_path / "a.tsv", None).record(0).turns[0].parts == ("What,",)


def test_a_cell_that_should_be_a_list(tmp_path):
    (tmp_path / "a.csv").write_text('messages,images\n"[{",a.png\n')
    with pytest.raises(DataError, match="row that ends at line 2 of .*the cell of 'messages' must be a list in JSON"):
        read_annotations("set", tmp_path / "a.csv", None, "sharegpt")


def test_parts_of_a_shard_name_their_own_files(tmp_path):
    """What no part names is not shown; a part without a name takes the next one."""
    for part, more in (({"type": "image", "image": "left.png"}, {}), ({"type": "image"}, {"images": ["left.png"]})):
        said = [
            {"role": "user", "content": [part, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A."},
        ]
        content = json.dumps({"messages": said, **more}).encode()
        path = shard(tmp_path / "a.tar", {"1.json": content, "1.left.png": b"l", "1.right.png": b"r"})
        shown = read_annotations("set", path, None).record(0).turns[0].parts
        assert [getattr(one, "name", one) for one in shown] == ["1.left.png", "What?"]
    said[0]["content"][0] = {"type": "image"}
    path = shard(tmp_path / "b.tar", {"1.json": json.dumps({"messages": said}).encode(), "1.png": b"l"})
    assert read_annotations("set", path, None).record(0).turns[0].parts[0].name == "1.png"


def test_messages_in_parquet_have_null_fields(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    said = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "A."}]}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": said}]), tmp_path / "a.parquet")
    record = read_annotations("set", tmp_path / "a.parquet", tmp_path).record(0)
    assert record.turns[0].parts == (tmp_path.resolve() / "a.png", "What?")


def test_a_file_that_is_no_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"dataset 'set': .*a\.parquet: not a readable Parquet file"):
        read_annotations("set", tmp_path / "a.parquet", None)


def test_folders_that_hugging_face_datasets_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    turns = datasets.List({"from": datasets.Value("string"), "value": datasets.Value("string")})
    features = datasets.Features(image=datasets.Image(), conversations=turns)
    saved = datasets.Dataset.from_list(rows_of_pictures(3), features=features)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=saved).save_to_disk(str(tmp_path / "splits"))
    annotations = read_annotations("set", tmp_path / "one", None)
    assert [shade(annotations.record(n).images[0]) for n in (2, 0, 1)] == [2, 0, 1]
    with pytest.raises(DataError, match="several splits; give the folder of one: train"):
        read_annotations("set", tmp_path / "splits", None)


@pytest.mark.parametrize("package, name", [("pyarrow", "a.parquet"), ("datasets", "saved")])
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, package, name):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for module in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"`pip install {package}`"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / name))})
