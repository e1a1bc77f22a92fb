"""Lengths of samples, measured once and kept on disk."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
)

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.config.data import DatasetEntry
from dhp.core.errors import ConfigError, DataError
from dhp.data.media.frames import FrameSampling
from dhp.data.media.sources import Picture, files_of, open_media
from dhp.data.read.annotations import Annotations, read_annotations
from dhp.data.read.records import Record
from dhp.data.sample.picture_inputs import ModelMedia
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import LENGTH_COLUMNS, Length, Sample, Videos
from dhp.data.sampling import length_table
from dhp.data.sampling.balanced_sampler import BalancedSampler
from dhp.data.sampling.dataset import Dataset, open_dataset
from dhp.data.sampling.length_table import LengthCache, Lengths, MeasuredDataset, RowChunk, key_of, measure_lengths
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout
from dhp.models.families.llava import llava as llava_family
from dhp.models.families.qwen2_5_vl import qwen2_5_vl
from dhp.tiny.made_pictures import ANNOTATIONS, make_dataset
from dhp.tiny.tiny_model import tiny_config
from tests.data.sample.made import changed_preprocessor
from tests.data.sample.test_bad_input import GOOD, LINES, shown, talk, write

NONE = np.arange(0)


def learn(table: MeasuredDataset, indices: np.ndarray = NONE) -> None:
    for chunk in table.missing(indices):
        table.learn(chunk, table.measure(chunk))


def sample(text: str, **more) -> dict:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}], **more}


@pytest.fixture
def dataset(write_json, images) -> Dataset:
    """Of `pictures` two of four samples, of `words` each once and a half; some are defective."""
    asked = [("<image>0", "a.png"), ("<image>1", "gone.png"), ("2", "b.jpg"), ("<image>3", "b.jpg")]
    first = write_json([sample(text, image=name) for text, name in asked])
    second = write_json([sample("some " + "more " * n) for n in range(5)] + [{"conversations": []}], "text.jsonl")
    registry = {"pictures": DatasetEntry(str(first), str(images)), "words": DatasetEntry(str(second), weight=1.5)}
    return open_dataset(["pictures%50", "words", "pictures"], registry, seed=3)


@pytest.fixture
def make(dataset: Dataset, preprocessor, tmp_path: Path):
    return lambda **more: MeasuredDataset(dataset, preprocessor(), LengthCache(tmp_path / "cache"), **more)


def expected(dataset: Dataset, preprocess, epoch: int) -> list[tuple[int, ...] | None]:
    """By the real thing: image tokens, tokens, patches and targets."""
    found = []
    for index in range(len(dataset)):
        try:
            made = preprocess(dataset.record(index, epoch))
            vision = int((made.mm_token_type_ids > 0).sum())
            found.append((vision, len(made.input_ids), made.patches, made.target_tokens))
        except Exception:
            found.append(None)
    return found


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_is_divided_by_dataset(make, epoch: int) -> None:
    """Of pictures there are two and four, of six words nine."""
    measured = make()
    found, whole = measured.of_epoch(epoch), measured.columns(np.arange(len(measured)), epoch)
    assert {name: len(columns) for name, columns in found.items()} == {"pictures": 6, "words": 9}
    assert np.sort(np.concatenate(list(found.values()))).tolist() == np.sort(whole).tolist()


def test_lengths_of_each_epoch_equal_the_samples_own(make, dataset: Dataset, preprocessor) -> None:
    table = make(whole=False)
    for epoch in (0, 1, 2):
        loads = table.loads(np.arange(len(dataset)), epoch)
        wanted = expected(dataset, preprocessor(), epoch)
        wanted_loads = [(own or (0, 0))[:2] for own in wanted]
        assert list(zip(loads.vision.tolist(), loads.text.tolist())) == wanted_loads
        assert loads.vision.dtype == loads.text.dtype == np.int64
        columns = table.columns(np.arange(len(dataset)), epoch)[["vision", "text", "patches", "targets"]]
        assert columns.tolist() == [own or (0, 0, 0, 0) for own in wanted]
        bad = np.array([index for index, own in enumerate(wanted) if own is None])
        told = table.defects(bad, epoch)
        assert all("dataset 'pictures', element" in text or "dataset 'words', line 6" in text for text in told)


def test_chunks_are_learned_in_any_order_and_kept(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "MEASURED_ROWS", 3)
    table = make()
    chunks = table.missing(NONE)
    told = [("pictures", [0, 1, 2]), ("pictures", [3]), ("words", [0, 1, 2]), ("words", [3, 4, 5])]
    assert [(chunk.dataset, chunk.rows.tolist()) for chunk in chunks] == told
    for chunk in reversed(chunks):
        table.learn(chunk, table.measure(chunk))
    assert table.missing(NONE) == []
    again = make()
    assert [chunk.rows.tolist() for chunk in again.missing(NONE)] == [[1, 2], [5]]  # not their neighbours
    unknown = {
        name: np.flatnonzero(t.columns["text"] == length_table.UNKNOWN).tolist() for name, t in again.tables.items()
    }
    assert unknown == {"pictures": [1, 2], "words": [5]}  # defective: they may have been mended
    indices = np.arange(len(table))
    one, other = table.loads(indices, 1), again.loads(indices, 1)
    assert np.array_equal(one.text, other.text) and np.array_equal(one.vision, other.vision)
    assert one.text.any() and again.tables["pictures"].defects == table.tables["pictures"].defects


def test_what_is_learned_twice_counts_once(make, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "MEASURED_ROWS", 1)
    table = make()
    for chunk in table.missing(NONE)[:1] + table.missing(NONE)[-1:]:
        for _ in range(len(table.tables[chunk.dataset])):  # as often as it has rows
            table.learn(chunk, table.measure(chunk))
    indices = np.arange(len(dataset))
    found, wanted = table.loads(indices, 0), make().loads(indices, 0)
    assert found.text.tolist() == wanted.text.tolist() and found.text.min() == 0


def test_an_image_that_came_later_is_found(make, images: Path) -> None:
    table = make()
    learn(table)
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    again = make()
    learn(again)
    assert set(again.tables["pictures"].defects) == {2} and make().tables["pictures"].columns["text"][1] > 0


def test_a_resumed_run_leaves_out_what_it_had_left_out(make, images: Path) -> None:
    """Or its rows would be others."""
    table = make()
    learn(table)
    left_out = table.left_out()
    assert left_out == {"pictures": [1, 2], "words": [5]}
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    for measured_before in (False, True):
        again = make()
        if measured_before:
            learn(again)
            assert again.left_out()["pictures"] == [2]
        again.leave_out(left_out)
        learn(again)
        assert again.left_out() == left_out and again.missing(NONE) == []
        assert again.tables["pictures"].columns[1] == np.zeros(1, LENGTH_COLUMNS)[0]
        assert "element 2" in again.tables["pictures"].defects[1]
        assert "was defective when this run began" in again.tables["pictures"].defects[1]


def test_a_run_is_resumed_though_a_sample_was_mended(make, images: Path) -> None:
    """In the same steps; without leaving it out again, it is refused."""

    def sampler(table: MeasuredDataset) -> BalancedSampler:
        return BalancedSampler(table, BalanceSettings("length_group", window=12), BatchLayout(1, 2, 1), 0, "skip")

    whole = make(whole=False)
    stopped = sampler(whole)
    seen = [next(stopped).samples for _ in range(3)]
    state, left_out = stopped.state_dict(), whole.left_out()
    following = next(stopped).samples
    assert left_out["pictures"]
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    with pytest.raises(DataError, match="checksum of the lengths"):
        sampler(make(whole=False)).load_state_dict(state)
    again = make(whole=False)
    again.leave_out(left_out)
    resumed = sampler(again)
    resumed.load_state_dict(state)
    assert next(resumed).samples == following and following not in seen


def test_two_runs_do_not_take_from_each_other_what_they_measured(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "SAVE_S", -1.0)
    one, other = make(whole=False), make(whole=False)
    one.loads(np.array([11]), 0)
    other.loads(np.array([14]), 0)
    assert sum((t.columns["text"] > 0).sum() for t in other.tables.values()) == 2  # it took the first one's too
    assert sum((t.columns["text"] > 0).sum() for t in make().tables.values()) == 2


def test_windows_are_measured_as_far_as_the_run_needs(make) -> None:
    table = make(whole=False)
    assert table.missing(NONE) == []
    rows = {chunk.dataset: chunk.rows.tolist() for chunk in table.missing(np.array([11, 14, 2]))}
    assert rows["pictures"] == [0, 3] and len(rows["words"]) == 1
    learn(table, np.array([11, 14, 2]))
    assert table.missing(np.array([11, 14, 2])) == [] and table.missing(np.array([11, 3]))


def test_a_window_measures_what_it_needs(make) -> None:
    table = make(whole=False)
    table.loads(np.array([0]), 0)
    assert sum((t.columns["text"] != length_table.UNKNOWN).sum() for t in table.tables.values()) == 1


def test_what_was_measured_before_a_stop_is_not_measured_again(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "SAVE_S", -1.0)
    table = make()
    table.loads(np.array([11, 14]), 0)  # rows 0 and 3 of `pictures`
    again = make()
    assert sum((t.columns["text"] != length_table.UNKNOWN).sum() for t in again.tables.values()) == 2
    assert [chunk.dataset for chunk in again.missing(NONE)] == ["pictures", "words"]


def test_decoding_finds_what_headers_do_not_show(make, images: Path) -> None:
    table = make()
    name = images / "b.jpg"
    name.write_bytes(name.read_bytes()[:-20] if len(name.read_bytes()) > 700 else name.read_bytes()[:600])
    chunk = RowChunk("pictures", np.arange(4))
    from_headers = {row for row in table.measure(chunk).defects}
    assert from_headers == {1, 2}
    assert {row for _, row in table.decode(chunk)} == {1, 2, 3}


Make = Callable[..., Preprocessor]

# What only decoding tells: these have a good header.
DAMAGED_PIXELS = {"an image cut off", "data address with half an image"}


def qwen(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Preprocessor:
    family = qwen2_5_vl(tiny_config(tokenizer)).processor
    videos = Videos(
        family.video_token_id, FrameSampling(2.0, 768, 2), family.video_patches, changes.pop("video_pixels", None)
    )
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    media = ModelMedia(processor, family.image_token_id, family.image_tokens, family.patches, videos=videos)
    return changed_preprocessor(tokenizer, media, **changes)


def llava(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Preprocessor:
    vision = CLIPVisionConfig(image_size=56, patch_size=14)
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = LlavaConfig(text_config=Qwen2Config(), vision_config=vision, image_token_index=token)
    family = llava_family(config).processor
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    media = ModelMedia(processor, token, family.image_tokens, family.patches)
    return changed_preprocessor(tokenizer, media, **changes)


@pytest.fixture(params=[qwen, llava], ids=["qwen", "llava"])
def make_cached(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> Make:
    """make(**changes) -> a preprocessor of either family."""
    return lambda **changes: request.param(tokenizer, **changes)


@pytest.fixture
def undecodable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """undecodable() makes whatever decodes an image file fail from then on."""

    def fail(self: Image.Image) -> None:
        raise AssertionError("an image is decoded")

    def forbid() -> None:
        for kind in [ImageFile.ImageFile, *ImageFile.ImageFile.__subclasses__()]:
            monkeypatch.setattr(kind, "load", fail)

    return forbid


def of_samples(annotations: Annotations, preprocess: Preprocessor) -> Lengths:
    """By decoding every one."""
    columns, defects = np.zeros(len(annotations), LENGTH_COLUMNS), {}
    for row in range(len(annotations)):
        try:
            record = annotations.record(row)
            columns[row] = in_numbers(record, preprocess(record))
        except DataError as error:
            defects[row] = str(error)
    return Lengths(columns, defects)


def in_numbers(record: Record, sample: Sample) -> Length:
    """A sample without sound."""
    frames = [
        len(pixels) // steps
        for pixels, (steps, *_) in zip(sample.pixels, sample.grids, strict=True)
        for _ in range(steps)
    ]
    return Length(
        vision=int((sample.mm_token_type_ids > 0).sum()),
        text=len(sample.input_ids),
        patches=sum(map(len, sample.pixels)),
        pictures=len(sample.pixels),
        squares=sum(n * n for n in frames),
        sound=0,
        targets=int((sample.labels[1:] >= 0).sum()),
        pairs=len(sample.input_ids) ** 2,
        encoded_bytes=sum(map(size_of, record.media)),
    )


def size_of(picture: Picture) -> int:
    """In one file, which is read."""
    (file,) = files_of(picture)
    with open_media(file, "file") as opened:
        return len(opened.read())


def check_same(one: Lengths, other: Lengths) -> None:
    assert one.columns.dtype == other.columns.dtype == LENGTH_COLUMNS
    assert one.columns.tolist() == other.columns.tolist()
    assert dict(one.defects) == dict(other.defects)


def saved(folder: Path, name: str, size: tuple[int, int], mode: str = "RGB", **options: Any) -> str:
    Image.new(mode, size).save(folder / name, **options)
    return name


def turned(orientation: int = 6) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_the_generated_dataset(tmp_path, make_cached, undecodable):
    folder = make_dataset(tmp_path / "data", samples=64)
    annotations = read_annotations("shapes", folder / ANNOTATIONS, folder)
    expected = of_samples(annotations, make_cached())
    assert expected.columns["vision"].min() == 0 < expected.columns["vision"].max() and not expected.defects
    undecodable()
    check_same(measure_lengths(annotations, make_cached(), range(64)), expected)


SIZES = [
    (1, 1), (1, 3), (3, 1), (3, 3), (4, 100), (100, 1), (13, 14), (15, 29), (41, 43), (42, 42), (56, 56), (57, 55),
    (70, 98), (84, 84), (99, 301), (140, 140), (168, 168), (169, 167), (200, 1), (201, 1), (250, 50), (301, 99),
    (333, 77), (400, 400), (512, 100), (640, 480), (700, 20), (999, 5), (1000, 6), (1024, 768),
]  # fmt: skip


@pytest.mark.parametrize(
    "make_cached, bounds",
    [
        (llava, {}),
        (qwen, {}),
        (qwen, {"min_pixels": 100 * 100}),
        (qwen, {"max_pixels": 60 * 60}),
        (qwen, {"min_pixels": 28 * 28, "max_pixels": 999 * 999}),
    ],
)
def test_many_sizes(tmp_path, tokenizer, undecodable, make_cached, bounds, write_json):
    names = [saved(tmp_path, f"{width}x{height}.png", (width, height)) for width, height in SIZES]
    annotations = read_annotations("set", write_json([shown(name) for name in names]), tmp_path)
    expected = of_samples(annotations, make_cached(tokenizer, **bounds))
    undecodable()
    check_same(measure_lengths(annotations, make_cached(tokenizer, **bounds), range(len(SIZES))), expected)


def test_every_kind_of_sample(tmp_path, make_cached, undecodable, write_json, images):
    names = [
        saved(images, "turned.jpg", (200, 90), exif=turned()),
        saved(images, "turned.png", (200, 90), exif=turned(8)),
        saved(images, "palette.gif", (100, 60), "P"),
        saved(images, "grey.png", (57, 130), "I;16"),
        saved(images, "clear.webp", (57, 130), "RGBA"),
        saved(images, "turned.tif", (200, 90), exif=turned()),
    ]
    samples = [shown(name) for name in names] + [
        talk({"from": "human", "value": "What?"}, {"from": "gpt", "value": "A circle."}),
        talk(
            {"from": "human", "value": "<image>What?<image>"},
            {"from": "gpt", "value": "A circle."},
            {"from": "human", "value": "<image>And now?"},
            {"from": "gpt", "value": "A square."},
            image=["a.png", "turned.jpg", "b.jpg"],
        ),
    ]
    annotations = read_annotations("set", write_json(samples), images)
    expected = of_samples(annotations, make_cached())
    assert not expected.defects
    undecodable()
    check_same(measure_lengths(annotations, make_cached(), range(len(samples))), expected)


@pytest.mark.parametrize("video_pixels", [None, 60 * 60])
def test_videos(tokenizer, write_json, images, write_video, video_pixels):
    for name, frames, size in (("a.mp4", 12, (112, 56)), ("b.mkv", 9, (200, 98)), ("c.avi", 1, (56, 70))):
        write_video(images / name, frames=frames, size=size)
    samples = [shown(name, "video") for name in ("a.mp4", "b.mkv", "c.avi")]
    annotations = read_annotations("set", write_json(samples), images)
    preprocess = qwen(tokenizer, video_pixels=video_pixels)
    expected = of_samples(annotations, preprocess)
    assert not expected.defects and expected.columns["vision"].min() > 0
    assert (expected.columns["squares"] < expected.columns["patches"].astype(np.int64) ** 2).any()  # frame by frame
    check_same(measure_lengths(annotations, preprocess, range(3)), expected)


@pytest.mark.parametrize("kind", LINES)
def test_defects_are_told_in_the_same_words(tmp_path, images, tokenizer, kind):
    path = write(tmp_path / "a.jsonl", LINES[kind][0], GOOD, images)
    annotations = read_annotations("set", path, images)
    preprocess = qwen(tokenizer, max_tokens=500)
    expected, found = of_samples(annotations, preprocess), measure_lengths(annotations, preprocess, range(3))
    assert list(expected.defects) == [1] and expected.defects[1].startswith(f"dataset 'set', line 2 of {path}: ")
    if kind in DAMAGED_PIXELS:
        assert not found.defects and found.columns["text"].min() > 0
    else:
        check_same(found, expected)


def test_a_video_for_a_model_without(tmp_path, images, tokenizer, write_video):
    write_video(images / "v.mp4")
    annotations = read_annotations("set", write(tmp_path / "a.jsonl", shown("v.mp4", "video"), GOOD, images), images)
    preprocess = llava(tokenizer)
    expected = of_samples(annotations, preprocess)
    assert "sees images only" in expected.defects[1]
    check_same(measure_lengths(annotations, preprocess, range(3)), expected)


@pytest.fixture
def annotations(tmp_path: Path, images: Path) -> Annotations:
    """Three samples, the second of them defective."""
    return read_annotations("set", write(tmp_path / "a.jsonl", [1], GOOD, images), images)


def test_rows_in_any_order(annotations, preprocessor):
    whole = measure_lengths(annotations, preprocessor(), range(3))
    assert len(whole) == 3 and list(whole.defects) == [1]
    turned = measure_lengths(annotations, preprocessor(), np.array([2, 1]))
    check_same(turned, Lengths(whole.columns[[2, 1]], {1: whole.defects[1]}))
    assert whole.columns[1] == np.zeros(1, LENGTH_COLUMNS)[0]
    check_same(measure_lengths(annotations, preprocessor(), []), Lengths(np.zeros(0, LENGTH_COLUMNS), {}))


COLUMNS = np.array(
    [Length(4, 20, 16, 1, 256, 0, 7, 400, 3_000_000_000), Length(0, 0), Length(8, 30, 99_999, 2, 9_999_800_001, 3)],
    LENGTH_COLUMNS,
)
NO_DEFECTS = np.frombuffer(b"{}", np.uint8)
LENGTHS = Lengths(COLUMNS, {1: "line 2 of \udcff: “no”"})


def test_a_row_takes_little_room():
    assert LENGTH_COLUMNS.names == Length._fields and LENGTH_COLUMNS.itemsize == 48
    assert all(offset % dtype.itemsize == 0 for dtype, offset in LENGTH_COLUMNS.fields.values())


def test_what_is_saved_is_loaded(tmp_path):
    cache = LengthCache(tmp_path / "not" / "there")
    assert cache.load("key") is None
    cache.check()
    cache.save("key", LENGTHS)
    check_same(cache.load("key"), LENGTHS)
    cache.load("key").columns[0] = 5  # an array of one's own
    assert cache.load("other") is None
    assert [path.name for path in (tmp_path / "not" / "there").iterdir()] == ["key.npz"]


def test_a_damaged_file_is_passed_over(tmp_path):
    cache = LengthCache(tmp_path)
    cache.save("key", LENGTHS)
    whole = (tmp_path / "key.npz").read_bytes()
    for stop in range(0, len(whole), 7):
        (tmp_path / "key.npz").write_bytes(whole[:stop])
        assert cache.load("key") is None
    for place in range(len(whole)):
        (tmp_path / "key.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        found = cache.load("key")
        if found is not None:  # a byte that says nothing, such as a date
            check_same(found, LENGTHS)
    cache.save("key", LENGTHS)
    check_same(cache.load("key"), LENGTHS)


def test_arrays_that_are_cut_by_a_damaged_head_are_no_lengths(tmp_path):
    many = np.ones(100_000, LENGTH_COLUMNS)
    cache = LengthCache(tmp_path)
    cache.save("key", Lengths(many, {}))
    whole = (tmp_path / "key.npz").read_bytes()
    assert len(cache.load("key")) == 100_000 and whole.count(b"(100000,)") == 1
    (tmp_path / "key.npz").write_bytes(whole.replace(b"(100000,)", b"(10000 ,)"))
    assert cache.load("key") is None


@pytest.mark.parametrize(
    "arrays",
    [
        {"columns": COLUMNS},
        {"columns": COLUMNS, "defects": np.zeros(0, np.uint8)},
        {"columns": COLUMNS.reshape(3, 1), "defects": NO_DEFECTS},
        {"columns": np.zeros(3, [(name, np.int64) for name in Length._fields]), "defects": NO_DEFECTS},
        {"columns": COLUMNS[["vision", "text"]], "defects": NO_DEFECTS},
        {"columns": np.array([None]), "defects": NO_DEFECTS},
        {"vision": COLUMNS["vision"], "text": COLUMNS["text"], "defects": NO_DEFECTS},
    ],
    ids=range(7),
)
def test_a_file_of_another_kind_is_passed_over(tmp_path, arrays):
    np.savez(tmp_path / "key.npz", **arrays)
    assert LengthCache(tmp_path).load("key") is None


@pytest.mark.parametrize("act", ["check", "save"])
def test_a_folder_that_cannot_be_written_to(tmp_path, act):
    (tmp_path / "file").write_text("")
    cache = LengthCache(tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="file/cache: Not a directory. Set data.cache_dir to a folder"):
        cache.check() if act == "check" else cache.save("key", LENGTHS)
    assert cache.load("key") is None


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    cache = LengthCache(tmp_path)
    cache.save("key", LENGTHS)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left on device"):
        cache.save("key", LENGTHS)
    check_same(cache.load("key"), LENGTHS)
    assert [path.name for path in tmp_path.iterdir()] == ["key.npz"]


def test_the_key_stays_the_same(annotations, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    key = key_of(annotations, qwen(tokenizer), path)
    used = qwen(tokenizer)
    measure_lengths(annotations, used, range(3))
    again = read_annotations("set", path, annotations.data_path)
    assert key_of(again, used, path) == key
    assert key_of(again, used, Path(os.path.relpath(path))) == key


@pytest.mark.parametrize(
    "changes",
    [{"min_pixels": 60 * 60}, {"max_pixels": 60 * 60}, {"max_tokens": 500}, {"video_pixels": 60 * 60}],
    ids=str,
)
def test_the_key_changes_with_the_preprocessor(annotations, tokenizer, tmp_path, changes):
    path = tmp_path / "a.jsonl"
    assert key_of(annotations, qwen(tokenizer, **changes), path) != key_of(annotations, qwen(tokenizer), path)


def test_the_key_changes_with_the_model(annotations, tokenizer, tmp_path):
    path, keys = tmp_path / "a.jsonl", set()
    keys |= {key_of(annotations, make_cached(tokenizer), path) for make_cached in (qwen, llava)}
    other = copy.deepcopy(tokenizer)
    other.chat_template += "."
    keys.add(key_of(annotations, qwen(other), path))
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["circle"])
    keys.add(key_of(annotations, qwen(other), path))
    assert len(keys) == 4


def test_the_key_changes_with_the_annotations(annotations, tokenizer, tmp_path, images):
    path, preprocess = tmp_path / "a.jsonl", qwen(tokenizer)
    keys = {key_of(annotations, preprocess, path)}
    content = path.read_bytes()
    os.utime(path, ns=(0, 1))
    keys.add(key_of(annotations, preprocess, path))
    path.write_bytes(content + b"\n")
    os.utime(path, ns=(0, 1))
    keys.add(key_of(annotations, preprocess, path))
    for form, data_path, allow_http in (("openai", images, False), ("auto", tmp_path, False), ("auto", images, True)):
        keys.add(key_of(read_annotations("set", path, data_path, form, allow_http), preprocess, path))
    keys.add(key_of(read_annotations("other", path, images), preprocess, path))
    keys.add(key_of(read_annotations("set", path, images, columns={"image": "image"}), preprocess, path))
    copied = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy")) / "a.jsonl"
    keys.add(key_of(annotations, preprocess, copied))
    assert len(keys) == 9


def test_the_key_of_a_folder_changes_with_each_of_its_files(annotations, tokenizer, tmp_path):
    folder, preprocess = tmp_path / "shards", qwen(tokenizer)
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "0.tar").write_bytes(b"0")
    (folder / "link").symlink_to("nowhere")
    keys = [key_of(annotations, preprocess, folder)]
    assert keys[0] == key_of(annotations, preprocess, folder)
    (folder / "sub" / "1.tar").write_bytes(b"1")
    keys.append(key_of(annotations, preprocess, folder))
    os.utime(folder / "sub" / "0.tar", ns=(0, 1))
    keys.append(key_of(annotations, preprocess, folder))
    (folder / "sub" / "1.tar").rename(folder / "sub" / "2.tar")
    keys.append(key_of(annotations, preprocess, folder))
    assert len(set(keys)) == 4


def test_messages_may_hold_anything(tmp_path):
    messages = {0: '{"a": "\\n"}', 2: "é\0\n\u2028"}
    LengthCache(tmp_path).save("key", Lengths(COLUMNS, messages))
    assert LengthCache(tmp_path).load("key").defects == messages
