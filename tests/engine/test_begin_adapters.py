"""Adapters that another run wrote are what a run of any layout begins with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.checkpoint.shard_reader import read_shards
from dhp.config.schema import LoraConfig
from dhp.core.axes import Degrees
from dhp.core.graph import StageSpec
from dhp.core.parameters import AdapterSettings, is_adapter
from dhp.models.export import save_adapter
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.rows import slow

ONE = Degrees()
BOTH = (("vision", AdapterSettings(3, 6.0)), ("text", AdapterSettings(4, 4.0)))
NORMS = tuple((part, replace(asked, dora=True)) for part, asked in BOTH)
FIRST = Case(ONE, Degrees(tensor=2), 2, lora=BOTH)
LAYOUTS = [
    Case(Degrees(tensor=2), Degrees(tensor=2), 2, lora=BOTH),
    Case(Degrees(ulysses=2), Degrees(ring=2), 2, lora=BOTH, packing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, lora=BOTH, fsdp=True, zero_stage=3, text_zero_stage=3),
    slow(Case(Degrees(data=2), Degrees(data=2), 2, "float32", lora=BOTH, zero_stage=1, text_zero_stage=2)),
    Case(ONE, ONE, 2, lora=BOTH, stages=2),
    Case(Degrees(data=2), Degrees(tensor=2), 2, lora=NORMS),
    slow(Case(Degrees(tensor=2), Degrees(tensor=4), 2, lora=NORMS, sharded_norms=True)),
    slow(Case(Degrees(data=2), Degrees(data=2), 2, "float32", lora=NORMS, zero_stage=3, text_zero_stage=2)),
]


@dataclass(frozen=True)
class Earlier:
    """A run of two steps. loss: of the step that would be next."""

    folder: Path
    checkpoint: Path
    weights: Mapping[str, Tensor]
    loss: float


def begins(folder: Path) -> Any:
    """The sections of parts that begin from a directory."""

    def of(spec: StageSpec) -> LoraConfig:
        own = dict(BOTH)[spec.part]
        return LoraConfig(rank=own.rank, alpha=own.alpha, begin_from=str(folder))

    return of


@pytest.fixture(scope="module")
def earlier(four_layers_model: str, tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    return _run(four_layers_model, FIRST, tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def earlier_norms(four_layers_model: str, tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    return _run(four_layers_model, replace(FIRST, lora=NORMS), tmp_path_factory.mktemp("norms"))


def _run(model: str, case: Case, root: Path) -> Earlier:
    steps = [*awkward_steps()[:2], awkward_steps()[0]]
    feed = make_reader(model, case, steps)
    with Running(model, case) as running:
        for step in range(2):
            running.step(feed.step(step))
        running.save(root / "checkpoint")
        loss = running.step(feed.step(2))[0]
    parts = [read_shards(root / "checkpoint" / part) for part in ("vision", "text")]
    weights = {name: tensor for part in parts for name, tensor in part.items()}
    adapters = {name: one for name, one in weights.items() if is_adapter(name)}
    save_adapter(model, adapters, dict(case.lora), root / "adapter")
    return Earlier(root / "adapter", root / "checkpoint", adapters, loss)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_run_goes_on_where_the_other_stopped(
    case: Case, request: pytest.FixtureRequest, four_layers_model: str, tmp_path: Path
) -> None:
    earlier: Earlier = request.getfixturevalue("earlier_norms" if case.lora == NORMS else "earlier")
    feed = make_reader(four_layers_model, case, [awkward_steps()[0]])
    with Running(four_layers_model, case, lora=begins(earlier.folder)) as running:
        running.save(tmp_path)
        loss = running.step(feed.step(0))[0]
    found = {name: one for part in ("vision", "text") for name, one in read_shards(tmp_path / part).items()}
    assert {name for name in found if is_adapter(name)} == earlier.weights.keys()
    assert not [name for name, one in earlier.weights.items() if not torch.equal(found[name], one.to(found[name]))]
    assert loss == pytest.approx(earlier.loss, rel=1e-11 if case.dtype == "float64" else 1e-5)


def test_without_them_it_begins_anew_and_a_checkpoint_comes_before_them(
    earlier: Earlier, four_layers_model: str, tmp_path: Path
) -> None:
    case = Case(ONE, ONE, 2, lora=BOTH)
    feed = make_reader(four_layers_model, case, [awkward_steps()[0]])
    with Running(four_layers_model, case) as running:
        assert abs(running.step(feed.step(0))[0] - earlier.loss) > 1e-4 * earlier.loss
        running.save(tmp_path)
    nowhere = begins(tmp_path / "nowhere")
    with Running(
        four_layers_model, case, lora=nowhere, resume_from=lambda spec: str(earlier.checkpoint / spec.part)
    ) as on:
        assert on.step(feed.step(0))[0] == pytest.approx(earlier.loss, rel=1e-11)
