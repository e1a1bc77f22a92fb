"""The command that a row says it came from: without what changes no figure, as files of this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

FILES = ("--out", "--plot", "--read", "--folder")  # options whose words are places
SEVERAL = "--read"  # which takes more than one
TRAINED = "--trained"  # which changes figures: its place is left open


def command_of(module: str, arguments: Sequence[str] | None = None) -> str:
    """`python -m experiments.NAME …`. module: the name. arguments: None: those of this process."""
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
