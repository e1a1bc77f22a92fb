"""Where a model's configuration is read from: its own directory, a hub id, or a shape that dhp ships."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from dhp.base.errors import ModelError
from dhp.config.shipped import shipped_directory


def config_source(model_name: str) -> str:
    """Where transformers reads the configuration without weights: a directory, a hub id, or a file that dhp ships.

    A directory and a hub id in the local cache are taken as they are. For other hub ids the shipped shape, which holds
    the fields of config.json that say how large the model is, comes before a download.
    Raises ModelError when there is none of these.
    """
    if Path(model_name).is_dir() or _readable(model_name, local_files_only=True) is None:
        return model_name
    shipped = shapes_directory() / f"{model_name}.json"
    if shipped.is_file():
        return str(shipped)
    failure = _readable(model_name)
    if failure is None:
        return model_name
    folder = shapes_directory()
    known = sorted(str(file.relative_to(folder)).removesuffix(".json") for file in folder.rglob("*.json"))
    raise ModelError(
        f"{model_name}: its configuration cannot be read ({failure}), and dhp ships no shape of it. "
        f"Give a directory with a config.json, or one of {', '.join(known)}"
    )


def _readable(model_name: str, local_files_only: bool = False) -> str | None:
    """None when transformers can read the model's configuration, else the first line of its error."""
    try:
        AutoConfig.from_pretrained(model_name, local_files_only=local_files_only, trust_remote_code=False)
    except (OSError, ValueError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return None


def shapes_directory() -> Path:
    """Shipped shapes, each below it under its hub id."""
    return shipped_directory() / "model" / "shapes"
