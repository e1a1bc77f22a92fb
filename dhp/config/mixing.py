"""`name%50` in data.datasets: half of a dataset's samples."""

import re

from dhp.base.errors import ConfigError
from dhp.config.data import DataConfig

_SHARE = re.compile(r"(.+)%([^%]*)")


def split_share(text: str) -> tuple[str, float]:
    """The dataset's name, and the share of its samples that is used, 0 < share <= 1. Raises ConfigError."""
    found = _SHARE.fullmatch(text)
    if found is None:
        return text, 1.0
    name, percent = found.groups()
    if not re.fullmatch(r"\d+(\.\d+)?", percent) or not 0 < float(percent) <= 100:
        raise ConfigError(
            f"data.datasets: {text} asks for {percent or 'no number of'} percent of {name}, but 0 < percent <= 100; "
            f"write {name}%50 for half of it. More than once is data.data_registry.{name}.weight"
        )
    return name, float(percent) / 100


def read_datasets(data: DataConfig) -> list[str]:
    """Names in the registry of all datasets that a run reads, to train on and to evaluate, each once."""
    return list(dict.fromkeys(split_share(text)[0] for text in (*data.datasets, *data.eval_datasets)))
