"""Shared by commands: weights, their configuration, a folder for logs."""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dhp.checkpoint.folder import find_checkpoint
from dhp.config.command_line import compose_config
from dhp.config.generate_request import unbalanced
from dhp.config.parts import parts
from dhp.config.run_dir import compose_recorded, config_of, require_named_addresses
from dhp.config.schema import Config
from dhp.config.training import without_evaluation
from dhp.config.yaml_files import named_file
from dhp.core.errors import ClusterError, ConfigError, DhpError, PartFailed
from dhp.core.text import did_you_mean, nearest, shell_command

PLUGIN = "--plugin"


class _Parser(argparse.ArgumentParser):
    """Names what a mistyped word or flag most likely meant."""

    def error(self, message: str) -> NoReturn:
        message = message.replace(", key=value", "")  # which argparse calls required with a word that is missing
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        flag = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        known = re.findall(r"[\w-]+", choice[2]) if choice else re.findall(r"--[\w-]+", self.format_usage())
        mistyped = choice or flag
        super().error(message + (did_you_mean([nearest(mistyped[1], known)]) if mistyped else ""))


def make_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `dhp command`. about: its help, laid out as it is to be shown."""
    layout, called = argparse.RawDescriptionHelpFormatter, " ".join(shell_command(command))
    return _Parser(prog=called, description=about, formatter_class=layout)


def add_options(parser: argparse.ArgumentParser) -> None:
    """PATH, and where its configuration comes from."""
    parser.add_argument("path", metavar="PATH", type=Path, help="a run, a checkpoint, or a model's directory")
    add_configuration(parser, "FILE.yaml, overrides")


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """--plugin, of a command without a configuration that could name plugins."""
    words = "an importable module that registers the model's family; several times for several"
    parser.add_argument(PLUGIN, metavar="MODULE", action="append", default=[], dest="plugins", help=words)


def add_configuration(parser: argparse.ArgumentParser, settings: str) -> None:
    """Where a configuration comes from. settings: what stands beside the flags, in words."""
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("settings", nargs="*", metavar="key=value", help=settings)


def read_configuration(
    path: Path | None,
    given: argparse.Namespace,
    settings: Sequence[str],
    missing: str,
    of_run: Callable[[Sequence[str]], Sequence[str]] = list,
) -> tuple[Config, Path | None]:
    """The configuration that the flags or a FILE.yaml name, else that of the run at `path`; and the checkpoint there,
    None for a model's directory, which is the configuration's model then.

    path: a run, a checkpoint or a model; None: the configuration's own model. missing: the error where nothing names a
    configuration. of_run: overrides of a run's own, from those given. Raises ConfigError, CheckpointError."""
    checkpoint = None if path is None or (path / "config.json").is_file() else find_checkpoint(path)
    (name, folder), overrides = named_file(settings, given.config_name, given.config_path)
    if name is not None:
        config = compose_config(name, folder, overrides)
    elif checkpoint is not None:
        config = compose_recorded(config_of(checkpoint), of_run(overrides))
    else:
        raise ConfigError(missing)
    if path is not None and checkpoint is None:
        own: dict[str, Any] = {part: replace(section, model_name=str(path)) for part, section in parts(config).items()}
        config = replace(config, **own)
    return config, checkpoint


def find_configuration(given: argparse.Namespace, datasets: Sequence[str] = ()) -> tuple[Config, Path | None]:
    """The configuration to evaluate by, with the data that are evaluated instead of the training data; and the
    checkpoint, None for a model's directory.

    datasets: names instead of data.eval_datasets. Raises ConfigError, CheckpointError."""
    if any(setting.lstrip("+").startswith("training.eval_answers=") for setting in given.settings):
        raise ConfigError(
            "training.eval_answers is of training: here the loss is measured, and nothing is answered. Leave it out, "
            f"and ask by `python -m dhp generate checkpoint={given.path} prompt=TEXT`"
        )
    missing = f"{given.path} is a model: name a FILE.yaml or --config-name=NAME for data and layout"
    config, checkpoint = read_configuration(given.path, given, given.settings, missing)
    if not (datasets or config.data.eval_datasets):
        raise ConfigError("data.eval_datasets is empty: add data.eval_datasets=[NAME], of data.data_registry")
    if checkpoint is not None:
        require_named_addresses(config.data, datasets or config.data.eval_datasets, given.settings)
    data = replace(unbalanced(config.data), datasets=list(datasets or config.data.eval_datasets))
    training = replace(without_evaluation(config.training), trace=False, loggers=[])
    training = replace(training, resume="never", schedule="sequential")  # no backward
    return replace(config, data=data, training=training, tiny_assets=None, overwrite=False), checkpoint


@contextmanager
def logs_folder(prefix: str) -> Iterator[Path]:
    """A new folder, which is removed at the end, also of what was refused or interrupted. It stays, named on stderr,
    where an actor failed, or where any other exception than dhp's own was raised: its logs may say why."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    kept = False
    try:
        yield folder
    except Exception as error:
        kept = isinstance(error, (PartFailed, ClusterError)) or not isinstance(error, DhpError)
        raise
    finally:
        if kept and any(folder.rglob("*.log")):
            print(f"the actors' logs stay in {folder}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
