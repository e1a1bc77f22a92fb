"""Opens a run's directory: refused, emptied or continued."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dhp.config.command_line import compose_config, to_config
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.hydra_errors import translated_errors
from dhp.config.parts import OPTIONAL, PARTS, parts, read_datasets, split_share
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.files import is_remote, remove
from dhp.core.locks import locked
from dhp.core.process import say_nothing

_MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # any of these says that something was here
_RECORD = (*_MARKS, "ranks.jsonl", "events.jsonl", "report.html", "trace.json", "tb", "faults")
_LOGGERS = {"wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlog"}  # where each leaves a run, by its name
_RANK_LOG = re.compile(rf"({'|'.join(PARTS)}|data)(\.\d+)?(-\w+)*\.(log|stacks|heartbeat)")
_CHECKPOINT = re.compile(r"step_\d+(\.(partial|removed))?|best(\.json)?(\.\d+\.tmp)?")
# config.yaml of a run has all of them, that of an earlier release too.
_SECTIONS = {"run_dir", *(name for name in PARTS if name not in OPTIONAL), "training", "data", "cluster"}


def check_run_dir(config: Config) -> None:
    """Raise ConfigError when run_dir is empty text or a file, holds a run that this one neither replaces nor
    continues, when replacing that run would remove what this one reads, or when its logs would be elsewhere.

    Changes nothing."""
    if not config.run_dir.strip():
        raise ConfigError(
            "run_dir is empty, which would mean the working directory: was a shell variable not set? Give a directory "
            "that is new, or leave run_dir out"
        )
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir} is a file; give a directory that is new or empty")
    goes_on = continues(config)
    if goes_on and config.overwrite:
        raise ConfigError(
            f"overwrite=true would remove the checkpoints in run_dir={run_dir} that "
            f"training.resume={config.training.resume} asks to continue from. Set one of them only."
        )
    if not goes_on and not _never_began(run_dir):
        _refuse_other_runs(run_dir, config.overwrite)
    removed = list(_removed(config))
    refuse_to_remove(removed, config)
    logs = run_dir / "logs"
    if logs.is_symlink() and logs not in removed:
        raise ConfigError(
            f"{logs} is a link, and this run's ranks would write their logs into what it leads to "
            f"({os.readlink(logs)}), maybe another run's. Put a directory in its place, or choose another run_dir"
        )


def make_run_dir(config: Config) -> Path:
    """Create run_dir, without anything that an overwritten run left in it, and return it. Raises ConfigError.

    Only what runs write there is removed, and only where a run's record says that it was one; other files in the
    directory stay. A run that ended before its first step is replaced without being asked."""
    check_run_dir(config)
    run_dir = Path(config.run_dir)
    for path in list(_removed(config)):
        remove(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be created ({error.strerror}); choose another") from error
    return run_dir


@contextmanager
def run_directory(config: Config, say: Callable[[str], None] = say_nothing) -> Iterator[Path]:
    """Hold run_dir and training.checkpoint_dir for the time of a run, so that no other one writes there: ConfigError
    where one does. `make_run_dir` is for the block to call. say: receives a line on what is waited for.

    A run that is refused (ConfigError) before its first step leaves nothing in run_dir, and no new directory that is
    empty."""
    check_run_dir(config)
    run_dir, existed = Path(config.run_dir), Path(config.run_dir).exists()
    checkpoints = Path(config.training.checkpoint_dir or run_dir / "checkpoints")
    with ExitStack() as stack:
        stack.enter_context(locked(run_dir, "run_dir", say))
        if checkpoints.resolve() != run_dir.resolve():
            stack.enter_context(locked(checkpoints, "training.checkpoint_dir", say))
        try:
            yield run_dir
        except BaseException as error:
            if isinstance(error, ConfigError) and _never_began(run_dir):
                for path in list(_record(run_dir)):
                    remove(path)
            if not existed:
                with suppress(OSError):  # it is not empty, or was never made
                    (run_dir / "logs").rmdir()
            raise


def replaces_checkpoints(config: Config) -> bool:
    """Whether `make_run_dir` removes the checkpoints in training.checkpoint_dir: those of the run that is replaced. In
    a directory elsewhere they stay."""
    own = Path(config.run_dir).absolute() / "checkpoints"
    same = Path(str(config.training.checkpoint_dir)).absolute() == own
    return config.overwrite and same and _is_run(Path(config.run_dir))


def _refuse_other_runs(run_dir: Path, overwrite: bool) -> None:
    marks = [mark for mark in _MARKS if (run_dir / mark).exists()]
    if not marks:
        return
    if not overwrite:
        raise ConfigError(
            f"run_dir={run_dir} already holds a run ({', '.join(marks)}), and overwrite=false keeps it. "
            "Choose another run_dir, set training.resume=auto to continue that run, or overwrite=true to replace it "
            "and its checkpoints."
        )
    if not _is_run(run_dir):
        raise ConfigError(
            f"overwrite=true replaces runs only, and run_dir={run_dir} holds {', '.join(marks)} but no run's record: "
            "the config.yaml that a run writes, beside metrics.jsonl or summary.json. Choose another run_dir, or move "
            "these files away yourself."
        )


def refuse_to_remove(removed: Sequence[Path], config: Config) -> None:
    """Raise ConfigError where something that the run reads is in one of the files or folders that are to be removed."""
    for key, given in _read_paths(config):
        holding = next((path for path in removed if _lies_in(given, path)), None)
        if holding is not None:
            raise ConfigError(
                f"{key}={given} lies in {holding}, which is removed with the run that run_dir={config.run_dir} holds. "
                "Move it elsewhere first, or choose another run_dir."
            )


def _read_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Paths that the run reads, by key; hub ids and words such as auto are no paths that exist."""
    yield from ((f"{name}.model_name", part.model_name) for name, part in parts(config).items())
    yield "training.resume", config.training.resume
    own = Path(config.run_dir) / "checkpoints"
    if config.training.checkpoint_dir and Path(config.training.checkpoint_dir).absolute() != own.absolute():
        yield "training.checkpoint_dir", config.training.checkpoint_dir
    yield "tiny_assets", config.tiny_assets or ""
    yield "data.cache_dir", config.data.cache_dir or ""
    yield "data.cache_features", config.data.cache_features or ""
    yield "memory.cache_dir", config.memory.cache_dir or ""
    for name in read_datasets(config.data):
        entry = config.data.data_registry.get(name)
        if entry is not None:
            yield f"data.data_registry.{name}.annotation_path", entry.annotation_path
            yield f"data.data_registry.{name}.data_path", entry.data_path


