"""Exports of checkpoints, beside the model that the run began with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dhp.checkpoint.folder import MODEL, read_about, write_about
from dhp.checkpoint.resume import CONTENTS
from dhp.checkpoint.shard_reader import read_shards
from dhp.core.axes import Degrees
from dhp.core.errors import ModelError
from dhp.core.files import fingerprint
from dhp.doctor.diagnose import staying_double
from dhp.models.base_files import KEYS, RECORD, describe_tensors, described_tensors
from dhp.models.pretrained import auxiliary_files, weight_files
from dhp.trainer.export_run import _find_base, export_whole
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.tiny_families import save_family

NORM, DRAFT = "model.language_model.norm.weight", "mtp.norm.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, in bfloat16 with a float32 norm and a layer that predicts further tokens, and a checkpoint after a
    step in bfloat16."""
    root = tmp_path_factory.mktemp("run")
    base = Path(save_family("qwen3_5", root / "base"))
    file = base / "model.safetensors"
    tensors = {key: one if key == NORM else one.bfloat16() for key, one in load_file(file).items()}
    save_file(tensors | {DRAFT: torch.ones(3)}, file, {"format": "pt"})
    case = Case(Degrees(), Degrees(data=2), 2, "bfloat16", zero_stage=1)
    checkpoint = root / "step_1"
    with staying_double():
        steps = Maker(str(base)).steps()
    with Running(str(base), case) as running:
        running.step(make_reader(str(base), case, steps).step(0))
        running.save(checkpoint)
    (checkpoint / MODEL).mkdir()
    for beside in auxiliary_files(str(base)):
        shutil.copy(beside, checkpoint / MODEL)
    (checkpoint / MODEL / KEYS).write_text(describe_tensors(base))
    settings = {f"{CONTENTS} text.model_name": fingerprint(weight_files(base))}
    about = {"step": 1, "model_name": str(base), "parts": ["vision", "text"], "settings": settings}
    write_about(checkpoint, about, [])
    return base, checkpoint


def test_it_has_the_bases_keys_and_formats_and_master_weights(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, checkpoint = trained
    notes = export_whole(checkpoint, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert {key: one.dtype for key, one in after.items()} == {key: one.dtype for key, one in before.items()}
    assert torch.equal(after[DRAFT], before[DRAFT]) and f"byte for byte, untrained: {DRAFT}; layers that" in notes
    weight = read_shards(checkpoint / "text")[NORM]
    assert weight.dtype is torch.bfloat16 and torch.equal(after[NORM].bfloat16(), weight)
    assert not torch.equal(after[NORM], weight.float()) and not torch.equal(after[NORM], before[NORM])
    assert torch.equal(after[NORM], read_shards(checkpoint / "text" / "optimizer")[f"{NORM}.master"])
    assert json.loads((tmp_path / "out" / RECORD).read_text())["carried"] == [DRAFT]


def test_where_the_base_is_gone_or_another_the_checkpoint_names_what_is_lost(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    base, checkpoint = trained
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    assert "byte for byte" in export_whole(checkpoint, tmp_path / "a", str(moved))
    (moved / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1] + b"?")
    notes = {"b": export_whole(checkpoint, tmp_path / "b", str(moved))}
    notes["c"] = export_whole(checkpoint, tmp_path / "c", str(tmp_path / "nowhere"))
    assert f"the weights in {moved} are not those that training began with" in notes["b"]
    assert f"{tmp_path / 'nowhere'}, is not on this machine" in notes["c"]
    whole = load_file(tmp_path / "a" / "model.safetensors")
    for folder, said in notes.items():
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == whole.keys() - {DRAFT} and {key: one.dtype for key, one in found.items()} == {
            key: one.dtype for key, one in whole.items() if key != DRAFT
        }
        assert (
            f"left out: 1 key of the base that the model's class does not load, as the base is not there: {DRAFT}"
            in said
        )
        assert torch.equal(found[NORM], whole[NORM])  # of the master weights
        record = json.loads((tmp_path / folder / RECORD).read_text())
        assert record["carried"] == [] and record["left_out"] == [DRAFT] and not (tmp_path / folder / KEYS).exists()


def test_a_checkpoint_from_before_says_nothing_of_the_base(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, checkpoint = trained
    before = tmp_path / "before"
    shutil.copytree(checkpoint, before)
    (before / MODEL / KEYS).unlink()
    notes = export_whole(before, tmp_path / "out", str(tmp_path / "nowhere"))
    assert "known as far as the checkpoint says. Say by --base where" in notes and "left out" not in notes
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert DRAFT not in found and {one.dtype for one in found.values()} == {torch.bfloat16}


def test_half_a_copy_of_the_base_is_named(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, checkpoint = trained
    shutil.copytree(base, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "lost.safetensors"}})
    )
    found, notes = _find_base(str(tmp_path / "half"), read_about(checkpoint) | {"settings": {}})
    assert found is None and "names lost.safetensors, which is not there" in notes
    assert describe_tensors(tmp_path / "half") == describe_tensors(None) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "is not what a checkpoint writes"),
        ('{"a": ["../b.safetensors", "F32", [1], 4]}', "outside of its folder"),
    ],
)
def test_what_a_checkpoint_says_of_the_base_leads_nowhere_else(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / KEYS).write_text(content)
    with pytest.raises(ModelError, match=message):
        described_tensors(tmp_path)
