"""What parts of a run are told of its configuration."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from dhp.config.load import compose_config, to_yaml
from dhp.config.resolve import resolve
from dhp.config.run_dir import check_run_dir
from dhp.data.reading import Reading
from dhp.observe.metrics import StepMetrics
from dhp.observe.recorder import Recorder
from dhp.wiring import feed_settings, kept_settings, resume_line

OVERRIDES = ["data.datasets=[shapes,'shapes%50']", "data.max_tokens=900", "data.video_fps=1", "data.allow_http=true"]


def test_how_samples_are_read_reaches_the_dataset_actor() -> None:
    settings = feed_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert settings.datasets == ("shapes", "shapes%50")
    assert settings.reading == Reading(allow_http=True, max_tokens=900, video_fps=1.0)


def test_a_resumed_run_keeps_shares_and_weights() -> None:
    """Both decide which samples a step has; a weight of one is not told, as before there were weights."""
    plain = kept_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert plain["data.datasets"] == ["shapes", "shapes%50"]
    heavy = compose_config("tiny", overrides=[*OVERRIDES, "data.data_registry.shapes.weight=1.5"])
    assert kept_settings(resolve(heavy))["data.datasets"] == ["shapes (weight 1.5)", "shapes%50 (weight 1.5)"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_line_to_resume_reads_the_stopped_runs_own_configuration(tmp_path: Path, overwrite: bool) -> None:
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    config = resolve(compose_config("tiny", overrides=[f"run_dir='{run_dir}'", f"overwrite={overwrite}", "seed=5"]))
    newest = Path(config.training.checkpoint_dir) / "step_3"
    assert "no checkpoint of this run yet" in resume_line(config, None)
    assert "no checkpoint of this run yet" in resume_line(config, tmp_path / "other" / "step_3")
    with pytest.raises(KeyboardInterrupt), Recorder(run_dir, 1, {}, to_yaml(config)) as recorder:
        recorder.record(StepMetrics(step=3, loss=2.0))
        raise KeyboardInterrupt
    python, dash, module, path, name, *overrides = shlex.split(resume_line(config, newest))
    assert (python, dash, module) == ("python", "-m", "dhp.train_ray")
    again = resolve(compose_config(name.partition("=")[2], path.partition("=")[2], overrides))
    assert (again.seed, again.training.resume, again.run_dir) == (5, "auto", str(run_dir))
    check_run_dir(again)
