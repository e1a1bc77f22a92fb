"""Pictures of samples, decoded once or kept as features."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from dhp.core.batch import IGNORED, Features, ProcessorOutput
from dhp.core.errors import DataError
from dhp.data.media.frames import FrameSampling, FrameTimes
from dhp.data.media.sources import Blob, Frames, Settings, SizedImage, Video
from dhp.data.read.records import Record, Turn
from dhp.data.sample import picture_inputs
from dhp.data.sample.cached_pictures import CachedPictures, key_of, seen_from_json, seen_to_json
from dhp.data.sample.chat import Rendered, replace_each
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import Sample, Videos
from dhp.models.families.qwen3_vl import qwen3_vl
from dhp.models.processor import Processor

QUESTION, ANSWER = "Is it blue or red?", "You are red"
TOKENS = {"image_token_id": "image_pad", "video_token_id": "video_pad"} | {
    f"vision_{end}_token_id": f"vision_{end}" for end in ("start", "end")
}


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> Processor:
    ids = {field: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for field, name in TOKENS.items()}
    return qwen3_vl(Qwen3VLConfig(vision_config={"patch_size": 14}, **ids)).processor


@pytest.fixture(scope="module")
def apart(model: Processor, preprocessor: Callable[..., Preprocessor]) -> Callable[..., Preprocessor]:
    """apart(**changes): a preprocessor for Qwen3-VL's videos."""
    taking = FrameSampling(2.0, 768, 2, model.takes_both_ends)
    videos = Videos(model.video_token_id, taking, model.video_patches, None, model.step_tokens, model.step_text)
    return partial(preprocessor, videos=videos)


def record(*parts: Any) -> Record:
    return Record("set", 1, "here", (Turn("user", parts), Turn("assistant", (ANSWER,))))


def expected_text(tokenizer: PreTrainedTokenizerBase, text: str, seen: list[tuple[tuple, list[int], float]]) -> str:
    """By the library's processor. seen: of each video the grid, the frames taken and how many a second has."""
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    pieces = text.split("<|video_pad|>")
    for number, (grid, indices, rate) in enumerate(seen):
        about = SimpleNamespace(frames_indices=indices, fps=rate)
        inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [about]}
        pieces[number] += Qwen3VLProcessor.replace_video_token(theirs, inputs, 0)
    return "".join(pieces)


@pytest.mark.parametrize(
    "frames, rate, indices, steps",
    [(12, 4, [0, 2, 4, 7, 9, 11], 3), (13, 4, [0, 2, 5, 7, 10, 12], 3), (20, 8, [0, 5, 10, 14, 19], 3), (1, 4, [0], 1)],
)
def test_the_prompt_is_that_of_the_librarys_processor(
    frames: int, rate: int, indices: list[int], steps: int, tmp_path: Path, write_video: Callable[..., Path],
    apart: Callable[..., Preprocessor], tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    path = write_video(tmp_path / "v.mp4", frames=frames, rate=rate, size=(112, 56))
    sample = apart()(record(f"{QUESTION}.", Video(path), QUESTION))
    grid = (steps, 4, 8)
    assert sample.grids == (grid,) and sample.pixels[0].shape == (steps * 32, 1176)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": f"{QUESTION}."}, {"type": "video"},
                                     {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": ANSWER},
    ]  # fmt: skip
    text = expected_text(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False), [(grid, indices, rate)])
    assert sample.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    is_video = sample.input_ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert np.array_equal(sample.mm_token_type_ids, 2 * is_video)
    assert (sample.mm_token_type_ids == 2).sum() == steps * 8
    assert "seconds>" in tokenizer.decode(sample.input_ids)


