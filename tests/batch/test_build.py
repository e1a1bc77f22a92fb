"""What each rank receives: its own patches once, in tower order, and a way to put the rows back."""

import json
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.vision_utils import get_vision_position_ids

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReaderSettings, open_model
from dhp.batch.reader import make_reader as make_real_feed
from dhp.batch.row_shards import SequenceGroups, choose_groups
from dhp.batch.shard import Division
from dhp.config.data import DataConfig, DatasetEntry
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.errors import ModelError
from dhp.core.graph import Route
from dhp.data.sampling.sampler import BatchLayout
from dhp.models.registry import load_family
from dhp.tiny.tiny_model import make_tiny_model
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_image
from tests.helpers.layouts import Case, make_reader
from tests.helpers.tiny import make_sample

LAYOUTS = [
    Case(Degrees(), Degrees(), micro_batches=1),
    Case(Degrees(ulysses=4), Degrees(), micro_batches=1),
    Case(Degrees(data=2, ulysses=2), Degrees(data=2)),
    Case(Degrees(data=3), Degrees(data=4), micro_batches=1),
    Case(Degrees(data=2), Degrees(data=2), vision_batch=2),
]


def deal(model: str, case: Case, samples: list) -> StepData:
    return make_reader(model, case, [samples]).step(0)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_patch_reaches_exactly_one_rank(made_model: str, case: Case) -> None:
    samples = mixed_step()
    data = deal(made_model, case, samples)
    sent = torch.cat([work.pixels[: 4 * sum(work.rows)] for row in data.work["vision"] for work in row])
    all_pixels = torch.cat([torch.from_numpy(p) for s in samples for p in s.pixels])
    assert len(sent) == len(all_pixels)
    key = lambda rows: sorted(map(float, rows[:, 0]))
    assert key(sent) == key(all_pixels)


