"""Training with no features on disk, with some and with all is the same training: losses, norms, gradients, weights."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.core.axes import Degrees
from dhp.core.batch import Features, KeepSettings, PictureRows, RowRun, StepData
from dhp.data.sample.sample import Sample
from dhp.engine.encoder_engine import FeatureKeeper
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_image
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rows import slow_but
from tests.helpers.tiny import make_sample

ONE, FROZEN = Degrees(), ("vision", "projector")
STEPS = [mixed_step, step_without_image, step_with_one_window]
Look = Callable[[Features], Features | None]


@dataclass(frozen=True)
class Outcome:
    """What a run did: losses and norms by step, gradients of every rank of the last one, infos; notes of all ranks."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    data: list[StepData]
    notes: list[str]


def keyed(sample: Sample, look: Look) -> Sample:
    """As a reader makes it: with the features that `look` has of its pictures, else with their keys."""
    found, pixels = [], []
    for rows, grid in zip(sample.pixels, sample.grids, strict=True):
        own = Features(hashlib.sha256(rows.tobytes()).hexdigest(), str(grid))
        kept = look(own)
        found.append(kept or own)
        pixels.append(rows if kept is None else rows[:0])
    return replace(sample, pixels=tuple(pixels), features=tuple(found))


def run(
    model: str, case: Case, steps: list[list[Sample]], folder: Path | None, room: int | None = None, **changes: Any
) -> Outcome:
    """Train the steps, in which samples are as they are. folder: where features are kept."""
    keep = None if folder is None else KeepSettings(str(folder), room)
    feed, losses, norms, data, notes = make_reader(model, case, steps), [], [], [], []
    own = lambda spec: keep if spec.part == "vision" else None
    with Running(model, case, features=own, **changes) as running:
        for number in range(len(steps)):
            data.append(feed.step(number))
            batch = running.accumulate(data[-1])
            gradients = [of_rank for group in running.groups.values() for of_rank in group.execute_all("gradients")]
            loss, reports = running.update(batch)
            losses.append(loss)
            norms.append(next(iter(reports.values()))[0].grad_norm)
            notes += [note for of in reports.values() for report in of for note in report.notes]
    return Outcome(losses, norms, gradients, data, notes)


def none(_: Features) -> None:
    """Nothing is kept."""


def every_other(folder: Path) -> Look:
    return lambda own: FeatureFolder(folder).load(own.key) if int(own.key, 16) % 2 else None


def load_all(folder: Path) -> Look:
    def look(own: Features) -> Features:
        found = FeatureFolder(folder).load(own.key)
        assert found is not None and found.about == own.about
        return found

    return look


def prepared(steps: list[list[Sample]], look: Look) -> list[list[Sample]]:
    return [[keyed(sample, look) for sample in samples] for samples in steps]


def assert_same(found: Outcome, wanted: Outcome, tolerance: float = 0.0) -> None:
    """To the bit, or but for the rounding of products whose factors have other shapes."""
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance, abs=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance, abs=tolerance)
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=tolerance, atol=tolerance)


PLAIN = Case(ONE, ONE, 2, frozen=FROZEN)
CASES = [
    Case(Degrees(data=2), Degrees(data=2), 2, packing=True, frozen=FROZEN),
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, frozen=FROZEN, schedule="vision_ahead"),
    Case(Degrees(ring=2, ulysses=2), ONE, 1, packing=True, frozen=FROZEN),
    Case(Degrees(tensor=2), Degrees(data=2), 1, frozen=FROZEN, text_zero_stage=3, fsdp=True),
    Case(Degrees(data=2), Degrees(ring=2), 2, packing=True, frozen=FROZEN),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0]), ids=str)
def test_training_does_not_change(case: Case, made_model: str, tmp_path: Path) -> None:
    steps = [make() for make in STEPS]
    plain = run(made_model, case, steps, None)
    cold = run(made_model, case, prepared(steps, none), tmp_path)
    assert_same(cold, plain)
    assert [data.info.cached_images for data in cold.data] == [0, 0, 0]
    half = prepared(steps[:1], every_other(tmp_path)) + prepared(steps[1:], load_all(tmp_path))
    found = run(made_model, case, half, None)
    assert_same(found, plain, 1e-9)
    assert 0 < found.data[0].info.cached_images < found.data[0].info.images == 4


def test_a_step_of_kept_pictures_leaves_the_tower_alone(made_model: str, tmp_path: Path) -> None:
    steps = [make() for make in STEPS]
    plain = run(made_model, PLAIN, steps, None)
    run(made_model, PLAIN, prepared(steps, none), tmp_path)
    warm = run(made_model, PLAIN, prepared(steps, load_all(tmp_path)), tmp_path)
    assert_same(warm, plain, 1e-9)
    for found, wanted in zip(warm.data, plain.data, strict=True):
        assert found.info.cached_images == found.info.images == wanted.info.images
        assert found.info.vision_tokens == wanted.info.vision_tokens
        assert found.info.flops["vision"] == 0
        assert all(route.pairs == () for route in found.routes["vision"])  # an encoder without pictures stands still