def test_text_goes_behind_a_step_too(
    tmp_path: Path, write_video: Callable[..., Path], model: Processor, preprocessor: Callable[..., Preprocessor],
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    videos = Videos(
        model.video_token_id, FrameSampling(2.0, 768, 2), model.video_patches, None, model.step_tokens,
        lambda middle, first: (f"before {middle} ", f" behind {first}"),
    )  # fmt: skip
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4, size=(56, 56))
    text = tokenizer.decode(preprocessor(videos=videos)(record(Video(path), QUESTION)).input_ids)
    assert text.replace("<|video_pad|>" * 4, "V").count("<|vision_start|>V<|vision_end|>") == 3
    assert "before 0.25 " in text and " behind 0.0before 1.25 " in text and text.count("behind 2.0") == 1


def test_answers_stay_where_they_are(
    tmp_path: Path, write_video: Callable[..., Path], apart: Callable[..., Preprocessor],
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)
    turns = (
        Turn("user", (QUESTION,)), Turn("assistant", (ANSWER,)),
        Turn("user", (Video(path), "And this?", Video(path))), Turn("assistant", ("blue",)),
    )  # fmt: skip
    sample = apart()(Record("set", 1, "here", turns))
    learned = sample.input_ids[sample.labels != IGNORED]
    assert tokenizer.decode(learned) == f"{ANSWER}<|im_end|>blue<|im_end|>"
    starts = np.flatnonzero(np.diff(sample.mm_token_type_ids) > 0)
    assert len(starts) == 2 * 3  # each step of each video in a run of its own


def test_a_sample_is_as_long_as_measured(
    tmp_path: Path, write_video: Callable[..., Path], apart: Callable[..., Preprocessor], images: Path
) -> None:
    make = apart()
    paths = [write_video(tmp_path / f"{frames}.mp4", frames=frames, rate=4) for frames in (5, 40)]
    first, second = map(Video, paths)
    for parts in ((first, QUESTION), (second, images / "a.png", first, QUESTION), (QUESTION,)):
        sample, length = make(record(*parts)), make.measure(record(*parts))
        assert length.text == len(sample.input_ids)
        assert length.vision == (sample.mm_token_type_ids > 0).sum()
        assert (length.patches, length.pictures) == (sum(map(len, sample.pixels)), len(sample.pixels))
        assert length.squares == sum(t * (len(rows) // t) ** 2 for rows, (t, _, _) in zip(sample.pixels, sample.grids))


def test_positions_take_each_step_by_itself(
    tmp_path: Path, write_video: Callable[..., Path], apart: Callable[..., Preprocessor], model: Processor
) -> None:
    """The library finds a grid for each run of placeholders; the steps of a video differ in their beginning alone."""
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)
    sample = apart()(record(Video(path), QUESTION))
    ids, kinds = (torch.from_numpy(values)[None] for values in (sample.input_ids, sample.mm_token_type_ids))
    lengths, grids = torch.tensor([ids.shape[1]]), torch.tensor(sample.grids)
    found = model.position_ids(ids, kinds, None, lengths, grids, torch.tensor(sample.seconds))
    steps = found[:, 0, kinds[0] == 2].view(3, 3, 4)  # [axis, step, token]
    assert (steps[:, 1:] > steps[:, :-1]).all()
    assert torch.equal(steps - steps[0, :, :1], (steps - steps[0, :, :1])[:, :1].expand(3, 3, 4))


def test_a_placeholder_in_the_text_is_refused(
    tmp_path: Path, write_video: Callable[..., Path], apart: Callable[..., Preprocessor]
) -> None:
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)
    told = r"2 video placeholder tokens for 1 videos: the text itself holds '<\|video_pad\|>'"
    for read in (apart(), apart().measure):
        with pytest.raises(DataError, match=told):
            read(record(Video(path), "What is <|video_pad|>?"))


def test_lengths_depend_on_how_times_are_told(apart: Callable[..., Preprocessor]) -> None:
    videos = apart.keywords["videos"]
    changed = [
        videos, replace(videos, step_tokens=None), replace(videos, step_text=lambda *times: (str(times), "")),
        replace(videos, taking=replace(videos.taking, both_ends=False)),
    ]  # fmt: skip
    assert len({apart(videos=one).fingerprint() for one in changed}) == 4


