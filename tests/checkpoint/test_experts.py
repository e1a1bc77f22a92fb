"""Experts that ranks share out or cut, saved, continued in other layouts, and exported as the library writes them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp.checkpoint.shard_files import check_part
from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.models.export import save_whole
from dhp.parallel.expert.expert_modules import DOWN, GATE_UP
from tests.engine.test_experts import ONE, ExactText
from tests.engine.test_families import equal_pictures as steps
from tests.helpers.layouts import Case, Fault, Running, make_reader
from tests.helpers.norms import exact_norms
from tests.helpers.rows import slow
from tests.helpers.tiny import EXPERTS

PLAIN = Case(ONE, ONE, micro_batches=1)
SHARED = Case(ONE, Degrees(data=4, expert=2), micro_batches=1)
BY_TWO = Case(ONE, Degrees(data=2, expert=2), micro_batches=1)
CUT = Case(ONE, Degrees(tensor=2), micro_batches=1)
STEPS = [*steps(), *steps()[:1]]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    with exact_norms():
        yield


def train(model: str, case: Case, numbers: Iterable[int], save: Path, resume: Path | None = None) -> None:
    """Train these steps, begun from `resume`, and save."""
    feed = make_reader(model, case, STEPS)
    begin = lambda stage: resume and str(resume / stage.part)
    with Running(model, case, Fault(text=ExactText), resume_from=begin) as running:
        for number in numbers:
            running.step(feed.step(number))
        running.save(save)


@pytest.fixture(scope="module")
def wanted(experts_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("wanted")
    train(experts_model, PLAIN, range(4), folder)
    return folder


@pytest.mark.parametrize(("first", "then"), [slow(SHARED, CUT), (CUT, BY_TWO)], ids=["shared, cut", "cut, shared"])
def test_a_run_goes_on_in_another_layout(
    first: Case, then: Case, experts_model: str, wanted: Path, tmp_path: Path
) -> None:
    train(experts_model, first, range(2), tmp_path / "first")
    train(experts_model, then, range(2, 4), tmp_path / "then", resume=tmp_path / "first")
    for kind in ("text", "text/optimizer"):
        found, theirs = read_shards(tmp_path / "then" / kind), read_shards(wanted / kind)
        assert found.keys() == theirs.keys()
        for name, values in theirs.items():
            torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-9, msg=name)


def test_each_slice_of_an_expert_is_written_once(experts_model: str, tmp_path: Path) -> None:
    """Tensor ranks have slices, in which gate and up are apart; of two replicas each has two experts, and the same
    slices of all else."""
    train(experts_model, Case(ONE, Degrees(data=2, expert=2, tensor=2, ulysses=2), micro_batches=1), [], tmp_path)
    check_part(tmp_path / "text")
    files = sorted((tmp_path / "text").glob("*.json"))
    assert {file.name[: len("rank_00000")] for file in files} == {f"rank_0000{rank}" for rank in (0, 1, 4, 5)}
    extents = [json.loads(file.read_text()) for file in files]
    layer, width = "model.language_model.layers.0", EXPERTS["moe_intermediate_size"]
    found = lambda key: sorted(tuple(e[key]["offset"]) for e in extents if key in e)
    assert found(f"{layer}.mlp.experts.{DOWN}") == [(e, 0, at * width // 2) for e in (0, 2) for at in range(2)]
    assert found(f"{layer}.mlp.experts.{GATE_UP}") == [(e, at * width // 2, 0) for e in (0, 2) for at in range(4)]
    assert len(found(f"{layer}.self_attn.q_proj.weight")) == 2


def test_each_expert_is_written_once(experts_model: str, tmp_path: Path) -> None:
    train(experts_model, SHARED, [], tmp_path)
    check_part(tmp_path / "text")
    assert {file.name for file in (tmp_path / "text").glob("*.json")} == {"rank_00000.json", "rank_00001.json"}
    extents = [json.loads((tmp_path / "text" / f"rank_0000{rank}.json").read_text()) for rank in (0, 1)]
    assert all("experts" in name for name in extents[1])
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert [extent[name]["offset"] for extent in extents] == [[0, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize("model", ["experts_model", "qwen3_vl_moe_model"])
@pytest.mark.parametrize(
    "text", [Degrees(data=2, expert=2), Degrees(tensor=2), slow(Degrees(data=2, expert=2, tensor=2))], ids=str
)
def test_an_export_is_what_save_pretrained_writes(
    model: str, text: Degrees, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = request.getfixturevalue(model)
    train_case = Case(ONE, text, micro_batches=1, dtype="float32")
    with Running(directory, train_case) as running:
        running.save(tmp_path / "saved")
    weights = {name: w for part in ("vision", "text") for name, w in read_shards(tmp_path / "saved" / part).items()}
    save_whole(Path(directory), weights, tmp_path / "out")
    AutoModelForImageTextToText.from_pretrained(directory).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert any("experts" in name for name in ours)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
