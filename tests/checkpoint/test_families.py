"""Every declared family saved, continued in new processes to the same bits, and exported as the library writes it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.core.torch_private import persistent_buffers
from dhp.doctor.diagnose import staying_double
from dhp.models.export import save_whole
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.tiny_families import FAMILIES, save_family

CASE = Case(Degrees(ulysses=2), Degrees(tensor=2), 2, dtype="float32", zero_stage=1, packing=True)


def train(model: str, steps: list, numbers: Iterable[int], save: Path, resume: Path | None = None) -> list[float]:
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
    train(model, steps, range(2), folder / "first")
    last = train(model, steps, range(2, 3), folder / "then", resume=folder / "first")
    assert last == train(model, steps, range(3), folder / "whole")[2:]
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


def test_one_with_all_that_may_go_wrong(tmp_path: Path) -> None:
    """Experts in the hub's form, of which a buffer says how often each is chosen; projections in one matrix."""
    check_family("glm4v_moe", tmp_path)
