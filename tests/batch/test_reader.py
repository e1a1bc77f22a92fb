"""Any step by its number, prompts, draws, patches."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from dhp.batch.encoder_shards import Split
from dhp.batch.prompts import check_room, find_stops, make_held_out_feed, make_prompt_feed
from dhp.batch.reader import BatchReader, BatchReaderSettings, make_reader
from dhp.batch.row_shards import FILLER, runs_of_rows, runs_of_shard, sample_keys, with_keys
from dhp.batch.shard import Division
from dhp.config.command_line import compose_config
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.resolve import resolve
from dhp.core.axes import Degrees
from dhp.core.batch import PositionRange, Sampling, StepData, UnreadPatches, VisionInput
from dhp.core.draws import keys_of
from dhp.core.errors import DataError, UnreadableVideo
from dhp.core.parameters import AdapterSettings
from dhp.data.read.records import Record, Turn
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout
from dhp.models.pretrained import load_image_processor
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from tests.helpers.answers import make_text
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_image
from tests.helpers.layouts import Case, _slotted, make_sharder


def reader(assets: Path, cache: Path, *overrides: str) -> BatchReader:
    own = [f"data.data_registry.shapes.annotation_path={assets / 'data/annotations.json'}", f"data.cache_dir={cache}"]
    models = [f"{part}.model_name={assets / 'model'}" for part in ("vision", "text")]
    paths = [f"data.data_registry.shapes.data_path={assets / 'data'}"]
    return make_reader(feed_settings(resolve(compose_config("tiny", None, [*own, *models, *paths, *overrides]))))


def test_some_samples_are_measured_and_no_more(tiny_assets: Path, tmp_path: Path) -> None:
    found = reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(16, 60.0)
    assert found.dtype == LENGTH_COLUMNS and len(found) == 16
    assert (found["text"] > found["vision"]).all() and found["pictures"].any()
    (one,) = reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(16, 0.0)  # one at least
    assert one["text"] > 0


def test_where_all_are_known_all_are_given(tiny_assets: Path, tmp_path: Path) -> None:
    balanced = reader(tiny_assets, tmp_path, "data.balance=balanced")
    for chunk in balanced.missing():
        balanced.learn(chunk, balanced.measure(chunk))
    found = balanced.some_lengths(16, 0.0)
    assert len(found) == balanced.dataset_size
    np.testing.assert_array_equal(found, balanced.lengths.columns(np.arange(len(found)), 0))


def test_a_cache_that_cannot_be_written_ends_no_run(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = reader(tiny_assets, tmp_path / "file", "data.balance=random").some_lengths(16, 60.0)
    assert not len(found)


@pytest.mark.parametrize("most", [1, 7])
def test_samples_are_spread_over_the_epoch(tiny_assets: Path, tmp_path: Path, most: int) -> None:
    assert len(reader(tiny_assets, tmp_path, "data.balance=random").some_lengths(most, 60.0)) == most


def settings_of(assets: Path, *overrides: str):
    config = resolve(compose_config("tiny", overrides=["text.parallelism=sequence", *overrides]))
    for part in (config.vision, config.text):
        part.model_name = str(assets / "model")
    entry = config.data.data_registry["shapes"]
    entry.annotation_path, entry.data_path = str(assets / "data" / "annotations.json"), str(assets / "data")
    return feed_settings(config)


def ask(image: Path) -> Record:
    return Record("prompt", 1, "the prompt", (Turn("user", (image, "Which shape is this?")),))


def test_the_prompt_is_the_templates_own(tiny_assets: Path) -> None:
    image = next((tiny_assets / "data" / "images").glob("*.png"))
    feed = make_prompt_feed(settings_of(tiny_assets), [ask(image)], Sampling(7))
    (shards,) = feed.read(feed.batch(0)).work["text"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which shape is this?"}]}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    grid = load_image_processor(str(tiny_assets / "model"))(Image.open(image).convert("RGB"))["image_grid_thw"][0]
    placeholder = load_family(str(tiny_assets / "model")).processor.image_token_id
    runs = [[one] * (int(np.prod(grid)) // 4 if one == placeholder else 1) for one in wanted]
    whole = [one for run in runs for one in run]
    row = torch.empty(len(whole) - 1, dtype=torch.long)
    for rank, shard in enumerate(shards):
        spans = shard.row.shards[rank]
        places = [place for _, first, count in spans for place in range(first, first + count)]
        row[places] = shard.row.tensors["input_ids"][0]
    assert [*row.tolist(), shards[0].last] == whole
    assert all(shard.tokens == len(whole) - 1 and shard.sampling.stop for shard in shards)
    # An image of t × h × w patches takes max(h, w) / 2 positions, whatever its tokens.
    saved = len(runs[wanted.index(placeholder)]) - int(max(grid[1:])) // 2
    assert shards[0].next_position == len(whole) - saved and saved > 0


def test_answers_stop_where_those_that_were_learned_end(tiny_assets: Path) -> None:
    """A base model ends texts with one token, and its template ends turns with another."""
    model = str(tiny_assets / "model")
    tokenizer, config = AutoTokenizer.from_pretrained(model), load_family(model).config
    end = tokenizer.convert_tokens_to_ids("<|vision_pad|>")
    named = find_stops(model, config, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|vision_pad|>")
    assert end not in named and find_stops(model, config, tokenizer) == (*named, end)


def test_each_prompt_draws_from_a_seed_of_its_own(tiny_assets: Path) -> None:
    image = next((tiny_assets / "data" / "images").glob("*.png"))
    records = [replace(ask(image), position=position) for position in (1, 2, 3)]
    feed = make_prompt_feed(settings_of(tiny_assets), records, Sampling(7, seed=40))
    dealt = [feed.read(feed.batch(step)).work["text"][0] for step in range(feed.steps)]
    assert [{shard.sampling.seed for shard in shards} for shards in dealt] == [{40}, {41}, {42}]


def test_held_out_prompts_are_those_of_the_first_answers(tiny_assets: Path) -> None:
    feed = make_held_out_feed(settings_of(tiny_assets), 3, Sampling(7))
    prompts = feed.prompts
    assert len(prompts) == feed.steps == 3 and all(one.question and one.reference for one in prompts)
    assert all(one.name == "shapes" and "<image>" not in one.question for one in prompts)


def test_all_prompts_of_a_dataset_whose_pictures_are_read_when_they_are_answered(
    tiny_assets: Path, tmp_path: Path
) -> None:
    said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A square."}]
    good = next((tiny_assets / "data" / "images").glob("*.png")).read_bytes()
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "broken.png").write_bytes(good[:60])
    rows = [{"image": f"{name}.png", "conversations": said} for name in ("good", "broken", "good")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = settings_of(tiny_assets)
    registry = {"shapes": DatasetEntry(str(tmp_path / "rows.json"), str(tmp_path))}
    settings = replace(settings, data=replace(settings.data, data_registry=registry, shuffle=False))
    feed = make_held_out_feed(settings, None, Sampling(7))
    assert len(feed) == feed.steps == 3 and [one.reference for one in feed.prompts] == ["A square."] * 3
    feed.read(feed.batch(2))
    with pytest.raises(DataError, match="broken.png"):
        feed.read(feed.batch(1))
    skipping = replace(settings, data=replace(settings.data, on_bad_sample="skip"))
    assert len(make_held_out_feed(skipping, None, Sampling(7))) == 2
    (tmp_path / "rows.json").write_text(json.dumps(rows[1:2]))
    with pytest.raises(DataError, match="shapes has no sample that can be asked"):
        make_held_out_feed(skipping, None, Sampling(7))


def test_a_prompt_without_room_for_its_answer_is_refused() -> None:
    text = make_text(20, 1)
    check_room(text, 12, PositionRange(32, True))
    with pytest.raises(DataError, match=r"20 tokens and 13 new ones are more than the 32 .* Set max_new_tokens=12"):
        check_room(text, 13, PositionRange(32, True))
    check_room(text, 1 << 20, None)


ONE = Degrees()
DROPPING = tuple((part, AdapterSettings(2, 4.0, dropout=0.1)) for part in ("vision", "text"))
PLAIN = Case(ONE, ONE, 1, packing=True, lora=DROPPING)
LAYOUTS = [
    Case(ONE, ONE, 2, lora=DROPPING),
    Case(Degrees(data=2), Degrees(data=3), 2, lora=DROPPING),
    Case(Degrees(ulysses=2, ring=2), Degrees(ulysses=2, ring=2), 1, lora=DROPPING),
    Case(Degrees(ulysses=3), Degrees(data=2, ring=2), 1, lora=DROPPING, sequence_groups="auto"),
    Case(Degrees(data=3), Degrees(ulysses=4), 2, lora=DROPPING, tower_stages=2),
]


def numbers(data: StepData, part: str) -> Counter[int]:
    """Keys of all tokens of a part, over its ranks and micro-batches, but for what fills up."""
    runs = [run for of_ranks in data.work[part] for one in of_ranks for run in one.draws if run[0]]
    return Counter(keys_of(runs).tolist())


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize("make", [mixed_step, step_without_image, step_with_one_window])
def test_every_token_has_the_same_key_in_every_layout(case: Case, make, made_model: str) -> None:
    step = make()
    plain, other = (make_sharder(made_model, one).shard(_slotted(3, one, step)) for one in (PLAIN, case))
    for part, count in (("text", sum(len(s.input_ids) for s in step)), ("vision", sum(s.patches for s in step))):
        keys = numbers(plain, part)
        assert len(keys) == count and set(keys.values()) <= {1}  # none twice
        assert numbers(other, part) == keys
    for part in other.work:
        for work in (one for of_ranks in other.work[part] for one in of_ranks):
            given = work.tensors["input_ids"] if part == "text" else work.positions[:, 0]
            assert sum(count for _, _, count in work.draws) == given.numel()  # each row, with what fills up


def test_tokens_are_in_the_order_of_the_rows(made_model: str) -> None:
    """Padded ones between samples; of a rank that shares a row its own."""
    step = mixed_step()
    (lengths, first) = [len(sample.input_ids) for sample in step], Case(ONE, ONE, 1, lora=DROPPING)
    keys = sample_keys(_slotted(3, first, step), 0)[0][0]
    (padded,) = make_sharder(made_model, first).shard(_slotted(3, first, step)).work["text"][0]
    width = max(lengths)
    wanted = [run for key, n in zip(keys, lengths) for run in ((key, 0, n), (0, 0, width - n)) if run[2]]
    assert list(padded.draws) == wanted
    shared = replace(first, text=Degrees(ring=2))
    for rank, work in enumerate(make_sharder(made_model, shared).shard(_slotted(3, shared, step)).work["text"][0]):
        assert work.draws == tuple((keys[s], at, n) for s, at, n in work.shards[rank])


def test_parts_that_draw_nothing_get_no_keys(made_model: str) -> None:
    silent = replace(PLAIN, lora=(DROPPING[1],))
    data = make_sharder(made_model, silent).shard(_slotted(0, silent, mixed_step()))
    assert numbers(data, "text") and not any(one.draws for one in data.work["vision"][0])
    none = replace(PLAIN, lora=())
    data = make_sharder(made_model, none).shard(_slotted(0, none, mixed_step()))
    assert not any(one.draws for part in data.work for one in data.work[part][0])


def test_keys_differ_by_seed_step_sample_and_picture() -> None:
    step = mixed_step()
    keys = lambda number, seed, samples=step: sample_keys(_slotted(number, PLAIN, samples), seed)[0][0]
    every = [*keys(0, 0), *keys(1, 0), *keys(0, 1), *keys(0, 0, [replace(one, dataset="other") for one in step])]
    assert len(set(every)) == 16
    pictures = [key for sample in keys(0, 0) for key, _ in with_keys(sample, "abc")]
    assert len(set(pictures)) == 12 and [picture for _, picture in with_keys(None, "ab")] == ["a", "b"]


def test_a_sample_that_comes_twice_draws_twice() -> None:
    one, other = mixed_step()[:2]
    twice = StepSamples(0, 0, (((one, other), (one,)), ((), (one,))), ())
    ((first, second), (third,)), ((), (fourth,)) = sample_keys(twice, 0)
    assert len({first, second, third, fourth}) == 4
    swapped = StepSamples(0, 0, (((one,), ()), ((one,), (one, other))), ())
    ((a,), ()), ((b,), (c, d)) = sample_keys(swapped, 0)
    assert {a, b, c} == {first, third, fourth} and d == second


def test_runs_of_rows_and_of_shards() -> None:
    assert runs_of_rows([7, 8], [3, 5], 5) == ((7, 0, 3), (0, 0, 2), (8, 0, 5))
    assert runs_of_rows([7, 8], [3, 5], 0) == ((7, 0, 3), (8, 0, 5))
    assert runs_of_rows([], [], 9) == (FILLER,)
    assert runs_of_shard([7, 8], ((1, 2, 3), (0, 0, 4), (2, 0, 1))) == ((8, 2, 3), (7, 0, 4), (0, 0, 1))


FRAMES = 40


def _write(path: Path, frames: int) -> None:
    """Frames that differ, with a key frame every twelve; the header comes first."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for _ in range(frames):
            picture = np.kron(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8), np.ones((14, 14, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def feed(tmp_path: Path, tiny_assets: Path) -> Callable[..., BatchReader]:
    """feed(split, whole_frames): steps of a picture, a long video and a short one."""
    for name, frames in (("long", FRAMES), ("short", 4)):
        _write(tmp_path / f"{name}.mp4", frames)
    Image.linear_gradient("L").convert("RGB").resize((112, 84)).save(tmp_path / "p.png")
    content = "<image>First <video>and then <video>What?"
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "A circle."}]
    media = {"images": ["p.png"], "videos": ["long.mp4", "short.mp4"]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk, **media}))

    def make(
        split: Split, whole_frames: int | None, on_bad_sample: str = "error", open_feed: Any = make_reader, **more: Any
    ) -> Any:
        settings = BatchReaderSettings(
            model_name=str(tiny_assets / "model"),
            data=DataConfig(
                ["v"],
                data_registry={"v": DatasetEntry(str(tmp_path / "a.jsonl"), str(tmp_path))},
                shuffle=False,
                on_bad_sample=on_bad_sample,
                cache_dir=str(tmp_path),
                video_fps=4.0,
                video_whole_frames=whole_frames,
            ),
            layout=BatchLayout(replicas=1, micro_batches=1, micro_batch_size=1),
            division=Division({"vision": split}),
            seed=0,
            **more,
        )
        return open_feed(settings)

    return make


