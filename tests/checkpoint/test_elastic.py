"""A checkpoint of any layout goes on in any other: the same tensors to the last bit, and the losses of the one that
wrote it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from tests.checkpoint.test_round_trip import MOMENTS, train
from tests.helpers.layouts import Case, Trained
from tests.helpers.rows import slow, slow_but

AT, STEPS = 2, 4  # saved after so many steps; steps of the run
PLAIN = "plain"
LAYOUTS = {
    PLAIN: Case(Degrees(), Degrees(), dtype="float32"),
    "ulysses, zero 1, tensor": Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    "replicas": Case(Degrees(data=2), Degrees(data=2), dtype="float32"),
    "three replicas, zero 2": Case(Degrees(data=3), Degrees(data=3), dtype="float32", zero_stage=2, text_zero_stage=2),
    "zero 3": Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=3),
    "fsdp 3, data and tensor": Case(
        Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "float32", 3, text_zero_stage=3, fsdp=True
    ),
    "fsdp 2": Case(Degrees(data=3), Degrees(data=3), 2, "float32", 2, text_zero_stage=2, fsdp=True),
    "pipeline, vision tensor": Case(Degrees(tensor=2), Degrees(tensor=2), 2, "float32", schedule="1f1b", stages=2),
    "pipeline of four": Case(Degrees(), Degrees(), 2, "float32", schedule="1f1b", stages=4),
    "ring": Case(Degrees(ulysses=2), Degrees(ring=2), 2, "float32", text_zero_stage=1),
    "ring, ulysses, tensor": Case(Degrees(), Degrees(ring=2, ulysses=2, tensor=2), 2, "float32"),
    "a chain of cut parts": Case(Degrees(), Degrees(), 2, "float32", schedule="1f1b", stages=2, tower_stages=2),
    "interleaved": Case(Degrees(), Degrees(), 2, "float32", schedule="interleaved", stages=2, chunks=2),
}
FAST = [
    (PLAIN, "ulysses, zero 1, tensor"),
    ("ulysses, zero 1, tensor", "zero 3"),
    ("zero 3", "fsdp 3, data and tensor"),
    ("fsdp 3, data and tensor", "pipeline, vision tensor"),
    ("pipeline, vision tensor", "three replicas, zero 2"),
    ("three replicas, zero 2", PLAIN),
]
ROUNDED = {
    PLAIN: Case(Degrees(), Degrees(), dtype="bfloat16"),
    "zero": Case(Degrees(data=3), Degrees(data=2), dtype="bfloat16", zero_stage=3, text_zero_stage=1),
    "fsdp": Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "bfloat16", 2, text_zero_stage=3, fsdp=True),
    "pipeline": Case(Degrees(), Degrees(data=2, tensor=2), 2, "bfloat16", schedule="1f1b", stages=2),
    "halves": Case(Degrees(), Degrees(), dtype="bfloat16", state_bytes=12),
}
EXPERTS = {
    PLAIN: Case(Degrees(), Degrees(), 2, "float32"),
    "shared out": Case(Degrees(data=2), Degrees(data=2, expert=2), 2, "float32", 1),
    "shared out, rows": Case(Degrees(ulysses=2), Degrees(data=2, expert=2, ulysses=2), 1, "float32"),
    "shared out, fsdp": Case(Degrees(), Degrees(data=4, expert=2), 1, "float32", text_zero_stage=3, fsdp=True),
    "shared out, cut": Case(Degrees(), Degrees(data=2, expert=2, tensor=2), 1, "float32"),
    "shared out, cut, fsdp": Case(
        Degrees(), Degrees(data=4, expert=2, tensor=2), 1, "float32", text_zero_stage=2, fsdp=True
    ),
    "cut": Case(Degrees(), Degrees(tensor=2), 2, "float32"),
    "fsdp": Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, text_zero_stage=3, fsdp=True),
    "pipeline": Case(Degrees(), Degrees(data=2, expert=2), 2, "float32", schedule="1f1b", stages=2),
    "cut, fsdp": Case(Degrees(), Degrees(data=2, tensor=2), 2, "float32", text_zero_stage=2, fsdp=True),
}
ADAPTERS = (("vision", AdapterSettings(2, 4.0)), ("text", AdapterSettings(3, 3.0)))
LORA = {
    PLAIN: Case(Degrees(), Degrees(), 2, "float32", lora=ADAPTERS, trainable=("projector",)),
    "ulysses, tensor": Case(
        Degrees(ulysses=2), Degrees(tensor=2), 2, "float32", zero_stage=1, lora=ADAPTERS, trainable=("projector",)
    ),
    "fsdp": Case(
        Degrees(data=2), Degrees(data=2), 2, "float32", 3, text_zero_stage=3, fsdp=True, lora=ADAPTERS,
        trainable=("projector",),
    ),
}  # fmt: skip
NORMS = tuple((part, replace(asked, dora=True)) for part, asked in ADAPTERS)
DORA = {name: replace(case, lora=NORMS) for name, case in LORA.items()} | {
    "fsdp, tensor": Case(
        Degrees(tensor=2), Degrees(data=2, tensor=2), 2, "float32", text_zero_stage=3, fsdp=True, lora=NORMS,
        trainable=("projector",),
    ),
}  # fmt: skip
DROPOUT = tuple((part, replace(asked, dropout=0.1)) for part, asked in ADAPTERS)
DROPPING = {name: replace(case, lora=DROPOUT) for name, case in LORA.items()} | {
    "ring, replicas": Case(
        Degrees(ring=2), Degrees(data=2, ring=2), 2, "float32", lora=DROPOUT, trainable=("projector",)
    )
}
FROZEN = {
    PLAIN: Case(Degrees(), Degrees(), 2, "float32", frozen=("vision", "projector")),
    "pipeline": Case(
        Degrees(), Degrees(data=2), 2, "float32", frozen=("vision", "projector"), schedule="1f1b", stages=2
    ),
}

# Of the decoder the first of two stages is frozen; with states that are cut in the second.
FIRST = ("vision", "projector", "embed_tokens", "language_model.layers.0", "language_model.layers.1")
FIRST_FROZEN = {
    PLAIN: Case(Degrees(), Degrees(), 2, "float32", frozen=FIRST),
    "pipeline": Case(Degrees(), Degrees(), 2, "float32", frozen=FIRST, schedule="1f1b", stages=2),
    "pipeline, fsdp": Case(
        Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "float32", 0, text_zero_stage=2, fsdp=True,
        frozen=FIRST, schedule="1f1b", stages=2,
    ),
}  # fmt: skip


class Saved:
    """Runs of whole layouts, made once each, with a checkpoint on their way."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self._folder = model, folder
        self.run = cache(self._run)

    def _run(self, case: Case) -> tuple[Path, Trained]:
        folder = self._folder / str(abs(hash(case)))
        whole = train(self.model, case, range(STEPS), folder / "end", early=folder / "first")
        return folder / "first", whole


