"""Annotation files: any sample by its index, and the place that a person would look it up by."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import ConfigError, DataError
from dhp.data.media.images import open_image
from dhp.data.media.sources import Member, Sound, Video
from dhp.data.read import annotation_files
from dhp.data.read.annotation_files import JsonlRows, find_lines
from dhp.data.read.annotations import read_annotations
from dhp.data.sampling.dataset import open_dataset

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