def _work(data: StepData) -> tuple[VisionInput, ...]:
    return data.work["vision"][0]


@pytest.mark.parametrize("split", [Split(), Split(ranks=3), Split(replicas=2, ranks=2, dtype="bfloat16")], ids=str)
def test_filled_work_is_that_of_a_video_decoded_whole(feed: Callable[..., BatchReader], split: Split) -> None:
    parted, whole = feed(split, 8), feed(split, None)
    wanted, unread = whole.step(0), parted.read(parted.batch(0))
    assert any(work.unread for work in _work(unread))
    assert unread.info.dist_ratio == wanted.info.dist_ratio
    for work, full in zip(map(parted.fill, _work(unread)), _work(wanted), strict=True):
        assert torch.equal(work.pixels, full.pixels) and work.pixels.dtype == full.pixels.dtype
        assert replace(work, pixels=full.pixels).segment_lengths == full.segment_lengths
        assert (work.shards, work.rows, work.unread) == (full.shards, full.rows, ())


def test_who_asks_for_a_step_or_a_sample_gets_all_of_it(feed: Callable[..., BatchReader]) -> None:
    parted, whole = feed(Split(), 8), feed(Split(), None)
    assert torch.equal(_work(parted.step(0))[0].pixels, _work(whole.step(0))[0].pixels)
    for own, full in zip(parted.sample(0)[1].pixels, whole.sample(0)[1].pixels, strict=True):
        assert np.array_equal(own, full)
    named = whole.model_inputs(0)
    assert all(torch.equal(tensor, named[name]) for name, tensor in parted.model_inputs(0).items())


