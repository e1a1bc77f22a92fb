"""Clips are dealt out as pictures are: by work, each to one rank, their rows to who needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import SOUND, Features, StepData
from dhp.data.sample.sample import Sample
from dhp.models.registry import load_family
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, _slotted, make_sharder
from tests.helpers.tiny import make_sample
from tests.helpers.tiny_families import save_family

ONE = Degrees()


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
    dealer = BatchSharder(family, Collator(family, 0, True), {"vision": Split(), "audio": Split(dtype="bfloat16")})
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