def test_one_rank_without_company_gives_the_same_bits(made_model: str, tmp_path: Path) -> None:
    """Where a picture is alone with its rank, cold or warm, in the format of the part."""
    case = Case(ONE, ONE, 2, "bfloat16", frozen=FROZEN)
    steps = [mixed_step()[:2]]
    plain = run(made_model, case, steps, None)
    assert_same(run(made_model, case, prepared(steps, none), tmp_path), plain)
    kept = FeatureFolder(tmp_path)
    warm = prepared(steps, load_all(tmp_path))
    assert {rows.dtype for one in warm[0][0].features for rows in kept.load(one.key).tensors.values()} == {
        torch.bfloat16
    }
    assert_same(run(made_model, case, warm, None), plain)


STAGED = Case(Degrees(ulysses=2), ONE, 2, stages=2, schedule="1f1b", frozen=FROZEN, packing=True)


@pytest.mark.slow
def test_features_that_enter_several_layers(qwen3_vl_model: str, tmp_path: Path) -> None:
    """Qwen3-VL's tower hands over four tensors, which enter the decoder at two of its stages."""
    steps = [[make_sample([(1, 4, 6), (1, 8, 8)], 5, 3, 7, 505), make_sample([(1, 4, 4)], 6, 4, 8, 505)]]
    plain = run(qwen3_vl_model, STAGED, steps, None)
    assert_same(run(qwen3_vl_model, STAGED, prepared(steps, none), tmp_path), plain)
    warm = prepared(steps, load_all(tmp_path))
    assert len(warm[0][0].features[0].tensors) == 4
    assert_same(run(qwen3_vl_model, STAGED, warm, None), plain, 1e-9)


def test_a_picture_that_ranks_share_is_kept_whole(made_model: str, tmp_path: Path) -> None:
    """Four ranks divide pictures by their windows; what is kept is what one rank alone would keep."""
    steps = [[make_sample([(1, 20, 20), (1, 18, 18), (1, 16, 20)], 4, 2, 1, 505)]]
    one, four = (Case(vision, ONE, 1, frozen=FROZEN) for vision in (ONE, Degrees(ring=2, ulysses=2)))
    ready = prepared(steps, none)
    shared = run(made_model, four, ready, tmp_path / "four")
    pictures = shared.data[0].work["vision"][0][0].to_keep
    assert sum(len({piece.rank for piece in picture.runs}) > 1 for picture in pictures) == 3
    run(made_model, one, ready, tmp_path / "one")
    for features in ready[0][0].features:
        ours, theirs = (FeatureFolder(tmp_path / name).load(features.key) for name in ("four", "one"))
        assert ours.about == theirs.about == features.about
        torch.testing.assert_close(ours.tensors["embeddings"], theirs.tensors["embeddings"], rtol=1e-9, atol=1e-12)


SIZES = {"a" * 64: 2, "b" * 64: 3, "c" * 64: 5}  # rows of each picture, by its key


def _keep_every_other_row(folder: str) -> None:
    """Of each picture, the first rank has the even rows and the second the odd ones, picture behind picture."""
    places = [{key: torch.arange(rank, size, 2) for key, size in SIZES.items()} for rank in (0, 1)]
    firsts: list[dict[str, int]] = [{}, {}]
    for of_rank, begun in zip(places, firsts, strict=True):
        begun |= {key: sum(map(len, list(of_rank.values())[:at])) for at, key in enumerate(SIZES)}
    runs = {key: tuple(RowRun(rank, firsts[rank][key], places[rank][key]) for rank in (0, 1)) for key in SIZES}
    own = torch.cat([10.0 * number + rows for number, rows in enumerate(places[dist.get_rank()].values())])
    pictures = [PictureRows(key, "a picture", of_picture) for key, of_picture in runs.items()]
    FeatureKeeper(KeepSettings(folder), dist.group.WORLD).keep(pictures, {"embeddings": own[:, None]})


def test_of_several_pictures_that_the_same_ranks_share_each_has_its_own_rows(tmp_path: Path) -> None:
    run_on_ranks(_keep_every_other_row, 2, str(tmp_path))
    for number, (key, size) in enumerate(SIZES.items()):
        rows = FeatureFolder(tmp_path).load(key).tensors["embeddings"][:, 0]
        assert rows.tolist() == [10 * number + row for row in range(size)]