def test_replacing_moves_what_follows() -> None:
    rendered = Rendered("ab X cd X ef", ((0, 2), (5, 7), (5, 9), (10, 12)))
    found = replace_each(rendered, "X", ["long", ""])
    assert found.text == "ab long cd  ef"
    assert [found.text[start:stop] for start, stop in found.spans] == ["ab", "cd", "cd ", "ef"]
    beside = replace_each(Rendered("abXcd", ((0, 2), (2, 3), (3, 5))), "X", ["long"])  # ends where one begins
    assert [beside.text[start:stop] for start, stop in beside.spans] == ["ab", "long", "cd"]


def test_groups_lie_between_their_first_and_last_frame() -> None:
    assert FrameSampling(2.0, 768, 2).pace(12, 4.0) == FrameTimes(1.0, (0.25, 1.25, 2.25), (0.0, 1.0, 2.0))
    assert FrameSampling(2.0, 768, 2, both_ends=True).pace(12, 4.0).times == (0.25, 1.375, 2.5)
    assert FrameSampling(2.0, 768, 2, both_ends=True).pace(20, 8.0).times == (
        0.3125,
        1.5,
        2.375,
    )  # the last frame twice
    assert FrameSampling(2.0, 768, 2).pace(1, 4.0).times == (0.0,)


