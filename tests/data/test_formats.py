"""The ways to write one conversation, and how a dataset's own way is recognised."""

from __future__ import annotations

import base64
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dhp.config.ranges import DATA_FORMATS
from dhp.core.errors import DataError
from dhp.data.media.images import open_image
from dhp.data.media.sources import Blob, MediaResolver, Remote, Sound, Video
from dhp.data.read.annotations import FORMATS, detect, parse_record
from dhp.data.read.formats import KNOWN, renamed
from dhp.data.read.records import Turn


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