@pytest.fixture(scope="module")
def saved(attending_model: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(attending_model, tmp_path_factory.mktemp("saved"))


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Whole tensors of both parts, weights as their masters say where there are any."""
    found = {}
    for part in ("vision", "text"):
        weights, states = read_shards(checkpoint / part), read_shards(checkpoint / part / "optimizer")
        found |= {f"{part}.{name}": states.get(f"{name}.master", weight) for name, weight in weights.items()}
        found |= {f"{part}.{name}": values for name, values in states.items() if name.endswith((*MOMENTS, "step"))}
    return found


def differing(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert mine.keys() == theirs.keys()
    return [name for name, values in theirs.items() if not torch.equal(mine[name], values)]


def assert_goes_on(saved: Saved, tmp_path: Path, before: Case, after: Case, rtol: float) -> None:
    first, whole = saved.run(before)
    rest = train(saved.model, after, range(AT, STEPS), tmp_path / "end", resume=first, early=tmp_path / "at once")
    assert not differing(tensors(tmp_path / "at once"), tensors(first))
    compared = STEPS if before.dtype == "float32" else AT + 1  # in 16 bits gradients are rounded in another order then
    assert rest.losses[: compared - AT] == pytest.approx(whole.losses[AT:compared], rel=rtol)


@pytest.mark.parametrize(("before", "after"), slow_but(FAST, FAST[0]))
def test_a_layout_goes_on_in_another(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, LAYOUTS[before], LAYOUTS[after], 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [pair for pair in permutations(LAYOUTS, 2) if pair not in FAST])
def test_every_layout_goes_on_in_every_other(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, LAYOUTS[before], LAYOUTS[after], 1e-5)


@pytest.mark.parametrize(("before", "after"), [slow(PLAIN, "zero"), slow("zero", "fsdp"), slow("fsdp", PLAIN)])
def test_rounded_weights_go_on_from_their_masters(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, ROUNDED[before], ROUNDED[after], 1e-3)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [*permutations(set(ROUNDED) - {"halves"}, 2)])
def test_every_rounded_layout_goes_on_in_every_other(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, ROUNDED[before], ROUNDED[after], 1e-3)


@pytest.fixture(scope="module")
def saved_experts(qwen3_vl_moe_model: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(qwen3_vl_moe_model, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow("shared out", "cut"),
        slow("cut", "shared out"),
        slow("cut", "shared out, rows"),
        ("shared out, rows", "shared out, fsdp"),
        slow("shared out, rows", PLAIN),
        slow("shared out, fsdp", "fsdp"),
        slow("shared out, fsdp", PLAIN),
        ("shared out, fsdp", "shared out, cut"),
        slow("shared out, cut", PLAIN),
        slow(PLAIN, "shared out, cut, fsdp"),
        ("shared out, cut, fsdp", PLAIN),
    ],
)
def test_experts_go_on_elsewhere(saved_experts: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved_experts, tmp_path, EXPERTS[before], EXPERTS[after], 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [*permutations(EXPERTS, 2)])
def test_experts_of_every_layout_go_on_in_every_other(
    saved_experts: Saved, tmp_path: Path, before: str, after: str
) -> None:
    assert_goes_on(saved_experts, tmp_path, EXPERTS[before], EXPERTS[after], 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [*permutations(LORA, 2)])
def test_adapters_of_every_layout_go_on_in_every_other(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, LORA[before], LORA[after], 1e-5)


@pytest.mark.parametrize(("before", "after"), [slow(PLAIN, "ulysses, tensor"), slow("ulysses, tensor", "fsdp")])
def test_adapters_go_on_in_another_layout(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, LORA[before], LORA[after], 1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [("ulysses, tensor", PLAIN), slow("ulysses, tensor", "fsdp, tensor"), slow("fsdp, tensor", "fsdp")],
)
def test_norms_of_rows_go_on_in_another_layout(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, DORA[before], DORA[after], 1e-5)


@pytest.mark.parametrize(
    ("before", "after"), [slow(PLAIN, "ulysses, tensor"), slow("ulysses, tensor", "ring, replicas")]
)
def test_dropout_goes_on_in_another_layout(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    """The other layout drops what the undisturbed run does, which is not nothing."""
    assert_goes_on(saved, tmp_path, DROPPING[before], DROPPING[after], 1e-5)
    _, whole = saved.run(DROPPING[before])
    _, without = saved.run(LORA[before])
    assert whole.losses != pytest.approx(without.losses, rel=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [*permutations(DROPPING, 2)])
def test_dropout_goes_on_in_every_other_layout(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, DROPPING[before], DROPPING[after], 1e-5)


@pytest.mark.parametrize(("before", "after"), slow_but(permutations(FROZEN), (PLAIN, "pipeline")))
def test_a_frozen_part_goes_on_in_another_layout(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    assert_goes_on(saved, tmp_path, FROZEN[before], FROZEN[after], 1e-5)


@pytest.mark.parametrize(("before", "after"), [("pipeline", PLAIN), slow("pipeline, fsdp", "pipeline")])
def test_a_part_whose_first_stage_is_frozen_goes_on(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    """The stage that takes steps counts them, and what is not cut is written by one replica."""
    first, _ = saved.run(FIRST_FROZEN[before])
    trained = [name for name in read_shards(first / "text" / "optimizer") if name.endswith(MOMENTS)]
    assert trained and not [name for name in trained if ".layers.0." in name or ".layers.1." in name]
    assert_goes_on(saved, tmp_path, FIRST_FROZEN[before], FIRST_FROZEN[after], 1e-5)


@pytest.mark.parametrize("after", [PLAIN, slow("zero"), slow("fsdp"), "halves"])
def test_a_rounded_run_keeps_what_a_single_precision_one_had(saved: Saved, tmp_path: Path, after: str) -> None:
    """Its weights are no rounded ones, and have no masters beside them."""
    first, _ = saved.run(LAYOUTS[PLAIN])
    train(saved.model, ROUNDED[after], [], tmp_path / "rounded", resume=first)
    train(saved.model, LAYOUTS[PLAIN], [], tmp_path / "back", resume=tmp_path / "rounded")
    masters = lambda folder: {k: v for k, v in tensors(folder).items() if not k.endswith(MOMENTS)}
    assert not differing(masters(tmp_path / "back"), masters(first))


@pytest.mark.slow
def test_a_single_precision_run_takes_the_masters_of_a_rounded_one(saved: Saved, tmp_path: Path) -> None:
    """Of a bfloat16 checkpoint the weights are rounded; a float32 run begins with what they were rounded from."""
    first, _ = saved.run(ROUNDED["zero"])
    for number, name in enumerate((PLAIN, "zero 3", "fsdp 2")):
        train(saved.model, LAYOUTS[name], [], tmp_path / str(number), resume=first)
        assert not differing(tensors(tmp_path / str(number)), tensors(first)), name


@pytest.mark.slow
def test_halves_and_whole_masters_are_the_same_weights(saved: Saved, tmp_path: Path) -> None:
    first, _ = saved.run(ROUNDED["zero"])
    train(saved.model, ROUNDED["halves"], [], tmp_path / "halves", resume=first)
    train(saved.model, ROUNDED[PLAIN], [], tmp_path / "back", resume=tmp_path / "halves")
    train(saved.model, ROUNDED["zero"], [], tmp_path / "zero", resume=tmp_path / "halves")
    masters = lambda folder: {k: v for k, v in tensors(folder).items() if not k.endswith(MOMENTS)}
    for folder in ("back", "zero"):  # moments of 16 bits are rounded
        assert not differing(masters(tmp_path / folder), masters(first)), folder


def no_moments(folder: Path) -> None:
    """Every moment is 0."""
    for file in folder.glob("*/optimizer/rank_*.safetensors"):
        kept = load_file(file)
        rewrite(file, {name: v * 0 if name.endswith(MOMENTS) else v for name, v in kept.items()})


def rounded_masters(folder: Path) -> None:
    """What the optimizer holds exactly is what the module computes with."""
    for file in folder.glob("*/optimizer/rank_*.safetensors"):
        kept = load_file(file)
        rewrite(file, {n: v.bfloat16().float() if n.endswith("master") else v for n, v in kept.items()})


def exchanged_blocks(folder: Path) -> None:
    """Two ranks' slices of one matrix have each other's place."""
    files = sorted(folder.glob("text/rank_*.json"))[:2]
    extents = [json.loads(file.read_text()) for file in files]
    name = next(n for n in extents[0] if n in extents[1] and extents[0][n]["offset"] != extents[1][n]["offset"])
    for own, other, file in zip(extents, extents[::-1], files, strict=True):
        own = own | {name: own[name] | {"offset": other[name]["offset"]}}
        file.write_text(json.dumps(own))


def rewrite(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write other tensors in their place, with no checksums: a fault of the reader is looked for, not of a disk."""
    save_file({name: values.contiguous() for name, values in tensors.items()}, file)
    extents = json.loads(file.with_suffix(".json").read_text())
    for extent in extents.values():
        extent.pop("crc32", None)
    file.with_suffix(".json").write_text(json.dumps(extents))


@pytest.mark.parametrize(
    ("defect", "layout", "after"),
    [
        (no_moments, LAYOUTS["ulysses, zero 1, tensor"], LAYOUTS[PLAIN]),
        (rounded_masters, ROUNDED["zero"], ROUNDED[PLAIN]),
        (exchanged_blocks, LAYOUTS["ulysses, zero 1, tensor"], LAYOUTS[PLAIN]),
    ],
    ids=["moments dropped", "masters from rounded weights", "blocks exchanged"],
)
def test_what_these_tests_look_for_is_seen(
    saved: Saved, tmp_path: Path, defect: Callable[[Path], None], layout: Case, after: Case
) -> None:
    first, _ = saved.run(layout)
    spoiled = Path(shutil.copytree(first, tmp_path / "copy"))
    defect(spoiled)
    train(saved.model, after, [], tmp_path / "at once", resume=spoiled)
    assert differing(tensors(tmp_path / "at once"), tensors(first))
