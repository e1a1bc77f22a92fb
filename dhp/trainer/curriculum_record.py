"""Progress of a curriculum: a file in its run_dir, with an entry for each stage that has begun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.core.errors import ConfigError
from dhp.core.files import write_whole

NAME = "stages.json"
_STEPS = "steps"  # an entry has it from the stage's end on


class CurriculumRecord:
    """Entries by the name of a stage's directory, in the order in which they began; each change is written at once.

    Raises ConfigError for a file that is none.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / NAME
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            try:
                entries = json.loads(self.path.read_text(encoding="utf-8"))
                self._entries = {str(name): dict(entry) for name, entry in entries.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self.path} is no record of training stages ({error}): restore it, or choose another run_dir"
                ) from error

    @property
    def begun(self) -> list[str]:
        """Names of the stages that have begun."""
        return list(self._entries)

    def has_ended(self, name: str) -> bool:
        """Whether the stage's end is written down."""
        return _STEPS in self._entries.get(name, {})

    def made_with(self, name: str) -> Mapping[str, Any]:
        """The `made_with` that `begin` recorded for a stage."""
        return self._entries.get(name, {})

    def begin(self, name: str, made_with: Mapping[str, Any]) -> None:
        """A stage begins, or goes on. made_with: what its start is made with, by key."""
        self._entries[name] = self._entries.get(name, {}) | dict(made_with)
        self._write()

    def end(self, name: str, account: Mapping[str, Any]) -> None:
        """A stage is done. account: what the record says of it, `steps` among it."""
        self._entries[name] = self._entries.get(name, {}) | dict(account)
        self._write()

    def remove(self) -> None:
        """No stage has begun any more."""
        self._entries = {}
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self._entries, indent=1) + "\n")
