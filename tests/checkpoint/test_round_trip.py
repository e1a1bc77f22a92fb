"""Saved after two steps and continued: the same bits."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp.checkpoint.shard_reader import read_shards
from dhp.checkpoint.shard_writer import BackgroundWriter, ShardWriter, run_write
from dhp.core.axes import Degrees
from dhp.core.errors import CheckpointError
from dhp.core.parameters import AdapterSettings
from dhp.core.reports import SavedShare
from dhp.core.torch_private import persistent_buffers
from dhp.models.contract.double import staying_double
from dhp.models.export import save_whole
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_image
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Running, Trained, make_reader
from tests.helpers.rows import slow_but
from tests.helpers.tiny_families import FAMILIES, save_family

# The second leaves the vision part as it is, so that its optimizer has taken fewer steps than the run.
STEPS = [mixed_step(), step_without_image(), step_with_one_window(), mixed_step()]
CASES = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    Case(Degrees(data=2), Degrees(data=2), dtype="float32"),
    Case(Degrees(ulysses=2), Degrees(data=2), dtype="float32", zero_stage=2, text_zero_stage=3),
    Case(Degrees(data=3), Degrees(data=2), dtype="bfloat16", zero_stage=3, text_zero_stage=1),
    Case(Degrees(data=2), Degrees(data=2), dtype="bfloat16", zero_stage=1, text_zero_stage=2),
    Case(Degrees(), Degrees(data=2, tensor=2), dtype="bfloat16", autotp=True),
    Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "bfloat16", 2, text_zero_stage=3, fsdp=True),
    Case(Degrees(data=3), Degrees(data=3, tensor=2), 2, "float32", 3, text_zero_stage=2, fsdp=True),
    Case(Degrees(), Degrees(data=2, tensor=2), 2, "bfloat16", schedule="1f1b", stages=2),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 2, text_zero_stage=3, fsdp=True, schedule="1f1b", stages=2),
    Case(Degrees(ulysses=2), Degrees(ring=2, ulysses=2), 2, "bfloat16", zero_stage=1, text_zero_stage=2),
    Case(Degrees(data=2), Degrees(), 2, "float32", frozen=("vision",)),
    Case(Degrees(), Degrees(data=2), 2, "float32", frozen=("vision", "projector"), schedule="1f1b", stages=2),
]
LORA = (("vision", AdapterSettings(2, 4.0)), ("text", AdapterSettings(3, 3.0)))
CASES += [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, "bfloat16", zero_stage=1, lora=LORA, trainable=("projector",)),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, text_zero_stage=3, fsdp=True, lora=LORA),
]
QUICK = [CASES[at] for at in (0, 1, 12)]  # those of three ranks, sequences, FSDP2, AutoTP and adapters are slow
UNDISTURBED = [CASES[1], CASES[3], CASES[6]]  # of each engine one in which saving is held against never having saved
MOMENTS = ("exp_avg", "exp_avg_sq")


def train(
    model: str, case: Case, steps: Iterable[int], save: Path, resume: Path | None = None, early: Path | None = None
) -> Trained:
    """Losses of the steps and the weights after them; everything saved to `save`, begun from `resume`. early: where to
    save before the third step, in passing."""
    feed, losses = make_reader(model, case, STEPS), []
    begin = lambda stage: resume and str(resume / stage.part)
    with Running(model, case, resume_from=begin) as running:
        for k in steps:
            if early is not None and k == 2:
                running.save(early)
            loss, _ = running.step(feed.step(k))
            losses.append(loss)
        running.save(save)
        return Trained(losses, [], [], running.weights())


def assert_same_tensors(folder: Path, other: Path) -> None:
    mine, theirs = read_shards(folder), read_shards(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def assert_same_end(folder: Path, mine: tuple[str, Trained], theirs: tuple[str, Trained]) -> None:
    for of_rank, wanted in zip(sum(mine[1].weights, []), sum(theirs[1].weights, []), strict=True):
        assert of_rank.keys() == wanted.keys()
        assert not [name for name in of_rank if not torch.equal(of_rank[name], wanted[name])]
    for part, kind in product(("vision", "text"), (".", "optimizer")):
        assert_same_tensors(folder / mine[0] / part / kind, folder / theirs[0] / part / kind)


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK), ids=str)
def test_two_steps_and_two_more_are_four(case: Case, made_model: str, tmp_path: Path) -> None:
    whole = train(made_model, case, range(4), tmp_path / "whole", early=tmp_path / "first")
    rest = train(made_model, case, range(2, 4), tmp_path / "rest", resume=tmp_path / "first")
    assert rest.losses == whole.losses[2:]
    assert_same_end(tmp_path, ("rest", rest), ("whole", whole))
    if case in UNDISTURBED:
        plain = train(made_model, case, range(4), tmp_path / "plain")
        assert plain.losses == whole.losses
        assert_same_end(tmp_path, ("plain", plain), ("whole", whole))
    steps = [read_shards(tmp_path / "rest" / part / "optimizer")["step"] for part in ("vision", "text")]
    assert steps == [0.0 if "projector" in case.frozen else 3.0, 4.0]


FSDP = [
    Case(Degrees(data=data, tensor=tensor), Degrees(data=data, tensor=tensor), 1, dtype, stage, text_zero_stage=stage,
         schedule=schedule, fsdp=True)
    for data, tensor, stage, dtype, schedule in product(
        (2, 3), (1, 2), (2, 3), ("float32", "bfloat16"), ("sequential", "vision_ahead")
    )
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("case", FSDP, ids=str)
def test_two_steps_and_two_more_are_four_however_torch_cuts(case: Case, made_model: str, tmp_path: Path) -> None:
    test_two_steps_and_two_more_are_four(case, made_model, tmp_path)


SHARED = [
    Case(Degrees(ulysses=2), Degrees(ulysses=ulysses, ring=ring, tensor=tensor), 2, dtype, stages=stages,
         sequence_groups="auto" if ring == 1 else "one")
    for (ulysses, ring, dtype), tensor, stages in product(
        (
            *((1, 1, "float32"), (2, 1, "float32"), (1, 2, "bfloat16"), (2, 2, "float32"), (4, 1, "bfloat16")),
            *((1, 4, "float32"), (3, 1, "float32")),
        ),
        (1, 2),
        (1, 2),
    )
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_two_steps_and_two_more_are_four_where_ranks_share_rows(
    case: Case, attending_model: str, tmp_path: Path
) -> None:
    test_two_steps_and_two_more_are_four(case, attending_model, tmp_path)


VISION = {"none": Degrees(), "data": Degrees(data=2), "sequence": Degrees(ulysses=2)}
PIPELINES = [
    pytest.param(
        Case(VISION[vision], Degrees(data=data, tensor=tensor), micro, stages=stages, schedule="1f1b"),
        id=f"{stages}-tensor{tensor}-data{data}-{vision}-{micro}",
    )
    for stages, tensor, data, vision, micro in product((2, 4), (1, 2), (1, 2), VISION, (1, 4))
]
FEW = [Case(Degrees(ulysses=2), Degrees(tensor=2), 2, stages=2, schedule="1f1b")]


def assert_written_alike(folder: Path, other: Path) -> None:
    """The same names, which is what an export writes, and the same values but for the order of sums."""
    for kind in ("vision", "text", "vision/optimizer", "text/optimizer"):
        mine, theirs = read_shards(folder / kind), read_shards(other / kind)
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            torch.testing.assert_close(mine[name], values, rtol=1e-6, atol=1e-12, msg=f"{kind}: {name}")


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.slow
def test_a_pipeline_goes_on_and_writes_what_one_process_does(case: Case, tied_model: str, tmp_path: Path) -> None:
    """Its embedding is its head, which the first stage writes and both read."""
    test_two_steps_and_two_more_are_four(case, tied_model, tmp_path)
    train(tied_model, Case(Degrees(), Degrees(), case.micro_batches), range(4), tmp_path / "one")
    assert_written_alike(tmp_path / "whole", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_pipeline_goes_on_under_other_cuts(case: Case, tied_model: str, tmp_path: Path) -> None:
    """As where `text.partition` chooses others: each stage reads what it holds by name, whoever wrote it."""
    one, other = replace(case, cuts=(1,)), replace(case, cuts=(3,))
    whole = train(tied_model, one, range(4), tmp_path / "whole", early=tmp_path / "first")
    rest = train(tied_model, other, range(2, 4), tmp_path / "rest", resume=tmp_path / "first")
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)
    assert_written_alike(tmp_path / "rest", tmp_path / "whole")


@pytest.mark.grid
@pytest.mark.parametrize("case", PIPELINES)
def test_every_pipeline_goes_on_and_writes_what_one_process_does(case: Case, tied_model: str, tmp_path: Path) -> None:
    test_a_pipeline_goes_on_and_writes_what_one_process_does(case, tied_model, tmp_path)


def test_the_state_of_any_layout_is_one_set_of_named_tensors(made_model: str, tmp_path: Path) -> None:
    """ZeRO's flat ranges and tensor slices put together have each parameter's moments in its own shape."""
    train(made_model, CASES[0], range(1), tmp_path)
    for part, kinds in (("vision", ("master", *MOMENTS)), ("text", MOMENTS)):
        weights, state = read_shards(tmp_path / part), read_shards(tmp_path / part / "optimizer")
        assert set(state) == {"step"} | {f"{name}.{kind}" for name in weights for kind in kinds}
        for name, weight in weights.items():
            assert all(state[f"{name}.{kind}"].shape == weight.shape for kind in kinds)
            assert "master" not in kinds or torch.equal(state[f"{name}.master"], weight)
        assert all(bool((state[name] >= 0).all()) for name in state if name.endswith("exp_avg_sq"))


def test_what_fsdp_writes_is_what_replicas_write(made_model: str, tmp_path: Path) -> None:
    """Blocks of tensor slices, fused ones among them, put together: the tensors that one process has."""
    layouts = (Case(Degrees(), Degrees(), dtype="float64"), replace(CASES[6], dtype="float64"))
    for case, name in zip(layouts, ("plain", "fsdp"), strict=True):
        train(made_model, case, range(2), tmp_path / name)
    assert_written_alike(tmp_path / "fsdp", tmp_path / "plain")


def test_another_models_checkpoint_is_refused(made_model: str, few_keys_model: str, tmp_path: Path) -> None:
    case = Case(Degrees(), Degrees(), dtype="float32")
    train(made_model, case, [], tmp_path)
    with pytest.raises(RuntimeError, match=rf"{CheckpointError.__name__}: .*the checkpoint is of another model"):
        train(few_keys_model, case, [], tmp_path / "other", resume=tmp_path)


def test_copies_are_of_the_moment_and_their_memory_is_kept(tmp_path: Path) -> None:
    writer, weight, gate = BackgroundWriter(), torch.arange(4.0), threading.Event()
    memory: list[dict[str, int]] = []
    assert writer.take(wait=True) is None
    for number in range(2):
        weight.fill_(number)
        shards = ShardWriter(tmp_path / str(number) / "text", 0, keep=writer.keep)
        shards.add("weight", weight)
        shards.add_flat("many", weight[:2], 0, (4,))
        shards.add_flat("many", weight[2:] + 1, 2, (4,))  # of one tensor two pieces
        gate.clear()
        writer.begin(lambda shards=shards: (gate.wait(), shards.write())[1])
        assert writer.take(wait=False) == SavedShare(done=False)
        weight.fill_(7)
        with pytest.raises(RuntimeError, match="is being written already"):
            writer.begin(tuple)
        gate.set()
        saved = writer.take(wait=True)
        assert (
            saved is not None and saved.done and [file.name for file in saved.files][:1] == ["rank_00000.safetensors"]
        )
        assert writer.take(wait=False) == saved
        found = read_shards(tmp_path / str(number) / "text")
        assert found["weight"].tolist() == [number] * 4 and found["many"].tolist() == [number] * 2 + [number + 1] * 2
        memory.append({key: buffer.data_ptr() for key, buffer in writer._buffers.items()})
    assert memory[0] == memory[1]
    assert writer.nbytes == 2 * 16
    writer.keep("other", weight)
    writer.begin(tuple)
    assert writer.nbytes == 16  # what was not kept again is gone


def test_what_cannot_be_written_is_an_answer_not_an_end(tmp_path: Path) -> None:
    def refuse() -> tuple[()]:
        raise CheckpointError("the disk is full")

    writer = BackgroundWriter()
    writer.begin(refuse)
    assert writer.take(wait=True) == SavedShare(done=True, error="the disk is full") == run_write(refuse)
    writer.begin(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is no full disk
        writer.take(wait=True)


BEHIND_STEPS = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="bfloat16", zero_stage=1),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, text_zero_stage=3),
    Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "bfloat16", 2, text_zero_stage=3, fsdp=True),
]


@pytest.mark.parametrize("case", slow_but(BEHIND_STEPS, BEHIND_STEPS[0]), ids=str)
def test_ranks_that_train_on_write_what_they_had(case: Case, made_model: str, tmp_path: Path) -> None:
    feed = make_reader(made_model, case, STEPS)
    with Running(made_model, case) as running:
        for number in range(2):  # the second time into the first one's memory
            running.step(feed.step(number))
            running.save(tmp_path / f"at {number}")
            assert running.await_saved() == running.await_saved()
            running.save(tmp_path / f"behind {number}", background=True)
            running.step(feed.step(2))
            files = {file.name: file.nbytes for share in running.await_saved() for file in share.files}
            running.save(tmp_path / f"later {number}")
            later = {file.name: file for share in running.await_saved() for file in share.files}
            assert later.keys() == files.keys()
    for number in range(2):
        for kind in ("vision", "text", "vision/optimizer", "text/optimizer"):
            assert_same_tensors(tmp_path / f"behind {number}" / kind, tmp_path / f"at {number}" / kind)


CASE = Case(Degrees(ulysses=2), Degrees(tensor=2), 2, dtype="float32", zero_stage=1, packing=True)


def train_family(
    model: str, steps: list, numbers: Iterable[int], save: Path, resume: Path | None = None
) -> list[float]:
    """Losses of these steps, begun from `resume`; everything saved to `save`."""
    feed = make_reader(model, CASE, steps)
    with Running(model, CASE, resume_from=lambda stage: resume and str(resume / stage.part)) as running:
        losses = [running.step(feed.step(number))[0] for number in numbers]
        running.save(save)
        return losses


def check_family(name: str, folder: Path) -> None:
    model = str(save_family(name, folder / "model"))
    with staying_double():
        steps = Maker(model).steps()
    train_family(model, steps, range(2), folder / "first")
    last = train_family(model, steps, range(2, 3), folder / "then", resume=folder / "first")
    assert last == train_family(model, steps, range(3), folder / "whole")[2:]
    for part, kind in product(("vision", "text"), (".", "optimizer")):
        found, wanted = (read_shards(folder / run / part / kind) for run in ("then", "whole"))
        assert found.keys() == wanted.keys()
        assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]
    check_export(model, folder / "whole", folder)


def check_export(model: str, saved: Path, folder: Path) -> None:
    weights = {key: tensor for part in ("vision", "text") for key, tensor in read_shards(saved / part).items()}
    save_whole(Path(model), weights, folder / "ours")
    loaded = AutoModelForImageTextToText.from_pretrained(folder / "ours", dtype=torch.float32)
    held = dict(loaded.named_parameters()) | persistent_buffers(loaded)
    assert weights.keys() <= held.keys()
    assert not [key for key, tensor in weights.items() if not torch.equal(held[key], tensor)]
    loaded.save_pretrained(folder / "theirs")
    ours, theirs = (load_file(folder / run / "model.safetensors") for run in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert not [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]


@pytest.mark.families
@pytest.mark.parametrize("name", FAMILIES)
def test_it_goes_on_and_is_exported(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.slow
def test_one_with_all_that_may_go_wrong(tmp_path: Path) -> None:
    """Experts in the hub's form, of which a buffer says how often each is chosen; projections in one matrix."""
    check_family("glm4v_moe", tmp_path)
