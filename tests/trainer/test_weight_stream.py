"""dhp.trainer.weight_stream: weights from running ranks have the names and bytes of an export of the same step."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dhp.checkpoint import shard_reader
from dhp.checkpoint.folder import MODEL, write_about
from dhp.core.axes import Degrees
from dhp.core.errors import CheckpointError, ModelError
from dhp.core.parameters import AdapterSettings
from dhp.doctor.diagnose import staying_double
from dhp.models import lora
from dhp.models.base_files import KEYS, describe_tensors
from dhp.models.pretrained import auxiliary_files
from dhp.trainer.export_run import export_whole
from dhp.trainer.weight_stream import stream_weights
from tests.helpers.families import Maker
from tests.helpers.layouts import FIRST_OUT, Case, Running, make_reader, rules_of
from tests.helpers.rows import slow_but
from tests.helpers.tiny_families import save_family
from tests.helpers.token_loops import LocalSession

ONE = Degrees()
LORA = (("text", AdapterSettings(4, 8.0)), ("vision", AdapterSettings(2, 4.0, dora=True)))
CASES = [
    ("qwen3_5", Case(ONE, Degrees(data=2), 2, "bfloat16", zero_stage=1)),
    ("qwen2_5_vl", Case(Degrees(tensor=2), Degrees(tensor=2), 2, "float32", stages=2, schedule="1f1b")),
    ("qwen2_5_vl", Case(ONE, Degrees(data=2), 2, "bfloat16", text_zero_stage=3, fsdp=True)),
    ("qwen2_5_vl", Case(ONE, Degrees(data=2), 2, "bfloat16", text_zero_stage=3)),
    ("qwen3_vl_moe", Case(ONE, Degrees(data=2), 2, "float32")),
    ("qwen2_5_vl", Case(ONE, Degrees(tensor=2), 2, "float32", lora=LORA)),
    ("qwen2_5_vl", Case(ONE, Degrees(data=2), 2, "bfloat16", text_zero_stage=2, fsdp=True, lora=LORA)),
]


@pytest.fixture(autouse=True)
def _adapters_begin_with_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "FIRST_OUT", FIRST_OUT)


def make_base(folder: Path, kind: str) -> Path:
    """A model in bfloat16 with a float32 norm, and a layer that its class does not load."""
    base = Path(save_family(kind, folder / "base"))
    for file in base.glob("*.safetensors"):
        tensors = {key: one if "norm" in key else one.bfloat16() for key, one in load_file(file).items()}
        more = {"mtp.norm.weight": torch.ones(3)} if kind == "qwen3_5" else {}
        save_file(tensors | more, file, {"format": "pt"})
    return base


def after_a_step(base: Path, case: Case, running: Running, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The session, and the export of its checkpoint."""
    with staying_double():
        steps = Maker(str(base)).steps()
    running.step(make_reader(str(base), case, steps).step(0))
    checkpoint = folder / "step_1"
    running.save(checkpoint)
    (checkpoint / MODEL).mkdir()
    for beside in auxiliary_files(str(base)):
        shutil.copy(beside, checkpoint / MODEL)
    (checkpoint / MODEL / KEYS).write_text(describe_tensors(base))
    settings = {"lora": {part: asdict(own) | {"targets": list(own.targets)} for part, own in case.lora}}
    write_about(checkpoint, {"step": 1, "model_name": str(base), "parts": ["vision", "text"], "settings": settings}, [])
    export_whole(checkpoint, folder / "out")
    session: Any = LocalSession(running, str(base))
    session.plan = SimpleNamespace(adapters=dict(case.lora), rules=rules_of(str(base), case))
    files = sorted((folder / "out").glob("*.safetensors"))
    return session, {key: one for file in files for key, one in load_file(file).items()}


@pytest.mark.parametrize(("kind", "case"), slow_but(CASES, *CASES[:3], CASES[5]), ids=str)
def test_it_is_the_export_byte_for_byte(kind: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, sizes = make_base(tmp_path, kind), list[int]()
    join = shard_reader.join_pieces
    monkeypatch.setattr(
        "dhp.trainer.weight_stream.join_pieces",
        lambda pieces: [found := join(pieces), sizes.append(sum(one.nbytes for one in found.values()))][0],
    )
    with Running(str(base), case) as running:
        session, wanted = after_a_step(base, case, running, tmp_path)
        found = list(stream_weights(session))
        assert len(found) == len(wanted) == len(dict(found))
        for key, tensor in found:
            assert (tensor.dtype, tensor.shape) == (wanted[key].dtype, wanted[key].shape), key
            bytes_of = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, wanted[key])]
            assert torch.equal(*bytes_of), key
        before = {key: one for file in base.glob("*.safetensors") for key, one in load_file(file).items()}
        assert sum(not torch.equal(one, before[key]) for key, one in found if key in before) > len(found) / 3
        assert max(sizes) < sum(one.nbytes for one in wanted.values()) / 2  # no whole copy
        running.step(make_reader(str(base), case, Maker(str(base)).steps()).step(1))
        assert any(not torch.equal(one, wanted[key]) for key, one in stream_weights(session))  # those of now


def test_what_cannot_be_merged_exactly_is_refused(tmp_path: Path) -> None:
    """Adapters beside matrices that the ranks have rounded."""
    base, case = Path(save_family("qwen2_5_vl", tmp_path / "base")), replace(CASES[6][1], text_zero_stage=0, fsdp=False)
    with Running(str(base), case) as running:
        session: Any = LocalSession(running, str(base))
        session.plan = SimpleNamespace(adapters=dict(case.lora), rules=rules_of(str(base), case))
        with pytest.raises(ModelError, match="is torch.bfloat16 on the ranks and F32 in files, which adapters"):
            list(stream_weights(session))


def test_pieces_that_lack_something_are_refused() -> None:
    piece = ("a", {"shape": [4, 2], "offset": [0, 0]}, torch.ones(2, 2))
    with pytest.raises(CheckpointError, match="sent 4 of 8 values of a"):
        shard_reader.join_pieces([piece])
    whole = shard_reader.join_pieces([piece, ("a", {"shape": [4, 2], "flat": 4}, torch.zeros(4))])
    assert whole["a"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
