"""`evaluate loss`, `evaluate needle` and `generate` of runs of every kind, up to where actors start."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dhp.cli.common import add_options, find_configuration
from dhp.cli.generate import _configuration
from dhp.cli.needle import NAME, _reading
from dhp.config.command_line import compose_config, to_yaml
from dhp.config.data import LimitsConfig
from dhp.config.generation import GenerateRequest
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.trainer.preflight import prepare
from tests.helpers.rows import slow_but

ONE_TEXT = ("text.parallelism=none", "text.num_actors=1")
FROZEN = ("training.frozen=[vision,projector]", "vision.zero_stage=0")
FSDP = ("text.zero_stage=3", "text.zero_engine=fsdp")
KINDS: dict[str, tuple[str, ...]] = {
    "limits of balanced": ("data.balance=balanced", "data.limits.text=200", "training.schedule=vision_ahead"),
    "all limits": (
        *("data.balance=isf", "data.limits.text=200", "data.limits.vision=300", "data.limits.full_text=50"),
        *("data.limits.full_vision=90", "training.groups.projector={{learning_rate: 0.1, warmup_steps: 1}}"),
    ),
    "long tokens": (
        "data.balance=balanced",
        "data.long_tokens=80",
        "data.max_tokens=4000",
        "text.compile=true",
        *ONE_TEXT,
    ),
    "a window": ("data.balance=isf", "data.balance_window=64", "training.max_steps=9", "text.parallelism=autotp"),
    "like lengths, padded": (
        *("data.packing=false", "data.balance=length_group", "training.num_epochs=2"),
        "plugins=[experiments.baselines]",
    ),
    "kept features": ("data.cache_features={folder}/features", "data.cache_features_gib=1", *FROZEN),
    "evaluated": (
        *("training.eval_answers=2", "data.eval_datasets=[shapes]", "training.best_metric=eval_loss/shapes"),
        *("training.save_steps=2", "training.loggers=[wandb]", "training.logger_project=mine"),
    ),
    "planned recomputing": ("text.recompute=auto", "memory.budget_gib=1", "data.shuffle=false"),
    "interleaved": (
        *("text.parallelism=pipeline", "text.virtual_stages=2", "training.schedule=interleaved"),
        *("training.batch_size=8", "training.micro_batch_size=1"),
    ),
    "1f1b": ("text.parallelism=pipeline", "text.cuts=[1]", "training.schedule=1f1b"),
    "deepspeed": ("text.parallelism=deepspeed", "text.zero_stage=3", "vision.parallelism=deepspeed"),
    "a shared row by FSDP2": ("text.parallelism=sequence", *FSDP),
    "12 bytes of states": ("text.parallelism=sequence", "text.dtype=bfloat16", "text.state_bytes=12", *FSDP),
    "adapters": ("text.lora.rank=2", "text.lora.dropout=0.1", "training.resume=auto", "data.on_bad_sample=skip"),
}
QUICK = ("all limits", "kept features", "evaluated", "interleaved", "a shared row by FSDP2", "adapters")
LAID_OUT = {"interleaved": ONE_TEXT, "1f1b": ONE_TEXT}  # a pipeline cannot answer, as generate says


@pytest.mark.parametrize("kind", slow_but(KINDS, *QUICK))
def test_any_run_is_evaluated_and_asked(kind: str, tmp_path: Path, tiny_assets: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1}))
    own = [setting.format(folder=tmp_path) for setting in KINDS[kind]]
    trained = resolve(compose_config("tiny", overrides=[f"tiny_assets={tiny_assets}", f"run_dir={run_dir}", *own]))
    (run_dir / "config.yaml").write_text(to_yaml(trained))

    loss, found = find_configuration(options(run_dir, ["data.eval_datasets=[shapes]"]))
    assert found is not None
    of_plain_rows(prepare(loss, new_run=False))

    (tmp_path / "a.jsonl").write_text("")
    needle, _ = find_configuration(options(run_dir, []), [NAME])
    of_plain_rows(prepare(_reading(needle, tmp_path / "a.jsonl", 16), new_run=False))

    request = GenerateRequest(prompt="a", checkpoint=str(run_dir))
    given = argparse.Namespace(config_name=None, config_path=None)
    asked, found = _configuration(request, given, LAID_OUT.get(kind, ()))
    assert found is not None
    of_plain_rows(prepare(asked, new_run=False, reads=False))


def options(run_dir: Path, settings: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([str(run_dir), *settings])


def of_plain_rows(config: Config) -> None:
    assert (config.data.balance, config.data.balance_window, config.data.long_tokens) == ("random", None, None)
    assert config.data.limits == LimitsConfig()
