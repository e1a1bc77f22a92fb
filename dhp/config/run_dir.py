"""The directory of a run: refused when it holds a run already, emptied of that run when told to overwrite."""

import shutil
from pathlib import Path

from dhp.config.schema import Config
from dhp.errors import ConfigError

_MARKS = ("config.yaml", "metrics.jsonl", "summary.json")  # any of these says that a run was here
_LEAVINGS = (*_MARKS, "trace.json", "tb", "logs", "checkpoints")


def check_run_dir(config: Config) -> None:
    """Raise ConfigError when run_dir is a file, or holds a run that this one neither replaces nor continues.

    Changes nothing.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir} is a file; give a directory that is new or empty")
    continues = _continues(config)
    if continues and config.overwrite:
        raise ConfigError(
            f"overwrite=true would remove the checkpoints in run_dir={run_dir} that "
            f"training.resume={config.training.resume} asks to continue from. Set one of them only."
        )
    marks = [mark for mark in _MARKS if (run_dir / mark).exists()]
    if marks and not (config.overwrite or continues):
        raise ConfigError(
            f"run_dir={run_dir} already holds a run ({', '.join(marks)}), and overwrite=false keeps it. "
            "Choose another run_dir, set training.resume=auto to continue that run, or overwrite=true to replace it "
            "and its checkpoints."
        )


def make_run_dir(config: Config) -> Path:
    """Create run_dir, without anything that an overwritten run left in it, and return it. Raises ConfigError.

    Only what runs write there is removed; other files in the directory stay.
    """
    check_run_dir(config)
    run_dir = Path(config.run_dir)
    for name in _LEAVINGS if config.overwrite else ():
        _remove(run_dir / name)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be created ({error.strerror}); choose another") from error
    return run_dir


def replaces_checkpoints(config: Config) -> bool:
    """Whether `make_run_dir` removes the checkpoints in training.checkpoint_dir: those of the run that is replaced. In
    a directory elsewhere they stay."""
    own = Path(config.run_dir).absolute() / "checkpoints"
    return config.overwrite and Path(str(config.training.checkpoint_dir)).absolute() == own


def _continues(config: Config) -> bool:
    """Whether the run that run_dir may hold is the one to be continued."""
    resume = config.training.resume
    if resume in ("auto", "never"):
        return resume == "auto"
    run_dir = Path(config.run_dir).resolve()
    return run_dir in (Path(resume).resolve(), *Path(resume).resolve().parents)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
