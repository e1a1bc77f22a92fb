"""Commands: the one that a row says it came from, and those that an experiment runs as a user would."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
LIMIT_S = 3600.0
SHOWN = 3000  # characters of what a failed command printed, to either stream
FILES = ("--out", "--plot", "--read", "--folder")  # options whose words are places
SEVERAL = "--read"  # which takes more than one
TRAINED = "--trained"  # which changes figures: its place is left open


def command_of(module: str, arguments: Sequence[str] | None = None) -> str:
    """`python -m experiments.NAME …` without what changes no figure, as files of this machine. module: the name.
    arguments: None: those of this process."""
    kept, of = list[str](), ""  # of: the option whose words come
    for word in sys.argv[1:] if arguments is None else arguments:
        name, joined, _ = word.partition("=")
        if name == TRAINED:
            kept += [TRAINED, "DIR"]
        elif name not in FILES and (word.startswith("--") or of not in (*FILES, TRAINED)):
            kept.append(word)
        if word.startswith("--"):
            of = "" if joined else name
        elif of != SEVERAL:
            of = ""
    return shlex.join(["python", "-m", f"experiments.{module}", *kept])


def run_module(
    words: Sequence[str], variables: Mapping[str, str] = MappingProxyType({}), limit_s: float = LIMIT_S
) -> str:
    """What `python -m` with these words prints. variables: of its environment, beside those of this process.

    Raises RuntimeError with the end of what a failed command printed, subprocess.TimeoutExpired after limit_s seconds.
    """
    command = [sys.executable, "-m", *words]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        shown = f"{done.stdout[-SHOWN:]}\n{done.stderr[-SHOWN:]}"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{shown}")
    return done.stdout