def _removed(config: Config) -> Iterator[Path]:
    """Paths that creating this run's directory removes."""
    run_dir = Path(config.run_dir)
    if continues(config) or not _is_run(run_dir):
        return
    if config.overwrite or _never_began(run_dir):
        yield from _record(run_dir)
    if not config.overwrite:
        return
    checkpoints = run_dir / "checkpoints"
    if checkpoints.is_symlink():
        yield checkpoints  # what it leads to stays
    elif checkpoints.is_dir():
        yield from (path for path in sorted(checkpoints.iterdir()) if _CHECKPOINT.fullmatch(path.name))


def _record(run_dir: Path) -> Iterator[Path]:
    """Paths that a run writes besides its checkpoints; of the logs only its ranks', because a scheduler's may be there,
    and the folders of those loggers that it had."""
    yield from (run_dir / name for name in _RECORD if os.path.lexists(run_dir / name))
    yield from (
        path for path in (run_dir / "logs", run_dir / "loggers") if path.is_symlink()
    )  # what they lead to stays
    if not (run_dir / "loggers").is_symlink():
        for name, folder in _LOGGERS.items():
            own = [run_dir / "loggers" / f"{name}.{kind}" for kind in ("id", "log")]
            if any(file.is_file() for file in own):
                yield from (path for path in (*own, run_dir / folder) if os.path.lexists(path))
    if not (run_dir / "logs").is_symlink():
        yield from (log for log in sorted((run_dir / "logs").glob("*.*")) if _RANK_LOG.fullmatch(log.name))


def _is_run(run_dir: Path) -> bool:
    """Whether a run's own record is there: its configuration, and what it writes from its start or at its end."""
    if not any((run_dir / name).is_file() for name in ("metrics.jsonl", "summary.json")):
        return False
    try:
        written = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(written, dict) and written.keys() >= _SECTIONS


def _never_began(run_dir: Path) -> bool:
    """Whether the run there ended before its first step, so that it may be replaced without being asked."""
    try:
        ended = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] != "completed"
        steps = (run_dir / "metrics.jsonl").stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return ended and not steps and _is_run(run_dir)


def _lies_in(given: str, folder: Path) -> bool:
    if not given or not Path(given).exists():
        return False
    path, folder = Path(os.path.abspath(given)), Path(os.path.abspath(folder))
    if path.is_relative_to(folder):
        return True
    return not folder.is_symlink() and path.resolve().is_relative_to(folder.resolve())


