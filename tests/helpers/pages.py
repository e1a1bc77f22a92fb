"""Follows a page as its reader would: each line of its shell blocks, from top to bottom, in one folder."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import forks, shared_ray
from tests.helpers.runs import ROOT

LIMIT_S = 600
# A command that starts actors joins the Ray that tests share, and its process is a fork of one with the imports done.
_COMMAND = """\
#!/bin/sh
case "$*" in
    *--help*|*--cfg*|*cluster.address=*) exec "{python}" -m dhp "$@" ;;
    train*|evaluate*|generate*|"doctor loss"*)
        exec "{python}" -m dhp "$@" cluster.address={address} cluster.threads_per_actor=1 ;;
    *) exec "{python}" -m dhp "$@" ;;
esac
"""
_PYTHON = """\
#!/bin/sh
case "$1 $2" in
    "-m dhp") shift 2; exec dhp "$@" ;;
    "-m dhp.train_ray") shift 2; exec dhp train "$@" ;;
    *) exec "{python}" "$@" ;;
esac
"""


@dataclass(frozen=True)
class Followed:
    """What came of a page. printed: by each line of shell, as the page has it."""

    folder: Path
    printed: Mapping[str, str]

    def shown(self, beginning: str) -> str:
        """What the one line with that beginning printed."""
        (found,) = [text for line, text in self.printed.items() if line.startswith(beginning)]
        return found


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)


def follow(page: str, folder: Path, programs: Path, more: Mapping[str, str] | None = None) -> Followed:
    """Write the page's files, which have their name on the first line, and run its shell. programs: a folder for a
    command `dhp`. more: by a line's beginning, words to add to it, as for a run that is shorter than the page's."""
    environment = environment_of(programs)
    printed = {}
    for language, text in blocks(page):
        name = re.match(r"# (\S+)\n", text)
        if language in ("python", "yaml") and name is not None:
            (folder / name[1]).write_text(text, encoding="utf-8")
        for line in text.splitlines() if language == "sh" else ():
            added = " ".join(words for beginning, words in (more or {}).items() if line.startswith(beginning))
            printed[line] = run_line(f"{line} {added}".strip(), folder, environment)
    return Followed(folder, printed)


def run_line(line: str, folder: Path, environment: dict[str, str]) -> str:
    """What the line prints; a variable that it exports is there for the lines after it."""
    variable = re.fullmatch(r"export (\w+)=.*", line)
    words = ["bash", "-c", line if variable is None else f"{line}; printenv {variable[1]}"]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if variable is not None:
        environment[variable[1]] = done.stdout.strip()
    return done.stdout


def environment_of(programs: Path, starts_actors: bool = True) -> dict[str, str]:
    """Of a shell in which `dhp`, and `python -m dhp`, join the Ray that tests share. programs: a folder for them.
    starts_actors: whether any of its commands does; else neither that Ray nor the server of forks is started."""
    address, joining = shared_ray.join() if starts_actors else ("local", {})
    (programs / "dhp").write_text(_COMMAND.format(python=sys.executable, address=address))
    (programs / "python").write_text(_PYTHON.format(python=sys.executable))
    for name in ("dhp", "python"):
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **(forks.environment() if starts_actors else {}), **joining, "PATH": path}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    return environment


def copy_examples(folder: Path) -> Path:
    """The folder `examples` in a new place, below `folder`."""
    return Path(shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__")))