@pytest.mark.parametrize("total", [1, 2, 5, 48, 301])
@pytest.mark.parametrize("most", [8, 768])
def test_the_librarys_processor_takes_the_same_frames(total: int, most: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    for rate, fps in ((4.0, 2.0), (25.0, 0.5), (29.97, 2.0)):
        settings = SimpleNamespace(min_frames=4, max_frames=most, fps=fps)
        about = SimpleNamespace(total_num_frames=total, fps=rate)
        theirs = Qwen3VLVideoProcessor.sample_frames(settings, about, fps=fps)
        assert FrameSampling(fps, most, 2, both_ends=True).indices(total, rate).tolist() == theirs.tolist()


def halved(frames: int, size: tuple[int, int]) -> tuple[int, int]:
    """Smaller the more frames there are."""
    side = 28 * max(1, 8 // frames)
    return 2 * side, side


@pytest.mark.parametrize(("frames", "grid"), [(4, (2, 4, 8)), (13, (3, 2, 4)), (1, (1, 16, 32))])
def test_frames_are_scaled_by_the_rule_of_their_clip(
    frames: int, grid: tuple[int, int, int], tmp_path: Path, write_video: Callable[..., Path],
    apart: Callable[..., Preprocessor],
) -> None:  # fmt: skip
    asked = record(Video(write_video(tmp_path / "v.mp4", frames=frames, rate=4, size=(112, 56))), QUESTION)
    videos = replace(apart.keywords["videos"], size=halved)
    whole, parts = apart(videos=videos), apart(videos=videos, video_whole_frames=1)
    assert whole(asked).grids == (grid,) and whole.measure(asked).vision == grid[0] * grid[1] * grid[2] // 4
    assert np.array_equal(parts.pictures.complete(parts(asked)).pixels[0], whole(asked).pixels[0])
    assert apart(videos=videos, max_pixels=14 * 14 * 16)(asked).grids == (grid[:1] + (2, 4),)
    assert whole.fingerprint() != apart().fingerprint()


def test_a_rule_that_keeps_the_size_changes_nothing(
    tmp_path: Path, write_video: Callable[..., Path], apart: Callable[..., Preprocessor]
) -> None:
    asked = record(Video(write_video(tmp_path / "v.mp4", frames=12, rate=4, size=(250, 100))), QUESTION)
    wanted = apart()(asked)
    videos = replace(apart.keywords["videos"], size=lambda *_: (14 * wanted.grids[0][2], 14 * wanted.grids[0][1]))
    assert np.array_equal(apart(videos=videos)(asked).pixels[0], wanted.pixels[0])


Make = Callable[..., Preprocessor]
NAMES = ("embeddings", "deepstack.0")


class Shelf(dict):
    """What is kept, by key."""

    def load(self, key: str) -> Features | None:
        return self.get(key)

    def keep(self, sample: Sample) -> None:
        """Features of all of a sample's pictures, as many rows as they have tokens."""
        for features, grid in zip(sample.features, sample.grids, strict=True):
            rows = torch.rand(int(np.prod(grid)) // 4, 8)
            self[features.key] = replace(features, tensors=dict.fromkeys(NAMES, rows))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def kept(shelf: Shelf, tower: str = "tower", about: tuple = ("qwen",)) -> CachedPictures:
    return CachedPictures(tower, shelf.load, NAMES, about)


def kept_record(*parts: Any) -> Record:
    return Record("set", 1, "here", (Turn("user", ("Is it blue?", *parts)), Turn("assistant", ("You are red",))))


def test_a_kept_picture_is_not_decoded(
    shelf: Shelf, images: Path, tmp_path: Path, write_video: Callable[..., Path], preprocessor: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shown = kept_record(images / "a.png", images / "b.jpg", Video(write_video(tmp_path / "v.mp4")))
    plain, make = preprocessor()(shown), preprocessor(kept=kept(shelf))
    cold = make(shown)
    assert plain.features == () and [one.tensors for one in cold.features] == [None] * 3
    assert len({one.key for one in cold.features}) == 3
    assert all(map(np.array_equal, cold.pixels, plain.pixels))
    shelf.keep(cold)
    for name in ("open_image", "map_frames"):
        monkeypatch.setattr(picture_inputs, name, lambda *_: pytest.fail("decoded"))
    warm = make(shown)
    assert [one is shelf[one.key] for one in warm.features] == [True] * 3
    assert [len(pixels) for pixels in warm.pixels] == [0, 0, 0]
    for name in ("input_ids", "labels", "mm_token_type_ids"):
        assert np.array_equal(getattr(warm, name), getattr(plain, name))
    assert (warm.grids, warm.seconds, warm.patches) == (plain.grids, plain.seconds, plain.patches)
    assert plain.patches == sum(map(len, plain.pixels))


def test_the_same_bytes_are_the_same_picture_wherever_they_are(shelf: Shelf, images: Path, preprocessor: Make) -> None:
    make, path = preprocessor(kept=kept(shelf)), images / "a.png"
    (copied,) = make(kept_record(Blob("in the annotation", path.read_bytes()))).features
    (own,) = make(kept_record(path)).features
    assert own.key == copied.key


def test_other_pixels_have_another_key(shelf: Shelf, images: Path, preprocessor: Make) -> None:
    make, path = preprocessor(kept=kept(shelf)), images / "a.png"
    shelf.keep(make(kept_record(path)))
    assert len(make(kept_record(path)).pixels[0]) == 0
    with Image.open(path) as image:
        changed = image.copy()
    changed.putpixel((3, 5), (200, 30, 41))
    changed.save(path)
    assert len(make(kept_record(path)).pixels[0]) > 0


@pytest.mark.parametrize(
    "changes, about",
    [
        ({"min_pixels": 28 * 28}, {}),
        ({"max_pixels": 140 * 140}, {}),
        ({"image_arguments": {"do_normalize": False}}, {}),
        ({}, {"tower": "other weights"}),
        ({}, {"about": ("glm",)}),
    ],
    ids=["min_pixels", "max_pixels", "arguments", "weights", "family"],
)
def test_whatever_decides_features_changes_the_key(
    changes: dict, about: dict, shelf: Shelf, images: Path, preprocessor: Make
) -> None:
    shown = kept_record(images / "a.png")
    shelf.keep(preprocessor(kept=kept(shelf))(shown))
    assert len(preprocessor(kept=kept(shelf))(shown).pixels[0]) == 0
    assert len(preprocessor(kept=kept(shelf, **about), **changes)(shown).pixels[0]) > 0


def test_other_frames_of_a_video_have_another_key(
    shelf: Shelf, tmp_path: Path, write_video: Callable[..., Path], preprocessor: Make
) -> None:
    shown, make = (kept_record(Video(write_video(tmp_path / "v.mp4", frames=16))), preprocessor(kept=kept(shelf)))
    shelf.keep(make(shown))
    assert len(make(shown).pixels[0]) == 0
    seen = make._videos
    fewer = replace(seen, taking=replace(seen.taking, fps=1.0))
    assert len(preprocessor(kept=kept(shelf), videos=fewer)(shown).pixels[0]) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda found: replace(found, about="[]"),
        lambda found: replace(found, tensors={"embeddings": found.tensors["embeddings"]}),
        lambda found: replace(found, tensors={name: rows[1:] for name, rows in found.tensors.items()}),
    ],
    ids=["no layout", "a tensor too few", "a row too few"],
)
def test_what_does_not_fit_the_picture_is_made_anew(
    wrong: Callable, shelf: Shelf, images: Path, preprocessor: Make
) -> None:
    make, shown = preprocessor(kept=kept(shelf)), kept_record(images / "a.png")
    cold = make(shown)
    shelf.keep(cold)
    shelf[cold.features[0].key] = wrong(shelf[cold.features[0].key])
    again = make(shown)
    assert len(again.pixels[0]) > 0
    assert (again.features[0].key, again.features[0].tensors) == (cold.features[0].key, None)


FORM = ProcessorOutput((("pixel_values", (1, 3, 4)),), (("sizes", "int64", (1, 2), b"\x00\xff"),), 3, 7, "<image>")


@pytest.mark.parametrize(
    "seen",
    [((1, 4, 6), None), ((2, 4, 6), FrameTimes(0.1 + 0.2, (0.1, 1 / 3), (0.0, 0.7))), (FORM, None)],
    ids=["image", "video", "form"],
)
def test_what_is_seen_comes_back(seen: tuple) -> None:
    assert seen_from_json(seen_to_json(*seen)) == seen


@pytest.mark.parametrize("text", ["", "[]", "[[1, 2], null]", '[{"pixels": []}, null]', "7"])
def test_another_text_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        seen_from_json(text)


def test_every_part_of_a_key_counts() -> None:
    parts = ("tower", "seen", "image", b"1")
    others = ("tower2", "seen2", "video", b"2")
    keys = {key_of(*parts), *(key_of(*parts[:n], others[n], *parts[n + 1 :]) for n in range(4))}
    assert len(keys) == 5 and all(len(key) == 64 for key in keys)
    assert key_of(*parts) == key_of(*parts)


def test_settings_and_frames_of_a_picture_have_keys_of_their_own(
    shelf: Shelf, images: Path, preprocessor: Make, write_video: Callable[..., Path]
) -> None:
    video, a, c = write_video(images / "v.mp4"), images / "a.png", images / "sub" / "c.png"
    same = Frames((a, a), 2.0)
    parts = [
        c, SizedImage(c, Settings(max_pixels=56 * 56)), Video(video), Video(video, Settings(end=1.0)), Video(same),
        Video(replace(same, rate=1.0)), Video(Frames((a, a, a, a), 2.0)),
    ]  # fmt: skip
    preprocess = preprocessor(kept=kept(shelf))
    made = [preprocess(kept_record(part)) for part in parts]
    assert len({sample.features[0].key for sample in made}) == len(parts)
    for part, sample in zip(parts, made):
        shelf.keep(sample)
        again = preprocess(kept_record(part))
        assert again.grids == sample.grids and again.seconds == sample.seconds and not again.pixels[0].size