def continues(config: Config) -> bool:
    """Whether training.resume asks for the run that run_dir holds."""
    resume = config.training.resume
    if resume in ("auto", "never"):
        return resume == "auto"
    run_dir = Path(config.run_dir).resolve()
    return run_dir in (Path(resume).resolve(), *Path(resume).resolve().parents)


def config_of(checkpoint: Path) -> Path:
    """The configuration of a checkpoint's run, from the parent of its directory of checkpoints. Raises ConfigError."""
    for folder in (checkpoint.absolute().parent.parent, checkpoint.resolve().parent.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise ConfigError(f"{checkpoint} has no config.yaml of its run two folders up: name a FILE.yaml")


# What the command line alone decides: where is written, and whether something is fetched. None is needed to read a run.
_OF_THE_CALLER = {
    **{"training.checkpoint_dir": "null", "data.cache_dir": "null", "data.cache_features": "null"},
    **{"data.cache_features_gib": "null", "memory.cache_dir": "null", "data.allow_http": "false"},
}
_ADDRESS = "cluster.address"
_HERE = ("local", "auto")
_PLUGINS = "plugins"


def compose_recorded(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a run's config.yaml, with `overrides` of the command line, which alone say what is written
    where and whether http addresses are fetched.

    Raises ConfigError for anything but plain values, and for the address of a cluster and for plugins that the command
    line does not name: a server at that address may run commands here, and a module's code is run as it is imported."""
    values = plain_values(file)
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    cluster = values.get("cluster")
    address = cluster.get("address", _HERE[0]) if isinstance(cluster, Mapping) else _HERE[0]
    if address not in _HERE and _ADDRESS not in given:
        raise ConfigError(
            f"{file} says {_ADDRESS}={address}, and who answers there may run commands here. If you know that cluster, "
            f"add {_ADDRESS}={address}; else add {_ADDRESS}=local"
        )
    plugins = values.get(_PLUGINS)
    if plugins and _PLUGINS not in given:
        named = f"{_PLUGINS}=[{','.join(map(str, plugins))}]" if isinstance(plugins, list) else f"{_PLUGINS}=[NAME]"
        raise ConfigError(
            f"{file} names modules whose code would run here, {_PLUGINS}={plugins}. If you know them, add {named}"
        )
    own = [f"{key}={value}" for key, value in _OF_THE_CALLER.items() if key not in given]
    return compose_config(file.stem, str(file.parent), [*own, *overrides])


def require_named_addresses(data: DataConfig, names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise ConfigError for a dataset of these names that a record puts behind an address which the command line does
    not name: its author could make this machine ask any address that it can reach."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    for name, _ in map(split_share, names):
        entry = data.data_registry.get(name, DatasetEntry())
        for field, path in (("annotation_path", entry.annotation_path), ("data_path", entry.data_path)):
            key = f"data.data_registry.{name}.{field}"
            if is_remote(path) and key not in given:
                raise ConfigError(
                    f"{key}={path}: an address that a run's record names is not asked by itself. If you know it, add "
                    f"{key}={path}"
                )


def read_recorded(file: Path) -> Config:
    """The configuration in a run's config.yaml, to be looked at: nothing is to be written or joined as it says. Raises
    ConfigError for anything but plain values of the schema."""
    values = plain_values(file)
    with translated_errors():
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(values)))
        assert isinstance(merged, DictConfig)
        return to_config(merged)


def plain_values(file: Path) -> Mapping[Any, Any]:
    """The file's contents. Raises ConfigError for interpolations, which may name the reader's environment, and for
    other files and parts of Hydra that it asks for."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        texts = list(_texts(values, set()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({' '.join(str(error).split())}). Name a FILE.yaml") from error
    wrong = next((text for text in texts if "${" in text), None)
    if wrong is None and isinstance(values, Mapping):
        wrong = next((key for key in ("defaults", "hydra") if key in values), None)
    if wrong is not None or not isinstance(values, Mapping):
        raise ConfigError(
            f"{file} is not the plain record that a run writes: it has {wrong or 'no keys'}. Name a FILE.yaml of your "
            "own for layout and data"
        )
    return values


def _texts(values: Any, seen: set[int]) -> Iterator[str]:
    """Every text, keys included. Raises ValueError for one value in several places (YAML's aliases), which may be in
    itself, or in exponentially many places; a run writes none."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, (dict, list)):
        if id(values) in seen:
            raise ValueError("one value stands in several places")
        seen.add(id(values))
        for one in [*values, *values.values()] if isinstance(values, dict) else values:
            yield from _texts(one, seen)