def test_a_rank_decodes_frames_that_follow_each_other(feed: Callable[..., BatchReader]) -> None:
    parted = feed(Split(ranks=4), 8)
    held = []
    for work in _work(parted.read(parted.batch(0))):
        (video,) = [piece for piece in work.unread if isinstance(piece, UnreadPatches)]
        steps = (video.rows // (6 * 8)).unique()
        assert len(steps) == steps[-1] - steps[0] + 1
        held += steps.tolist()
    assert sorted(held) == list(range(FRAMES // 2))


def test_work_that_is_there_stays_as_it_is(feed: Callable[..., BatchReader]) -> None:
    whole = feed(Split(), FRAMES)  # no more frames than that
    (work,) = _work(whole.read(whole.batch(0)))
    assert whole.fill(work) is work


@pytest.mark.parametrize("on_bad_sample", ["error", "skip"])
def test_a_video_that_proves_broken_is_told_or_left_out(feed: Callable[..., BatchReader], on_bad_sample: str) -> None:
    parted = feed(Split(), 8, on_bad_sample)
    batch = parted.batch(0)
    (work,) = _work(parted.read(batch))
    video = next(piece.video for piece in work.unread if isinstance(piece, UnreadPatches))
    video.file.write_bytes(video.file.read_bytes()[: video.file.stat().st_size // 2])
    with pytest.raises(UnreadableVideo, match="long.mp4") as found:
        parted.fill(work)
    broken = {found.value.file: str(found.value)}
    told = "dataset 'v', line 1 of .*long.mp4"
    if on_bad_sample == "error":
        with pytest.raises(DataError, match=told):
            parted.read(batch, broken)
    else:
        (skipped,) = parted.read(batch, broken).info.skipped
        assert re.match(told, skipped)


@pytest.fixture
def cut_off(feed: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """As `feed`, of a long video whose first half alone is there; its header and its first frames are well."""
    path = tmp_path / "long.mp4"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return feed


TOLD = r"dataset 'v', line 1 of .*: video .*long.mp4 (is cut off|cannot be decoded)"


def test_whoever_asks_for_a_whole_step_is_told_or_it_is_left_out(cut_off: Callable[..., Any]) -> None:
    (skipped,) = cut_off(Split(), 8, "skip").step(0).info.skipped
    assert re.match(TOLD, skipped)
    for ask in (BatchReader.step, BatchReader.sample, BatchReader.model_inputs):
        with pytest.raises(DataError, match=TOLD):
            ask(cut_off(Split(), 8), 0)


def test_decoding_every_sample_finds_it(cut_off: Callable[..., Any]) -> None:
    measured = cut_off(Split(), 8, balancing=BalanceSettings("balanced")).measured
    (chunk,) = measured.chunks()
    assert not measured.measure(chunk).defects
    ((place, told),) = measured.decode(chunk).items()
    assert place == ("v", 0) and re.match(TOLD, told)


def test_held_out_prompts_are_decoded_before_a_run_begins(cut_off: Callable[..., Any]) -> None:
    held_out = partial(make_held_out_feed, count=1, sampling=Sampling(4))
    with pytest.raises(DataError, match="v has no sample that can be asked"):
        cut_off(Split(), 8, "skip", held_out)
    with pytest.raises(DataError, match=TOLD):
        cut_off(Split(), 8, "error", held_out)


def test_a_prompt_whose_video_proves_broken_is_told(feed: Callable[..., Any]) -> None:
    prompts = feed(Split(), 8, "error", partial(make_held_out_feed, count=1, sampling=Sampling(4)))
    (work,) = _work(prompts.read(prompts.batch(0)))
    video = next(piece.video for piece in work.unread if isinstance(piece, UnreadPatches))
    with pytest.raises(DataError, match="dataset 'v', line 1 of .*: it broke"):
        prompts.read(prompts.batch(0), {video.file: "it broke"})


def test_a_frame_of_another_size_is_told(feed: Callable[..., BatchReader]) -> None:
    parted = feed(Split(), 8)
    (work,) = _work(parted.read(parted.batch(0)))
    video = next(piece.video for piece in work.unread if isinstance(piece, UnreadPatches))
    t, h, w = video.grid
    told = UnreadPatches(replace(video, grid=(t, h + 2, w)), torch.arange(8))
    with pytest.raises(DataError, match=r"long.mp4 has frames of 6 × 8 patches, and its first is of 8 × 8"):
        parted.fill(replace(work, unread=(told,)))
