"""A long video's patches, read shard by shard: the same as of a video that is decoded whole."""

from __future__ import annotations

import json
import re
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

from dhp.batch.encoder_shards import Split
from dhp.batch.prompts import make_held_out_feed
from dhp.batch.reader import BatchReader, BatchReaderSettings, make_reader
from dhp.config.data import DataConfig, DatasetEntry
from dhp.core.batch import Sampling, StepData, UnreadPatches, VisionInput
from dhp.core.errors import DataError, UnreadableVideo
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout

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
            encoders={"vision": split},
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
