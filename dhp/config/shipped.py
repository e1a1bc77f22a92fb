"""Where the files are that come with dhp. Apart from what reads configurations, so that it needs no Hydra."""

from pathlib import Path


def shipped_directory() -> Path:
    """The `configs/` that comes with dhp: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
