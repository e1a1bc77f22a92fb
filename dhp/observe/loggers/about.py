"""The description of a run for its loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class About:
    """project: what runs are grouped by. config: the configuration as YAML. resumed: whether the run continues the one
    that run_dir holds."""

    name: str
    project: str
    run_dir: str
    config: str
    resumed: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Every key of the configuration by its dotted path."""
        return dict(_leaves("", yaml.safe_load(self.config) or {}))

    def id_file(self, logger: str) -> Path:
        """The file of a logger's own name of the run, so that a resumed run goes on in it."""
        return Path(self.run_dir) / "loggers" / f"{logger}.id"

    def earlier_id(self, logger: str) -> str | None:
        """The logger's name of the run that this one continues; None where there is nothing to continue."""
        file = self.id_file(logger)
        return file.read_text(encoding="utf-8").strip() if self.resumed and file.is_file() else None

    def keep_id(self, logger: str, value: str) -> None:
        """Remember the logger's name of the run."""
        self.id_file(logger).write_text(value + "\n", encoding="utf-8")


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
