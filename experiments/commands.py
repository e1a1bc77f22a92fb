"""The command that a row says it came from: without what changes no figure, as files of this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

FILES = ("--out", "--plot", "--read", "--folder", "--trained")  # options whose words are places
TRAINED = "--trained"  # which does change figures: its place is left open


def command_of(module: str, arguments: Sequence[str] | None = None) -> str:
    """`python -m experiments.NAME …`. module: the name. arguments: None: those of this process."""
    words, kept, skipped = list(sys.argv[1:] if arguments is None else arguments), [], False
    for word in words:
        skipped = word in FILES or (skipped and not word.startswith("--"))
        if not skipped:
            kept.append(word)
        elif word == TRAINED:
            kept += [TRAINED, "DIR"]
    return shlex.join(["python", "-m", f"experiments.{module}", *kept])