def test_another_pictures_features_would_show(made_model: str, tmp_path: Path) -> None:
    """Negative control: of one picture alone, the rows in another order."""
    steps, case = [mixed_step()], PLAIN
    plain = run(made_model, case, steps, None)
    run(made_model, case, prepared(steps, none), tmp_path)
    look = load_all(tmp_path)

    def mixed_up(own: Features) -> Features:
        found = look(own)
        wrong = own.key == max(one.key for sample in prepared(steps, none)[0] for one in sample.features)
        return replace(found, tensors={n: rows.flip(0) for n, rows in found.tensors.items()}) if wrong else found

    found = run(made_model, case, prepared(steps, mixed_up), None)
    assert found.losses != pytest.approx(plain.losses, rel=1e-6)


def test_what_is_there_is_dealt_to_nobody(made_model: str, tmp_path: Path) -> None:
    """New pictures are even over ranks, whatever lies between them."""
    sample = make_sample([(1, 8, 8)] * 4, 4, 2, 1, 505)
    rows = {"embeddings": torch.rand(16, 64)}
    kept = iter([None, rows, rows, None])
    samples = [keyed(sample, lambda own: (lambda found: found and replace(own, tensors=found))(next(kept)))]
    data = make_reader(made_model, Case(Degrees(data=2), ONE, 1), [samples]).step(0)
    assert [len(work.pixels) for work in data.work["vision"][0]] == [64, 64]
    assert [[picture.key for picture in work.to_keep] for work in data.work["vision"][0]] == [
        [samples[0].features[0].key], [samples[0].features[3].key],
    ]  # fmt: skip
    (text,) = data.work["text"][0]
    assert torch.equal(text.cached["embeddings"], torch.cat([rows["embeddings"]] * 2))
    firsts = text.placements["vision"][
        ::16
    ].tolist()  # of the 1st and 4th picture from the ranks, of the others behind them
    assert firsts[1:3] == [32, 48] and sorted((firsts[0] // 16, firsts[3] // 16)) == [0, 1]
    assert (data.info.cached_images, data.info.images, data.info.vision_tokens) == (2, 4, 256)
    assert data.info.dist_ratio["vision"] == 0
    whole = make_reader(made_model, Case(Degrees(data=2), ONE, 1), [[sample]]).step(0).info
    assert data.info.flops == {**whole.flops, "vision": whole.flops["vision"] // 2}  # for mfu: what is encoded


def test_no_more_is_written_than_there_is_room_for(made_model: str, tmp_path: Path) -> None:
    steps, case = [mixed_step(), mixed_step()], Case(Degrees(data=2), ONE, 2, frozen=FROZEN)
    ready = prepared(steps, none)
    room = 9000  # bytes a rank: 64 numbers of 8 bytes a token, of pictures of 4 to 35 tokens
    found = run(made_model, case, ready, tmp_path, room)
    written = sum(len(path.read_bytes()) for path in tmp_path.rglob("*.safetensors"))
    assert 0 < written <= 2 * room
    assert len(found.notes) in (1, 2) and set(found.notes) == {found.notes[0]}  # once a rank
    assert "no room left within data.cache_features_gib" in found.notes[0]
    assert_same(found, run(made_model, case, steps, None))


def test_a_picture_that_is_written_again_takes_no_more_room(made_model: str, tmp_path: Path) -> None:
    steps = prepared([[make_sample([(1, 8, 8)], 4, 2, 1, 505)]] * 2, none)  # the second had looked before the first
    run(made_model, PLAIN, steps[:1], tmp_path / "measured")
    (file,) = (tmp_path / "measured").rglob("*.safetensors")
    found = run(made_model, PLAIN, steps, tmp_path / "kept", room=file.stat().st_size * 3 // 2)
    assert found.notes == [] and len(list((tmp_path / "kept").rglob("*.safetensors"))) == 1


def test_a_folder_that_cannot_be_written_ends_the_step(made_model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot be kept in"):
        run(made_model, PLAIN, prepared([mixed_step()], none), tmp_path / "file")


def test_weights_of_a_checkpoint_must_be_the_models(made_model: str, few_keys_model: str, tmp_path: Path) -> None:
    case, changes = PLAIN, {"resume_from": lambda spec: str(tmp_path / spec.part)}
    with Running(made_model, replace(case, frozen=("vision",))) as running:  # which trains the projector
        running.step(make_reader(made_model, case, [mixed_step()]).step(0))
        running.save(tmp_path)
    run(made_model, case, [mixed_step()], None, **changes)
    with pytest.raises(RuntimeError, match=r"has another model\.visual\.merger.*Resume without data\.cache_features"):
        run(made_model, case, [mixed_step()], tmp_path / "features", **changes)
