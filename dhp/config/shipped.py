"""The folder of the files that come with dhp. A module of its own, so that it needs no Hydra."""

from pathlib import Path


def shipped_directory() -> Path:
    """The `configs/` that comes with dhp: inside the package when installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
