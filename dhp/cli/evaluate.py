"""`python -m dhp evaluate loss RUN_OR_MODEL …`: the loss of a checkpoint or a model on held-out data."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from dhp.base.errors import ConfigError
from dhp.base.interrupts import heed, interruptible
from dhp.base.startup import StartUp
from dhp.checkpoint.folder import find_checkpoint
from dhp.config.load import compose_config
from dhp.config.parts import parts
from dhp.config.run_dir import config_of
from dhp.config.schema import Config
from dhp.config.search_path import named_file


def main(arguments: Sequence[str]) -> int:
    """evaluate loss: measure the loss of data.eval_datasets, without training.

    PATH is a run's directory (its newest checkpoint, or `checkpoints/best`), a checkpoint, or the directory of a
    Hugging Face model. A run's own config.yaml says the layout and the data; for a model, name a FILE.yaml or
    --config-name. key=value changes either, as data.eval_datasets=[NAME].
    """
    parser = argparse.ArgumentParser(
        prog="python -m dhp evaluate", description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["loss"])
    parser.add_argument("path", metavar="PATH", type=Path, help="a run, a checkpoint, or a model's directory")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--json", action="store_true", help="a JSON object a dataset, on stdout alone")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="FILE.yaml, overrides")
    given = parser.parse_intermixed_args(arguments)
    heed()
    checkpoint = None if (given.path / "config.json").is_file() else find_checkpoint(given.path)
    config = _configuration(given, checkpoint)
    logs = tempfile.mkdtemp(prefix="dhp-evaluate-")
    say = _silent if given.json else StartUp(time.perf_counter())
    from dhp.run.evaluation import evaluate  # it brings torch and Ray along

    with interruptible():
        found = evaluate(replace(config, run_dir=logs), checkpoint, say)
    shutil.rmtree(logs)  # left where something went wrong: the actors' logs are in it
    for metrics in found:
        shown = f"{metrics.dataset or 'all together':16} loss {metrics.loss:.4f}" if metrics.loss is not None else "-"
        counted = f"{metrics.target_tokens:,} target tokens  {metrics.samples:,} samples  {metrics.seconds:.1f} s"
        print(json.dumps(asdict(metrics)) if given.json else f"{shown}  {counted}")
    return 0


def _configuration(given: argparse.Namespace, checkpoint: Path | None) -> Config:
    """The configuration to evaluate by, with the data that are evaluated in the place of those that trained."""
    (name, path), overrides = named_file(given.settings, given.config_name, given.config_path)
    if name is None and checkpoint is not None:
        name, path = "config", str(config_of(checkpoint).parent)
    if name is None:
        raise ConfigError(f"{given.path} is a model: name a FILE.yaml or --config-name=NAME for data and layout")
    config = compose_config(name, path, overrides)
    if not config.data.eval_datasets:
        raise ConfigError("data.eval_datasets is empty: add data.eval_datasets=[NAME], of data.data_registry")
    if checkpoint is None:
        own = {part: replace(section, model_name=str(given.path)) for part, section in parts(config).items()}
        config = replace(config, **own)
    data = replace(config.data, datasets=list(config.data.eval_datasets), balance="random", balance_window=None)
    training = replace(
        config.training, eval_steps=None, eval_answers=0, best_metric=None, trace=False, loggers=[], resume="never"
    )
    return replace(config, data=data, training=training, tiny_assets=None, overwrite=False)


def _silent(text: str) -> None:
    pass
