"""Samples and images are dealt out to shards."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dhp.batch.assign_images import (
    TOLERANCE,
    ImageWork,
    Locality,
    Piece,
    Pieces,
    assign_longest_first,
    assign_near,
    cut_in_shares,
    fill_to_level,
    in_runs,
    segment_cost,
    shard_images,
)
from dhp.batch.row_shards import ROOM, SequenceGroups, choose_groups, count_divided, divide_all, grouped_plan
from dhp.batch.shard import Division, encoder_work, text_work
from dhp.core.axes import Degrees
from dhp.core.batch import SOUND, Features, StepData, TextInput, VisionInput
from dhp.core.graph import later
from dhp.data.sample.sample import Sample
from dhp.models.flops import TextWork
from dhp.models.registry import load_family
from dhp.parallel.attention.shard_plan import ShardPlan, zigzag_plan
from tests.helpers.batches import awkward_steps
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, _slotted, graph_of, make_reader, make_sharder
from tests.helpers.tiny import make_sample
from tests.helpers.tiny_families import save_family

ONE = Degrees()


def test_stages_behind_the_first_get_no_pixels(four_layers_model: str) -> None:
    case = Case(Degrees(data=2), ONE, 2, tower_stages=2, packing=True)
    staged, whole = (
        make_reader(four_layers_model, own, awkward_steps()).step(0) for own in (case, replace(case, tower_stages=1))
    )
    assert list(staged.work) == ["vision", later("vision"), "text"] and list(whole.work) == ["vision", "text"]
    assert replace(staged.info, data_s=0.0) == replace(whole.info, data_s=0.0)
    for first, behind in zip(staged.work["vision"], staged.work[later("vision")], strict=True):
        for given, left in zip(first, behind, strict=True):
            assert left.pixels.shape == (len(given.pixels), 0)
            assert torch.equal(left.positions, given.positions)
            assert replace(left, pixels=given.pixels, positions=given.positions) == given


def test_each_stage_knows_its_work(four_layers_model: str) -> None:
    graph = graph_of(four_layers_model, Case(Degrees(data=2), ONE, 2, tower_stages=2, stages=2))
    assert graph.works() == {"vision": 2, later("vision"): 2, "text": 1}
    assert [graph.work_of(stage) for stage in graph.stages] == ["vision", later("vision"), "text", "text"]
    plain = graph_of(four_layers_model, Case(ONE, ONE, 1))
    assert plain.works() == {"vision": 1, "text": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen3_omni", tmp_path_factory.mktemp("omni")))


@pytest.fixture(scope="module")
def samples(folder: str) -> list[Sample]:
    """Eight clips, one long, and two pictures, in four samples."""
    make = Maker(folder).sample
    frames = ([700], [100, 150, 100], [], [50, 150, 100, 50])
    return [make([0] if n % 2 else [], 3, n, clips) for n, clips in enumerate(frames)]


def deal(folder: str, samples: list[Sample], case: Case) -> StepData:
    return make_sharder(folder, case).shard(_slotted(0, case, samples))


@pytest.mark.parametrize("audio", [Degrees(data=2), Degrees(ulysses=2)], ids=["data", "sequence"])
def test_clips_go_to_ranks_by_their_work(audio: Degrees, folder: str, samples: list[Sample]) -> None:
    data = deal(folder, samples, Case(ONE, ONE, 1, packing=True, audio=audio))
    (ranks,) = data.work["audio"]
    assert [[form.rows for form in rank.forms] for rank in ranks] == [[700], [100, 150, 100, 50, 150, 100, 50]]
    assert [len(rank.pixels) for rank in ranks] == [700, 700]
    assert data.info.dist_ratio["audio"] == 0 and (data.info.clips, data.info.images) == (8, 2)
    assert list(data.info.flops) == ["vision", "audio", "text"] and data.info.flops["audio"] > 0
    tokens = sum(form.tokens for sample in samples for form in sample.clip_forms)
    assert sum(sum(rank.rows) for rank in ranks) == tokens
    kinds = data.work["text"][0][0].tensors["mm_token_type_ids"]
    assert int((kinds == SOUND).sum()) == tokens == len(data.work["text"][0][0].placements["audio"])


def test_rows_go_where_their_placeholders_are(folder: str, samples: list[Sample]) -> None:
    """Two text replicas: each finds the rows of its own clips, in order, among those that it receives."""
    case = Case(ONE, Degrees(data=2), 1, packing=True, audio=Degrees(data=2))
    data = deal(folder, samples, case)
    (ranks,), (route,) = data.work["audio"], data.routes["audio"]
    for replica, work in enumerate(data.work["text"][0]):
        received = []
        for rank in route.sources[replica]:
            rows = iter(ranks[rank].rows)
            own = {target: next(rows) for target in route.targets[rank]}
            before = sum(count for target, count in own.items() if target < replica)
            every = [(form, row) for form in ranks[rank].forms for row in range(form.tokens)]
            received += every[before : before + own[replica]]
        wanted = [
            (form.rows, row)
            for sample in _slotted(0, case, samples).samples[0][replica]
            for form in sample.clip_forms
            for row in range(form.tokens)
        ]
        assert [(received[n][0].rows, received[n][1]) for n in work.placements["audio"]] == wanted


def test_a_rank_without_sound_has_a_dummy(folder: str, samples: list[Sample]) -> None:
    data = deal(folder, samples[2:3], Case(ONE, ONE, 1, audio=Degrees(data=2)))
    (ranks,), (route,) = data.work["audio"], data.routes["audio"]
    dummy = load_family(folder).parts["audio"].dummy_form
    assert [(rank.forms, rank.rows, tuple(rank.pixels.shape)) for rank in ranks] == [((dummy,), (), (8, 16))] * 2
    assert route.pairs == () and data.work["text"][0][0].placements.get("audio") is None
    assert (data.info.clips, data.info.flops["audio"]) == (0, 0)


def test_sound_travels_in_the_parts_format(folder: str, samples: list[Sample]) -> None:
    from dhp.batch.collate import Collator
    from dhp.batch.encoder_shards import Split
    from dhp.batch.shard import BatchSharder

    family, case = load_family(folder), Case(ONE, ONE, 1, audio=ONE)
    dealer = BatchSharder(
        family, Collator(family, 0, True), Division({"vision": Split(), "audio": Split(dtype="bfloat16")})
    )
    work = dealer.shard(_slotted(0, case, samples)).work
    assert work["audio"][0][0].pixels.dtype == torch.bfloat16 and work["vision"][0][0].pixels.dtype == torch.float32


def test_pictures_that_are_there_have_their_places_among_the_others(made_model: str) -> None:
    """Four pictures of four tokens: the features of the first, second and fourth are there, the third is encoded."""
    sample = make_sample([(1, 4, 4)] * 4, 4, 2, 1, 505)
    rows = [torch.full((4, 64), float(n)) for n in range(4)]
    found = [Features(f"key {n}", "grid", None if n == 2 else {"embeddings": rows[n]}) for n in range(4)]
    pixels = tuple(one if n == 2 else one[:0] for n, one in enumerate(sample.pixels))
    data = deal(made_model, [replace(sample, features=tuple(found), pixels=pixels)], Case(ONE, ONE, 1))
    (text,) = data.work["text"][0]
    assert torch.equal(text.cached["embeddings"], torch.cat([rows[0], rows[1], rows[3]]))
    assert text.placements["vision"].tolist() == [*range(4, 12), *range(4), *range(12, 16)]


MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (3, 2)]  # ring × Ulysses


def _held(plan: ShardPlan) -> list[list[tuple[int, int, int]]]:
    return [[(p.segment, p.first, p.count) for p in shard] for of_ring in plan.shards for shard in of_ring]


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_all_over_all_is_the_two_ended_layout(ring: int, ulysses: int) -> None:
    lengths = (1, 30, 3, 17, 2)
    assert grouped_plan(lengths, ring, ulysses, divide_all(lengths, ring, ulysses)) == zigzag_plan(
        lengths, ring, ulysses
    )


def test_one_long_sample_is_shared_and_even_short_ones_are_not() -> None:
    assert choose_groups([1000], 2, 2, 100.0) == SequenceGroups((0,), ((), ()), ((), (), (), ()))
    assert choose_groups([10] * 8, 2, 2, 100.0).of_ranks == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_what_fits_the_ranks_of_a_ring_place_stays_there() -> None:
    assert choose_groups([100, 100], 2, 2, 1e9) == SequenceGroups((), ((0,), (1,)), ((), (), (), ()))


def test_a_long_one_beside_short_ones() -> None:
    groups = choose_groups([1000, *[100] * 16], 4, 1, 1e9)
    assert groups.shared == (0,)
    assert [len(held) for held in groups.of_ranks] == [4, 4, 4, 4]


def test_where_nothing_else_is_even_samples_are_divided() -> None:
    assert choose_groups([10, 7], 2, 1, 1e9).shared == (0, 1)
    # Even in cost would leave one rank with most of the tokens.
    groups = choose_groups([100, *[10] * 20], 2, 1, 100.0)
    tokens = [sum(count for _, _, count in shard) for shard in _held(grouped_plan([100, *[10] * 20], 2, 1, groups))]
    assert max(tokens) <= ROOM * 150


def test_divided_without_need_are_samples_that_one_rank_could_have() -> None:
    """Of 12 tokens over two ranks, six are an even share."""
    for lengths, tokens in (([7, 4, 1], 4), ([6, 4, 2], 12), ([8, 2, 2], 4)):
        assert count_divided(grouped_plan(lengths, 2, 1, divide_all(lengths, 2, 1))) == tokens
    assert count_divided(grouped_plan([6, 4, 2], 2, 1, SequenceGroups((), ((), ()), ((0,), (1, 2))))) == 0


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@pytest.mark.parametrize("crossover", [50.0, 1e9])
def test_every_token_is_somewhere_once_in_order_and_work_is_even(ring: int, ulysses: int, crossover: float) -> None:
    rng = random.Random(ring * 10 + ulysses)
    for _ in range(60):
        lengths = [rng.choice([1, 2, 5, 30, 90, 400]) for _ in range(rng.randint(1, 25))]
        groups = choose_groups(lengths, ring, ulysses, crossover)
        plan = grouped_plan(lengths, ring, ulysses, groups)
        held = _held(plan)
        tokens = sorted((s, t) for shard in held for s, first, count in shard for t in range(first, first + count))
        assert tokens == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
        assert all(shard == sorted(shard) for shard in held)
        costs = [length * (1 + length / crossover) for length in lengths]
        shared = sum(costs[s] for s in groups.shared) / (ring * ulysses)
        in_rings = [sum(costs[s] for s in held) / ulysses for held in groups.of_rings]
        loads = [shared + in_rings[r // ulysses] + sum(costs[s] for s in own) for r, own in enumerate(groups.of_ranks)]
        assert max(loads) <= TOLERANCE * sum(costs) / (ring * ulysses) * (1 + 1e-9)
        assert max(len(shard) and sum(p[2] for p in shard) for shard in held) <= ROOM * sum(lengths) / len(held) + len(
            lengths
        )


def image(replica: int, *windows: int) -> ImageWork:
    """One segment."""
    return ImageWork(replica, windows, (sum(windows),))


def test_the_dearest_goes_first_to_the_least_loaded() -> None:
    assert assign_longest_first([4, 32, 16, 12], 2) == [[1], [0, 2, 3]]
    assert assign_longest_first([], 2) == [[], []]


@pytest.mark.parametrize(
    ("lengths", "shares", "ranges"),
    [
        ([4, 4, 4, 4], [0.5, 0.5], [(0, 2), (2, 4)]),
        ([16, 4, 4], [0.5, 0.5], [(0, 1), (1, 3)]),
        ([4] * 8, [0.25, 0.0, 0.75], [(0, 2), (2, 2), (2, 8)]),
        ([10] * 4, [0.3, 0.7], [(0, 1), (1, 4)]),  # 12 of 40: back to 10
        ([10] * 4, [0.45, 0.55], [(0, 2), (2, 4)]),  # 18 of 40: on to 20
        ([10] * 4, [0.2, 0.2, 0.6], [(0, 1), (1, 2), (2, 4)]),  # 8 and 16: each from the beginning, not from the cut
        ([], [0.5, 0.5], [(0, 0), (0, 0)]),
    ],
)
def test_cut_in_shares(lengths: list[int], shares: list[float], ranges: list[tuple[int, int]]) -> None:
    assert cut_in_shares(lengths, shares) == ranges


@pytest.mark.parametrize(
    ("loads", "amount", "extra"),
    [([0, 0], 10, [5, 5]), ([4, 0], 10, [3, 7]), ([20, 0, 2], 4, [0, 3, 1]), ([5, 5], 0, [0, 0])],
)
def test_fill_to_level(loads: list[float], amount: float, extra: list[float]) -> None:
    assert fill_to_level(loads, amount) == pytest.approx(extra)


def test_images_that_balance_are_not_divided() -> None:
    images = [image(0, 16, 16), image(0, 16), image(0, 16)]
    assert shard_images(images, 1, 2) == [[(Piece(0, 0, 2),), (Piece(1, 0, 1), Piece(2, 0, 1))]]


def test_only_what_is_too_large_is_divided_into_the_room_that_is_left() -> None:
    images = [image(0, *[16] * 8), image(0, 16), image(0, 16), image(0, 16)]
    first, second = shard_images(images, 1, 2)[0]
    loads = [sum(16 * (p.last - p.first) for p in pieces) for pieces in (first, second)]
    assert sorted(loads) == [80, 96]
    assert {p.image for pieces in (first, second) for p in pieces if p.last - p.first == 1 and p.image} == {1, 2, 3}


def test_a_rank_without_work_has_no_pieces() -> None:
    assert shard_images([image(0, 4)], 2, 2) == [[(Piece(0, 0, 1),), ()], [(), ()]]


def test_frames_of_a_video_are_dealt_out_one_by_one() -> None:
    video = ImageWork(0, (16, 16, 8, 16, 16, 8), (40, 40))
    assert shard_images([video], 1, 2) == [[(Piece(0, 0, 3),), (Piece(0, 3, 6),)]]


def test_what_is_a_little_more_than_an_even_share_is_not_divided() -> None:
    """Within 5% of 100: 104 and 96 stay whole; 112 and 88 do not."""
    assert shard_images([image(0, *[8] * 13), image(0, *[8] * 12)], 1, 2) == [[(Piece(0, 0, 13),), (Piece(1, 0, 12),)]]
    first, second = shard_images([image(0, *[8] * 14), image(0, *[8] * 11)], 1, 2)[0]
    assert sorted(len({p.image for p in pieces}) for pieces in (first, second)) == [1, 2]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_frame_of_one_window_stays_whole_however_large_it_is(place: int) -> None:
    lengths = [16, 16, 16]
    lengths.insert(place, 64)
    shards = shard_images([ImageWork(0, tuple(lengths), tuple(lengths))], 1, 2)
    loads = [sum(sum(lengths[p.first : p.last]) for p in pieces) for pieces in shards[0]]
    assert loads == [64, 48] and Piece(0, place, place + 1) in shards[0][0]


def test_images_of_several_windows_are_divided_before_a_larger_one_of_one_window() -> None:
    images = [ImageWork(0, (40,), (40,)), *[ImageWork(0, (16, 16), (32,))] * 2]
    (shards,) = shard_images(images, 1, 2)
    loads = [sum(sum(images[p.image].window_lengths[p.first : p.last]) for p in pieces) for pieces in shards]
    assert sorted(loads) == [48, 56]


def test_pieces_of_a_text_replica_lie_together() -> None:
    images = [image(1, 4), image(0, 16), image(1, 8)]
    assert [p.image for p in shard_images(images, 1, 1)[0][0]] == [1, 0, 2]


def test_full_attention_makes_one_large_image_dearer_than_many_small_ones() -> None:
    large, small = [image(0, *[64] * 16)], [image(0, 64) for _ in range(16)]
    crossover = 512.0
    first, second = (set(p.image for p in shard[0]) for shard in shard_images(large + small, 2, 1, crossover))
    assert segment_cost(1024, crossover) == 3 * 1024
    # 3072 against 16 × 72: the large one alone, without any of the small ones.
    assert {frozenset(first), frozenset(second)} == {frozenset({0}), frozenset(range(1, 17))}


def _covered(images: list[ImageWork], shards: list[list[Pieces]]) -> list[tuple[int, int]]:
    return sorted((p.image, w) for r in shards for pieces in r for p in pieces for w in range(p.first, p.last))


@pytest.mark.parametrize("crossover", [float("inf"), 100.0])
def test_every_window_goes_somewhere_once_and_loads_are_even(crossover: float) -> None:
    rng = random.Random(0)
    for _ in range(300):
        images = [
            image(rng.randint(0, 1), *(rng.choice([4, 8, 16, 64]) for _ in range(rng.randint(1, 40))))
            for _ in range(rng.randint(0, 8))
        ]
        ranks = rng.randint(1, 4)
        shards = shard_images(images, 1, ranks, crossover)
        every = [(i, w) for i, one in enumerate(images) for w in range(len(one.window_lengths))]
        assert _covered(images, shards) == every
        for pieces in shards[0]:
            assert [images[p.image].replica for p in pieces] == sorted(images[p.image].replica for p in pieces)
        if crossover == float("inf"):
            loads = [sum(sum(images[p.image].window_lengths[p.first : p.last]) for p in s) for s in shards[0]]
            # Within the tolerance, or within what a cut between two windows may miss at both ends.
            assert max(loads) <= max(TOLERANCE * sum(loads) / ranks, sum(loads) / ranks + 64)


def test_frames_that_follow_each_other_stay_together() -> None:
    video = image(0, *[64] * 12)
    shards = shard_images([ImageWork(0, video.window_lengths, (64,) * 12)], 1, 3)
    assert shards[0] == [(Piece(0, 0, 4),), (Piece(0, 4, 8),), (Piece(0, 8, 12),)]


def test_runs_keep_the_kinds_of_each_bin() -> None:
    assert in_runs([[0, 3], [1, 4], [2, 5]], "aaabbb") == [[0, 3], [1, 4], [2, 5]]
    assert in_runs([[0, 3], [1, 4], [2, 5]], "aaaaaa") == [[0, 1], [2, 3], [4, 5]]


PAIR = ((0, 1), (1, 0))  # two replicas of each part, on a device each


def loads_of(costs: list[float], assigned: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in own) for own in assigned]


def test_even_images_stay_at_home() -> None:
    costs, replicas = [4.0, 4.0, 2.0, 2.0], [0, 1, 0, 1]
    even = assign_longest_first(costs, 2)
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 2], [1, 3]]


def test_a_replica_without_images_takes_some_of_the_other_s() -> None:
    costs, replicas = [4.0, 3.0, 3.0, 2.0], [0, 0, 0, 0]
    found = assign_near(costs, replicas, assign_longest_first(costs, 2), Locality(PAIR, 0.0))
    assert loads_of(costs, found) == [6.0, 6.0]


def test_slack_keeps_more_at_home() -> None:
    costs, replicas = [5.0, 5.0, 1.0, 10.0], [0, 0, 0, 1]
    even = assign_longest_first(costs, 2)
    assert loads_of(costs, even) == [11.0, 10.0]
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 1, 2], [3]]
    costs = [5.0, 5.0, 1.0, 9.0]
    even = assign_longest_first(costs, 2)
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 1], [2, 3]]
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.1)) == [[0, 1, 2], [3]]


def test_of_images_that_end_the_excess_the_smallest_leaves() -> None:
    assert assign_near([6.0, 4.0, 3.0], [0] * 3, [[0, 1], [2]], Locality(PAIR, 0.0)) == [[0, 1], [2]]


def test_what_must_leave_goes_to_the_same_node_first() -> None:
    distances = ((0, 1, 2), (1, 0, 2), (2, 2, 0))
    found = assign_near([1.0] * 4, [0] * 4, [[0, 1], [2], [3]], Locality(distances, 0.0))
    assert [len(own) for own in found] == [2, 2, 0]


@pytest.mark.parametrize("slack", [0.0, 0.01, 0.05])
@pytest.mark.parametrize(("vision", "text", "images"), [(2, 2, 7), (8, 8, 60), (16, 2, 40), (3, 5, 20), (6, 4, 0)])
def test_every_image_goes_somewhere_once_and_nobody_has_more_than_the_slack(
    vision: int, text: int, images: int, slack: float
) -> None:
    rng = np.random.default_rng(vision * text)
    distances = tuple(tuple(int(v * text // vision != d) for v in range(vision)) for d in range(text))
    for _ in range(20):
        costs, replicas = rng.lognormal(7, 1, images).tolist(), rng.integers(0, text, images).tolist()
        even = assign_longest_first(costs, vision)
        found = assign_near(costs, replicas, even, Locality(distances, slack))
        assert sorted(i for own in found for i in own) == list(range(images))
        most = max(loads_of(costs, even), default=0.0)
        assert max(loads_of(costs, found), default=0.0) <= (1 + slack) * most + 1e-6
        again = assign_near(costs, replicas, even, Locality(distances, slack))
        assert found == again


def test_pieces_follow() -> None:
    images = [ImageWork(replica, (4, 4), (8,)) for replica in (1, 0, 1, 0)]
    pieces = shard_images(images, 2, 1, locality=Locality(PAIR, 0.01))
    assert [[p.image for p in of_rank] for of_replica in pieces for of_rank in of_replica] == [[1, 3], [0, 2]]


NONE = torch.zeros(0)


def vision(segments: tuple[int, ...], shards: Any = (), rows: tuple[int, ...] = (1,)) -> VisionInput:
    return VisionInput(NONE, NONE, (), segments, shards, rows)


def text(count: int, length: int, lengths: tuple[int, ...] | None = None) -> TextInput:
    return TextInput({"input_ids": torch.zeros(count, length)}, lengths, {}, 1.0)


def row(*targets: int) -> Any:
    return [SimpleNamespace(target_tokens=count) for count in targets]


def test_an_encoder_counts_patches_and_what_attention_adds() -> None:
    inputs = [[vision((4, 8)), vision((12,))], [vision((4,), rows=(0,)), vision((4,))]]
    assert encoder_work(inputs, 1, math.inf) == (12.0, 16.0)  # a dummy window is no work
    assert encoder_work(inputs, 1, 4.0) == (4 * 2 + 8 * 3, 12 * 4 + 4 * 2)
    shards = (((0, 0, 4), (1, 0, 2)), ((1, 2, 6),))  # (segment, first patch, patches) of each of two ranks
    shared = [[vision((4, 8), shards), vision((4, 8), shards)]]
    assert encoder_work(shared, 2, 4.0) == (4 * 2 + 2 * 3, 6 * 3)
    assert encoder_work([], 1, 4.0) == ()


def test_the_decoder_counts_padding_pairs_and_targets() -> None:
    work = TextWork(token=10, pair=2, target=100)
    padded = [[text(2, 4), text(1, 6)]]
    rows = [[row(1, 2), row(0)]]
    assert text_work(padded, rows, 1, work) == (80 + 2 * 16 + 300, 60 + 36)
    packed = [[text(1, 4, (3, 5)), text(1, 4, (3, 5))]]  # two ranks share a row of 8 tokens
    assert text_work(packed, [[row(1, 2)]], 2, work) == (40 + 17 + 150,) * 2
    assert text_work([], [], 1, work) == ()


@pytest.mark.parametrize("case", [Case(Degrees(data=2), Degrees(data=2), 1), Case(Degrees(ulysses=2), Degrees(), 1)])
def test_a_step_says_it_for_all_shards(four_layers_model: str, case: Case) -> None:
    info = make_reader(four_layers_model, case, awkward_steps()).step(0).info
    assert {part: len(of) for part, of in info.work.items()} == {"vision": 2, "text": case.text.shards}
    assert all(share >= 0 for of in info.work.values() for share in of) and sum(info.work["text"]) > 0
