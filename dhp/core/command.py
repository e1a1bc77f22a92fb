"""How a person calls dhp in this environment: by its console command, or by its modules."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_NAME, _TRAINING = "dhp", "train"


def own_command(*words: str) -> list[str]:
    """The words of a shell command that runs dhp's command `words[0]` with the others as its arguments.

    They can be pasted: `dhp …` where a shell finds the console command of the Python that runs this process, its path
    where that was called by its path, else `python -m dhp …`, and `python -m dhp.train_ray …` for `train`.
    """
    if _has_console_command():
        return [_NAME, *words]
    if Path(sys.argv[0]).name == _NAME and Path(sys.argv[0]).is_file():
        return [sys.argv[0], *words]
    if words[:1] == (_TRAINING,):
        return ["python", "-m", "dhp.train_ray", *words[1:]]
    return ["python", "-m", _NAME, *words]


def _has_console_command() -> bool:
    found = shutil.which(_NAME)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
