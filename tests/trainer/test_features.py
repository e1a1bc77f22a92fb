"""Who may keep features, where, and how many bytes each rank may add."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.core.batch import FeatureSettings, KeepSettings
from dhp.core.errors import ConfigError
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import plan_run
from dhp.trainer.preflight import GIB, check_features, check_folder, feature_settings, keep_settings
from dhp.trainer.settings import needed_paths, stage_settings

FROZEN = ("training.frozen=[vision,projector]", "vision.zero_stage=0")


def config_of(model: str, *overrides: str) -> Config:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    return resolve(compose_config("tiny", overrides=[*names, *overrides]))


def check(model: str, *overrides: str) -> None:
    config = config_of(model, *overrides)
    check_features(config, plan_run(config, model).graph)


@pytest.mark.parametrize(
    "trained",
    [[], ["training.frozen=[vision]"], ["training.trainable=[projector]"], [*FROZEN, "vision.lora.rank=2"]],
    ids=["all", "the projector", "the projector alone", "adapters"],
)
def test_what_is_trained_is_not_kept(trained: list[str], made_model: str) -> None:
    with pytest.raises(ConfigError, match=r"cache_features=/kept with something of vision trained.*training\.frozen="):
        check(made_model, "data.cache_features=/kept", *trained)
    check(made_model, *trained)


def test_a_frozen_tower_may_be_kept(made_model: str) -> None:
    check(made_model, "data.cache_features=/kept", *FROZEN)
    check(made_model, "data.cache_features=/kept", *FROZEN, "text.lora.rank=2")


def test_the_room_is_shared_out(made_model: str, tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "file").write_bytes(b"1" * (GIB >> 10))
    kept = f"data.cache_features={tmp_path}"
    graph = lambda config: plan_run(config, made_model).graph
    of = lambda *more: keep_settings(config := config_of(made_model, *FROZEN, *more), graph(config))
    assert of() == {}
    assert of(kept) == {"vision": KeepSettings(str(tmp_path))}
    two = (kept, "vision.num_actors=2")
    assert of(*two, "data.cache_features_gib=0.5") == {
        "vision": KeepSettings(str(tmp_path), (GIB // 2 - (GIB >> 10)) // 2)
    }
    assert of(*two, "data.cache_features_gib=0.0001") == {"vision": KeepSettings(str(tmp_path), 0)}


def test_readers_and_ranks_are_told(made_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("dhp.models.empty.digest_tower", lambda *given: asked.append(given) or "digest")
    config = config_of(
        made_model, *FROZEN, "data.cache_features='~/kept'", "vision.dtype=bfloat16", "text.dtype=float32"
    )
    folder = str(Path("~/kept").expanduser())
    told = feature_settings(config)
    assert told == FeatureSettings(folder, "digest") and feature_settings(config_of(made_model)) is None
    ((*wanted, parts),) = asked
    assert (wanted, list(parts)) == ([made_model, "bfloat16"], ["vision", "text"])
    assert feed_settings(config).features is None  # who looks at samples sees their pixels
    assert feed_settings(config, features=told).features == told
    needs = needed_paths(config, None)
    assert [part for part, paths in needs.items() if paths.get("data.cache_features") == folder] == ["vision", "data"]
    graph = plan_run(config, made_model).graph
    keep = KeepSettings(folder, 7)
    assert stage_settings(config, graph, graph.stage("vision"), "cpu", 1, features=keep).features == keep


def test_the_folder_is_tried_before_a_run(made_model: str, tmp_path: Path) -> None:
    check_folder(config_of(made_model, f"data.cache_features={tmp_path / 'new'}"))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data.cache_features=.*file cannot be written"):
        check_folder(config_of(made_model, f"data.cache_features={tmp_path / 'file'}"))
    check_folder(config_of(made_model))
