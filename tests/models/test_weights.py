"""How many bytes the parts read, and the limit that follows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.checkpoint.resume import Start
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.parameters import TrainingRules
from dhp.models.empty import start_limit_s, weight_bytes
from dhp.plan.run_plan import RunPlan
from dhp.trainer import session as session_module
from dhp.trainer.session import Session
from tests.helpers.graphs import make_graph


def write(file: Path, nbytes: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.truncate(nbytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two files of weights, sparse, and others."""
    folder = tmp_path / "model"
    write(folder / "model-00001-of-00002.safetensors", 5_000_000_000)
    write(folder / "model-00002-of-00002.safetensors", 2_000_000_000)
    write(folder / "original" / "other.safetensors", 10)
    write(folder / "model.safetensors.index.json", 10)
    write(folder / "pytorch_model.bin", 10)
    return folder


def test_a_directory_weighs_what_its_safetensors_do(model: Path) -> None:
    assert weight_bytes(str(model)) == 7_000_000_000


def test_a_run_that_continues_reads_its_checkpoint_too(model: Path, tmp_path: Path) -> None:
    for part in ("vision", "text", "text/optimizer"):
        write(tmp_path / "step_3" / part / "rank_00000.safetensors", 1_000_000_000)
    assert weight_bytes(str(model), tmp_path / "step_3") == 10_000_000_000


def test_a_hub_id_weighs_what_its_shipped_shape_does() -> None:
    assert weight_bytes("Qwen/Qwen2.5-VL-3B-Instruct") == 2 * 3_754_622_976
    assert weight_bytes("nobody/has-this") == 0


def test_the_limit_is_the_base_and_the_time_that_a_slow_disk_takes() -> None:
    assert start_limit_s(300.0, 0) == 300.0
    assert start_limit_s(300.0, 145_000_000_000) == 1750.0


def test_a_run_waits_for_its_parts_by_the_size_of_its_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(compose_config("tiny", overrides=[f"run_dir={tmp_path / 'run'}"]))
    config.text.model_name = str(model)
    config.cluster.start_timeout_s, config.cluster.step_timeout_s = 40.0, 50.0
    graph = make_graph()
    plan = RunPlan(config, str(model), SimpleNamespace(), TrainingRules(), {}, graph)
    session = Session(plan, tmp_path, Start())
    cluster = session._cluster
    assert (cluster._layout.start_timeout_s, cluster._layout.build_timeout_s) == (40.0, 110.0)
    cluster.device = "cpu"
    assert cluster._common("gloo", 1)["timeout_s"] == 110.0
    cluster.groups = dict.fromkeys(("vision", "text"), SimpleNamespace(start=lambda *_: None, take_watched=list))
    waited: list[float] = []

    def waits(_: list[Any], limit_s: float) -> None:
        waited.append(limit_s)
        raise InterruptedError

    monkeypatch.setattr(session_module, "wait_all", waits)
    with pytest.raises(InterruptedError):
        session.start_stages(1)
    assert waited == [110.0]