def test_patches_travel_as_the_tower_rounds_them(made_model: str) -> None:
    """In 16 bits they take half the room, and are what the tower would have made of them."""
    case, samples = LAYOUTS[1], mixed_step()
    exact, rounded = make_reader(made_model, case, [samples]), make_reader(made_model, case, [samples])
    rounded._sharder._encoders["vision"]._dtype = torch.bfloat16
    for ours, theirs in zip(rounded.step(0).work["vision"][0], exact.step(0).work["vision"][0], strict=True):
        assert ours.pixels.dtype == torch.bfloat16 and ours.pixels.nbytes == theirs.pixels.nbytes // 2
        assert torch.equal(ours.pixels, theirs.pixels.to(torch.bfloat16))


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_rows_come_back_in_the_order_of_the_placeholders(made_model: str, case: Case) -> None:
    """Each vision rank "encodes" a merged token as the first value of its first patch; placement undoes the way."""
    samples = mixed_step()
    data = deal(made_model, case, samples)
    rows = iter(samples)
    left: list = []  # of a pass, by shard, the runs of rows that are not handed over yet
    for m, (text, route) in enumerate(zip(data.work["text"], data.routes["vision"], strict=True)):
        if m % case.vision_batch == 0:
            assert not any(left)
            vision = data.work["vision"][m // case.vision_batch]
            given = [work.pixels[::4, 0] if work.order is None else work.pixels[::4, 0][work.order] for work in vision]
            left = [list(own[: sum(work.rows)].split(work.rows)) for own, work in zip(given, vision, strict=True)]
        sent = {(v, d): left[v].pop(0) for v, ds in route.targets.items() for d in ds}
        assert all(len(rows) for rows in sent.values())
        for d, work in enumerate(text):
            own = [next(rows) for _ in range(len(work.tensors["input_ids"]))]
            expected = [torch.from_numpy(p)[::4, 0] for s in own for p in s.pixels]
            received = torch.cat([sent[v, d] for v in route.sources.get(d, ())] or [torch.empty(0)])
            if expected:
                assert torch.equal(received[work.placements["vision"]], torch.cat(expected))
            else:
                assert work.placements == {}


def test_a_rank_without_work_gets_one_window_of_its_own(made_model: str) -> None:
    data = deal(made_model, Case(Degrees(ulysses=4), Degrees(), micro_batches=1), step_with_one_window())
    busy, *idle = data.work["vision"][0]
    assert busy.rows == (1,) and all(work.rows == () for work in idle)
    for work in idle:
        assert work.window_lengths == (4,) and work.pixels.shape == (4, 3 * 2 * 14 * 14)
        assert work.positions.tolist() == [[0, 0]] * 4
    for work in data.work["vision"][0]:  # a dummy window is a segment that nobody else sees
        assert work.segment_lengths == (4, 4, 4, 4)
        assert work.shards == (((0, 0, 4),), ((1, 0, 4),), ((2, 0, 4),), ((3, 0, 4),))


def test_small_images_stay_whole_and_a_large_one_is_divided(made_model: str) -> None:
    samples = [make_sample([(1, 16, 16), (1, 4, 4), (1, 4, 4)], 4, 2, 1, 505)]
    data = deal(made_model, Case(Degrees(ulysses=2), Degrees(), micro_batches=1), samples)
    work = data.work["vision"][0][0]
    spans = [span for shard in work.shards for span in shard]
    assert sorted(work.segment_lengths) == [16, 16, 256]
    assert sum(count for _, _, count in spans) == sum(work.segment_lengths)
    large = work.segment_lengths.index(256)
    assert sorted(segment for segment, _, count in spans if count == work.segment_lengths[segment]) == [
        n for n in range(3) if n != large
    ]
    assert len([1 for segment, _, _ in spans if segment == large]) == 2


def videos() -> list:
    """Two videos and an image; of the first, each frame is too large for one of four ranks."""
    seconds = (1.0, None, 0.5)
    return [make_sample([(2, 16, 16), (1, 4, 4), (3, 4, 8)], 4, 2, 1, 505, seconds=seconds)]


SEQUENCES = [Degrees(ulysses=4), Degrees(ring=3), Degrees(ring=2, ulysses=2), Degrees()]


@pytest.mark.parametrize("vision", SEQUENCES, ids=str)
def test_ranks_hold_each_patch_of_each_frame_once(made_model: str, vision: Degrees) -> None:
    """Frames of one video are segments of their own: a rank's span of one must not lie in another."""
    (sample,) = videos()
    data = deal(made_model, Case(vision, Degrees(), micro_batches=1), [sample])
    works = data.work["vision"][0]
    assert len({(work.segment_lengths, work.shards) for work in works}) == 1  # all know the same
    lengths, shards = works[0].segment_lengths, works[0].shards
    assert sorted(lengths) == sorted([256, 256, 16, 32, 32, 32])
    held = [sorted(s[1:] for shard in shards for s in shard if s[0] == number) for number in range(len(lengths))]
    for spans, length in zip(held, lengths, strict=True):
        ends = [first + count for first, count in spans]
        assert [first for first, _ in spans] == [0, *ends[:-1]] and ends[-1] == length
    for work, shard in zip(works, shards, strict=True):
        assert sum(count for _, _, count in shard) == sum(work.window_lengths) == len(work.pixels)
    if vision.world == 4:
        assert [len(spans) for spans, length in zip(held, lengths, strict=True) if length == 256] == [2, 2]


@pytest.mark.parametrize("vision", [Degrees(ulysses=4), Degrees(ring=3), Degrees(data=2)], ids=str)
def test_rows_and_positions_of_videos_come_back_in_order(made_model: str, vision: Degrees) -> None:
    """A patch is told by its first value: by it, its row among the placeholders and its place in the frame."""
    (sample,) = videos()
    data = deal(made_model, Case(vision, Degrees(), micro_batches=1), [sample])
    works, (text,) = data.work["vision"][0], data.work["text"][0]
    patches = torch.cat([torch.from_numpy(p) for p in sample.pixels])
    received = torch.cat([work.pixels[: 4 * sum(work.rows)].unflatten(0, (-1, 4)) for work in works])
    assert torch.equal(received[text.placements["vision"]].flatten(0, 1), patches)
    positions = torch.cat([work.positions[: 4 * sum(work.rows)].unflatten(0, (-1, 4)) for work in works])
    expected = [get_vision_position_ids(torch.tensor([grid]), 2) for grid in sample.grids]
    assert torch.equal(positions[text.placements["vision"]].flatten(0, 1), torch.cat(expected))


def test_a_step_without_images_sends_nothing(made_model: str) -> None:
    data = deal(made_model, Case(Degrees(ulysses=2), Degrees()), step_without_image())
    assert data.routes["vision"] == (Route(()),) * 2
    assert data.info.images == data.info.vision_tokens == 0


def test_the_route_says_who_has_rows_for_whom(made_model: str) -> None:
    """Two samples a replica: two images of the first replica, one after the other, then one of each."""
    samples = [*mixed_step()[:2], *step_without_image()[:2]]
    data = deal(made_model, Case(Degrees(ulysses=2), Degrees(), micro_batches=4), samples)
    assert [bool(route.pairs) for route in data.routes["vision"]] == [True, True, False, False]
    data = deal(made_model, Case(Degrees(data=3), Degrees(data=4), micro_batches=1), mixed_step())
    (route,) = data.routes["vision"]
    rows = [sum(work.rows) for work in data.work["vision"][0]]
    assert [len(route.targets.get(v, ())) for v in range(3)] == [len(w.rows) for w in data.work["vision"][0]]
    assert {d for _, d in route.pairs} == {0, 1, 3} and sum(rows) == 15 + 6 + 4 + 35


def test_counts_are_global_and_rows_padded_right(made_model: str) -> None:
    samples = mixed_step()
    data = deal(made_model, Case(Degrees(), Degrees(data=2)), samples)
    assert data.info.samples == 4
    assert data.info.images == 4
    assert data.info.target_tokens == 3 + 8 + 1 + 2
    assert data.info.vision_tokens == 60 + 24 + 16 + 140
    assert data.info.tokens == sum(len(s.input_ids) for s in samples)
    assert {work.total_weight for row in data.work["text"] for work in row} == {14}


def test_an_empty_place_becomes_one_padding_token_without_target(made_model: str) -> None:
    data = deal(made_model, Case(Degrees(), Degrees(data=2), micro_batches=1), [make_sample([], 4, 2, 1, 505)])
    empty = data.work["text"][0][1].tensors
    assert empty["input_ids"].tolist() == [[0]] and empty["targets"].tolist() == [[-100]]
    assert data.info.samples == 1 and data.info.target_tokens == 2


def test_inputs_for_a_plain_model_are_what_the_ranks_get(made_model: str) -> None:
    case = Case(Degrees(ulysses=2), Degrees(data=2))
    feed = make_reader(made_model, case, [mixed_step()])
    named, data = feed.model_inputs(0), feed.step(0)
    for m, row in enumerate(data.work["text"]):
        for d, work in enumerate(row):
            labels = named[f"{d}/{m}/labels"]
            named[f"{d}/{m}/targets"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
            for name, tensor in work.tensors.items():
                assert torch.equal(named[f"{d}/{m}/{name}"], tensor), name
    assert {key for key in named if key.endswith("pixel_values")} == {
        "0/0/pixel_values",
        "1/0/pixel_values",
        "1/1/pixel_values",
    }
    assert load_family(made_model).processor.image_token_id == 505


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """Over tensor ranks such a token would be embedded as zeros, where a plain model stops with an IndexError."""
    folder = str(make_tiny_model(tmp_path / "model", ["a line of text", "and another one"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_family(folder).config.get_text_config().vocab_size
    tokenizer.add_tokens([f"<extra {n}>" for n in range(rows - len(tokenizer) + 1)])
    tokenizer.save_pretrained(folder)
    layout = BatchLayout(replicas=1, micro_batches=1, micro_batch_size=1)
    settings = BatchReaderSettings(folder, DataConfig(), layout, Division({"vision": Split()}), 0)
    with pytest.raises(ModelError, match=f"ids up to {rows}, but the model's vocabulary has {rows} rows"):
        make_real_feed(settings)


def test_a_video_file_reaches_a_plain_model_as_it_reaches_the_ranks(tmp_path: Path, tiny_assets: Path) -> None:
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for number in range(12):
            picture = np.full((84, 112, 3), 20 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    talk = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A circle."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk, "videos": ["v.mp4"]}))
    entry = DatasetEntry(str(tmp_path / "a.jsonl"), str(tmp_path))
    layout = BatchLayout(replicas=1, micro_batches=1, micro_batch_size=1)
    model_name = str(tiny_assets / "model")
    more = {"video_fps": 1.0, "video_whole_frames": None, "positions": "library"}
    data = DataConfig(["v"], data_registry={"v": entry}, shuffle=False, **more)
    feed = make_real_feed(BatchReaderSettings(model_name, data, layout, Division({"vision": Split()}), 0))
    named = {key.rpartition("/")[2]: tensor for key, tensor in feed.model_inputs(0).items()}
    assert named["video_grid_thw"].tolist() == [[2, 6, 8]]  # four frames, in pairs
    assert named["second_per_grid_ts"].tolist() == [1.5]
    ((work,),) = feed.step(0).work["vision"]
    assert len(work.pixels) == len(named["pixel_values_videos"]) == 2 * 6 * 8
    model = AutoModelForImageTextToText.from_pretrained(model_name)
    positions = named.pop("position_ids")
    with torch.no_grad():
        own = model(**named, use_cache=False).loss
        given = model(**named, position_ids=positions, use_cache=False).loss
    assert torch.equal(own, given)


def test_a_plugin_that_the_reader_lacks_is_named_with_its_node(tiny_assets: Path) -> None:
    model_name, layout = str(tiny_assets / "model"), BatchLayout(replicas=1, micro_batches=1, micro_batch_size=1)
    settings = BatchReaderSettings(
        model_name, DataConfig(), layout, Division({"vision": Split()}), 0, plugins=("plugin_far",)
    )
    with pytest.raises(ModelError, match="^on the node .*, plugins=plugin_far: there is no module plugin_far"):
        open_model(settings)


def test_a_packed_row_has_no_padding_and_no_target_across_samples(made_model: str) -> None:
    samples = mixed_step()
    case = Case(Degrees(), Degrees(data=2), micro_batches=1, packing=True)
    feed = make_reader(made_model, case, [samples])
    data = feed.step(0)
    first, second = data.work["text"][0]
    assert first.lengths == tuple(len(s.input_ids) for s in samples[:2])
    assert first.tensors["input_ids"].tolist()[0] == [t for s in samples[:2] for t in s.input_ids]
    assert data.info.padded_tokens == data.info.tokens
    starts = [0, first.lengths[0]]
    ends = [length - 1 for length in (starts[1], sum(first.lengths))]
    assert first.tensors["targets"][0, ends].tolist() == [-100, -100]
    assert first.tensors["position_ids"][:, 0, starts].tolist() == [[0, 0]] * 3
    named = feed.model_inputs(0)
    # For a plain model, which knows no packed rows: a row a sample.
    for replica, work in enumerate((first, second)):
        assert list(named[f"{replica}/0/input_ids"].shape) == [2, max(work.lengths)]


def test_the_first_token_of_a_packed_sample_is_never_a_target(made_model: str) -> None:
    """The sample before it would have to predict it, and N does not count it. All others stay."""
    samples = [make_sample([], tokens, tokens + 2, seed, 505) for tokens, seed in ((4, 1), (2, 2), (6, 3))]
    assert all((sample.labels == sample.input_ids).all() for sample in samples)
    data = deal(made_model, Case(Degrees(), Degrees(), micro_batches=1, packing=True), samples)
    targets = data.work["text"][0][0].tensors["targets"][0]
    assert targets.tolist() == [n for sample in samples for n in (*sample.labels[1:].tolist(), -100)]
    assert data.info.target_tokens == int((targets != -100).sum()) == 5 + 3 + 7


def test_loads_are_told_with_padding_and_without(made_model: str) -> None:
    """Two replicas of 11 and 5 tokens; two vision ranks, of which the second has nothing to do."""
    samples = [make_sample([(1, 4, 4)], 4, 2, 1, 505), make_sample([], 3, 2, 2, 505)]
    for packing, padded in ((True, (11, 5)), (False, (11, 5))):
        info = deal(made_model, Case(Degrees(data=2), Degrees(data=2), 1, packing=packing), samples).info
        assert (info.tokens, info.padded_tokens) == (16, sum(padded))
        assert info.dist_ratio == {"vision": 0.5, "text": pytest.approx(6 / 22)}
    images = [[(1, 4, 4)], [(1, 4, 6)], [], [(1, 4, 8)]]
    samples = [*samples, *(make_sample(grids, 3, 2, n, 505) for n, grids in enumerate(images))]
    info = deal(made_model, Case(Degrees(data=3), Degrees(data=3), 2), samples).info
    # Patches of the ranks: 16, 16 and none, then 24, 32 and none; against the busiest one, in the mean.
    assert info.dist_ratio["vision"] == pytest.approx((1 - 32 / 48 + 1 - 56 / 96) / 2)
    info = deal(made_model, Case(Degrees(), Degrees(), 1), samples[:2]).info  # a row of 11 and a padded one
    assert (info.tokens, info.padded_tokens, info.dist_ratio) == (16, 22, {"vision": 0.0, "text": 0.0})


def test_layouts_of_images_are_kept_and_those_of_videos_are_not(made_model: str) -> None:
    """Sizes of images come again; videos seldom have as many frames, and their layouts are large."""
    feed = make_reader(made_model, Case(Degrees(), Degrees(), micro_batches=1), [videos(), mixed_step()])
    for step in (0, 1, 0, 1):
        feed.step(step)
    found = feed._sharder._encoders["vision"]._known_layout.cache_info()
    assert (found.currsize, found.misses) == (5, 5)  # 4 × 4, and four in the other step


def test_an_empty_packed_place_is_one_padding_token(made_model: str) -> None:
    case = Case(Degrees(), Degrees(data=2), micro_batches=1, packing=True)
    data = deal(made_model, case, [make_sample([], 4, 2, 1, 505)])
    assert data.work["text"][0][1].lengths == (1,) and data.work["text"][0][1].tensors["targets"].tolist() == [[-100]]


def test_rows_are_divided_from_where_attention_takes_as_long_as_the_matrices(
    made_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many operations, of which causal attention sees half of the pairs."""
    asked: list[float] = []

    def choose(lengths: list[int], ring: int, ulysses: int, crossover: float) -> SequenceGroups:
        asked.append(crossover)
        return choose_groups(lengths, ring, ulysses, crossover)

    monkeypatch.setattr("dhp.batch.shard.choose_groups", choose)
    deal(made_model, Case(Degrees(), Degrees(ring=2), 1, packing=True, sequence_groups="auto"), mixed_step())
    work, tokens = load_family(made_model).decoder.work, round(asked[0])
    matrices = replace(work, pair=0).flops([tokens], 0)
    assert replace(work, token=0).flops([tokens], 0) == pytest.approx(matrices, rel=0.01)
