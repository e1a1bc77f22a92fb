"""A layout that is left to be planned: what is set stays, what is chosen passes the run's checks, a resume keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dhp.cluster.placement.nodes import ClusterNode, DeviceCount, count_devices
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.layout import DEGREES, GIVEN
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.plan.bench.machine import Machine
from dhp.plan.count.rates import Channel, Rates
from dhp.plan.search import run_devices
from dhp.trainer import planned_layout
from dhp.trainer.curriculum import _checked_stages
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare
from tests.helpers.runs import tiny, train

LINK = Channel(1e9, 1e-5)
RATES = Rates(1e12, 5e11, 1e10, 1e-5, LINK, Channel(1e8, 1e-4), 2)


def machine(count: int, memory: float = 2.0**30) -> Machine:
    return Machine("made", count, 2, {"float32": RATES}, memory, LINK, contexts=False)


def planned(
    monkeypatch: pytest.MonkeyPatch, assets: Path, *overrides: str, devices: Machine | None = None
) -> tuple[Config, list[str]]:
    """The configuration with its layout, as the command line would give it, and what is said of it."""
    monkeypatch.setattr(planned_layout, "machine_ahead", lambda *_: (devices or machine(2), "made up"))
    monkeypatch.setattr(planned_layout, "job_overrides", lambda: list(overrides))
    said: list[str] = []
    config = compose_config("tiny", overrides=[f"tiny_assets={assets}", *overrides])
    return with_layout(config, said.append), said


def test_a_given_layout_is_not_planned(tiny_assets: Path) -> None:
    config = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}"])
    assert with_layout(config) is config


def test_what_files_set_stays_with_auto(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    overrides = ["layout=auto", "text.tensor=2", "text.ulysses=1", f"run_dir={tmp_path / 'run'}"]
    config, said = planned(monkeypatch, tiny_assets, *overrides, devices=machine(4))
    assert config.layout == GIVEN
    assert config.vision.zero_stage == 1  # of the file
    assert (config.text.tensor, config.text.ulysses) == (2, 1)
    run = prepare(config)
    assert run.text.num_actors * (1 if run.cluster.collocate else 2) == 4
    assert any("text.tensor=2" in line and "s a step" in line for line in said)


def test_what_the_command_line_sets_stays_with_free(
    monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path
) -> None:
    alone = f"run_dir={tmp_path / 'run'}"
    config, _ = planned(monkeypatch, tiny_assets, "layout=free", "training.micro_batch_size=2", alone)
    assert config.training.micro_batch_size == 2
    kept, _ = planned(monkeypatch, tiny_assets, "layout=free", "vision.zero_stage=1", alone)
    assert kept.vision.zero_stage == 1
    for one in (config, kept):
        run = prepare(one)
        assert run.text.num_actors == 2
        assert all(isinstance(getattr(run.text, key), int) for key in DEGREES)


def test_where_no_layout_takes_all_devices_fewer_are_taken(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path) -> None:
    """Heads of 4 and 8, batches of 8: nothing divides by 7, and with 7 devices apart neither part can have its own."""
    overrides = ["layout=free", "cluster.collocate=true", "vision.tensor=1", "vision.ulysses=1", "text.ring=1"]
    stays = ["text.pipeline=1", "vision.pipeline=1", "text.ulysses=1", "vision.ring=1", "training.batch_size=8"]
    config, said = planned(monkeypatch, tiny_assets, *overrides, *stays, devices=machine(5))
    assert config.text.num_actors == 4
    assert any("on 4 of them, as 5 can have none" in line for line in said)


def test_nothing_that_fits_is_an_error_with_the_smallest(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layout fits on 2 × made .* the smallest takes 0\.0\d GiB .* dhp plan"):
        planned(monkeypatch, tiny_assets, "layout=free", devices=machine(2, 2.0**21))


def record(folder: Path, config: Config) -> None:
    """What a run with this configuration leaves, as far as a resume looks for its layout."""
    checkpoint = folder / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 3}))
    (folder / "config.yaml").write_text(to_yaml(config))


def test_a_resumed_run_keeps_its_layout(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    own = [f"tiny_assets={tiny_assets}", "text.ulysses=2", "text.tensor=1", "text.parallelism=sequence"]
    before = compose_config("tiny", overrides=[*own, "training.micro_batch_size=1", "vision.recompute=full"])
    record(tmp_path / "run", prepare(before, new_run=False))
    resumed = ["layout=free", f"run_dir={tmp_path / 'run'}", "training.resume=auto"]
    config, said = planned(monkeypatch, tiny_assets, *resumed)
    assert said == [f"layout=free: that of the run that is resumed, by {tmp_path / 'run' / 'config.yaml'}"]
    assert (config.text.ulysses, config.text.tensor, config.vision.ulysses) == (2, 1, 2)
    assert (config.training.micro_batch_size, config.vision.recompute) == (1, "full")
    prepare(config, new_run=False)
    elsewhere = ["layout=free", f"training.resume={tmp_path / 'run'}", f"run_dir={tmp_path / 'next'}"]
    assert planned(monkeypatch, tiny_assets, *elsewhere)[0].text.ulysses == 2
    other, said = planned(monkeypatch, tiny_assets, *resumed, "text.tensor=2")  # its checkpoint is read in any layout
    assert said[0].endswith("planned anew, as text.tensor=2 is set, and the run that is resumed has text.tensor=1")
    assert (other.text.tensor, other.training.micro_batch_size) == (2, 1)
    prepare(other, new_run=False)
    fewer, said = planned(monkeypatch, tiny_assets, *resumed, "cluster.devices=1", devices=machine(1))
    assert "planned anew, as cluster.devices=1 is set, and the run that is resumed has cluster.devices=None" in said[0]
    assert (fewer.text.num_actors, fewer.vision.num_actors, fewer.training.micro_batch_size) == (1, 1, 1)
    fresh = planned(monkeypatch, tiny_assets, "layout=free", f"run_dir={tmp_path / 'new'}", "training.resume=auto")
    assert any("planning for" in line for line in fresh[1])  # there is nothing to continue


def test_stages_that_are_replaced_are_planned_anew(
    monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path
) -> None:
    """What lies there goes before the first stage trains, with its layout; without overwrite it is kept."""
    monkeypatch.setattr(planned_layout, "machine_ahead", lambda *_: (machine(2), "made up"))
    monkeypatch.setattr(planned_layout, "job_overrides", list)
    own = [f"tiny_assets={tiny_assets}", "layout=free", f"run_dir={tmp_path}", "+stages.one={}"]
    config = compose_config("tiny", overrides=own)
    before = compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", "vision.tensor=2", "vision.ulysses=1"])
    before.vision.parallelism, before.vision.zero_stage = "tensor", 0
    record(tmp_path / "1_one", prepare(before, new_run=False))
    (tmp_path / "1_one" / "metrics.jsonl").touch()
    said: list[str] = []
    (kept,) = _checked_stages(config, said.append)
    assert kept.prepared.vision.tensor == 2 and "one: layout=free: that of the run that is resumed" in said[0]
    (anew,) = _checked_stages(replace(config, overwrite=True), said.append)
    assert anew.prepared.vision.tensor == 1 and "planning for" in " ".join(said)
    assert anew.stage.config.training.resume == kept.stage.config.training.resume == "auto"


def test_a_record_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_assets: Path, tmp_path: Path) -> None:
    record(tmp_path, compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}"]))
    (tmp_path / "config.yaml").write_text("text: {tensor: '${oc.env:HOME}'}")
    with pytest.raises(ConfigError, match="not the plain record"):
        planned(monkeypatch, tiny_assets, "layout=free", f"run_dir={tmp_path}", "training.resume=auto")


def node(name: str, **resources: float) -> ClusterNode:
    return ClusterNode(name, name, name, {key.replace("_of_", ":"): own for key, own in resources.items()}, {})


@pytest.mark.parametrize(
    ("nodes", "device", "found"),
    [
        ([node("a", CPU=8), node("b", CPU=4)], "auto", DeviceCount(None, 12, 4)),
        ([node("a", CPU=8, GPU=8, accelerator_type_of_H100=1), node("b", CPU=4)], "auto", DeviceCount("H100", 8, 8)),
        ([node("a", CPU=8, GPU=8, accelerator_type_of_H100=1)], "cpu", DeviceCount(None, 8, 8)),
    ],
)
def test_the_devices_of_a_cluster_are_those_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: list[ClusterNode], device: str, found: DeviceCount
) -> None:
    monkeypatch.setattr(nodes, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(nodes, "read_nodes", lambda: nodes)
    assert count_devices("auto", device, 1.0) == found


def test_gpus_of_two_kinds_are_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a", GPU=8, accelerator_type_of_H100=1), node("b", GPU=8, accelerator_type_of_A100=1)]
    monkeypatch.setattr(nodes, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(nodes, "read_nodes", lambda: nodes)
    with pytest.raises(ConfigError, match="a H100, b A100"):
        count_devices("auto", "auto", 1.0)


def test_rays_names_of_gpus_are_those_of_the_table() -> None:
    assert [run_devices._name(kind) for kind in ("H100", "A100-80G", "Other")] == ["h100", "a100", "Other"]


def layout_of(file: Path) -> Mapping[str, object]:
    values = yaml.safe_load(file.read_text())
    degrees = {f"{name}.{key}": values[name][key] for name in ("vision", "text") for key in DEGREES}
    return {"layout": values["layout"], **degrees}


@pytest.mark.slow
def test_a_run_plans_and_goes_on_in_its_layout(tiny_assets: Path, tmp_path: Path) -> None:
    arguments = tiny(tiny_assets, tmp_path / "run", "layout=free", "cluster.devices=2", "training.save_steps=1")
    first = train(*arguments, "training.max_steps=1")
    assert first.status == 0 and first.left == (), first.stderr
    assert "layout=free: planning for 2 × cpu" in first.stdout
    chosen = layout_of(tmp_path / "run" / "config.yaml")
    assert chosen["layout"] == GIVEN
    again = train(*arguments, "training.max_steps=2", "training.resume=auto", "overwrite=false")
    assert again.status == 0, again.stderr
    assert "layout=free: that of the run that is resumed" in again.stdout
    assert layout_of(tmp_path / "run" / "config.yaml") == chosen
