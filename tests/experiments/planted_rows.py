"""Rows that do what a row of the check of a GPU may do wrong. They import nothing that takes time."""

import os
import time
from pathlib import Path
from typing import Any


def raising(_: Any) -> dict[str, Any]:
    raise ValueError("planted")


def dying(_: Any) -> dict[str, Any]:
    os._exit(7)


def hanging(_: Any) -> dict[str, Any]:
    time.sleep(600)
    return {}


def lacking(_: Any) -> dict[str, Any]:
    return {"error": "dhp cannot be imported", "serves": False}


def who(_: Any) -> dict[str, Any]:
    return {"ok": True, "pid": os.getpid()}


def telling(_: Any, file: str) -> dict[str, Any]:
    """Says which process it is, whole at once, and hangs."""
    Path(f"{file}.new").write_text(str(os.getpid()))
    os.rename(f"{file}.new", file)
    return hanging(_)


def deviating(_: Any) -> dict[str, Any]:
    return {"ok": False, "error_of_loss": 1.0}
