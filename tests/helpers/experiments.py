"""The command lines of experiments, read by their own parsers without running anything."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Parsed(Exception):
    """Ends an experiment behind its parser."""


def folders() -> set[str]:
    """Experiments that can be run: folders with a `__main__.py`."""
    return {file.parent.name for file in (ROOT / "experiments").glob("*/__main__.py")}


def accepts(monkeypatch: pytest.MonkeyPatch, name: str, arguments: Sequence[str]) -> bool:
    """Whether the parser of `python -m experiments.NAME` takes these arguments."""
    main = import_module(f"experiments.{name}.__main__").main
    with monkeypatch.context() as patched:
        for method in ("parse_args", "parse_intermixed_args"):
            patched.setattr(argparse.ArgumentParser, method, _ending(getattr(argparse.ArgumentParser, method)))
        patched.setattr("sys.argv", [name, *arguments])
        try:
            main()
        except Parsed:
            return True
        except SystemExit:
            return False
    raise AssertionError(f"experiments.{name} ran without reading its arguments")


def _ending(original: Any) -> Any:
    def parse(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        raise Parsed

    return parse
