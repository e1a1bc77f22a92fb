"""Make the cards of docs/reference/cards anew, each by `dhp card` in a process of its own.

`python -m scripts.cards` makes those that are stale: with another version of what a card names, or of other layouts
than are tried now, as after an update of transformers. Names as arguments are made anew in any case, in that order.
--at-once=N makes so many at a time (1 else), --stale only names what is stale. A card takes some minutes and two cores.
The exit status is 0 where each could be made; what is equal in a family, its card says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dhp.cli.card import write_index
from dhp.tiny.looks import family_names

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "docs" / "reference" / "cards"
LIMIT_S = 3600


def main(arguments: Sequence[str], folder: Path = CARDS) -> int:
    """Make what is asked for, or what is stale, and the index."""
    options = dict(one.removeprefix("--").partition("=")[::2] for one in arguments if one.startswith("--"))
    names = [one for one in arguments if not one.startswith("--")] or stale_cards(folder)
    unknown = sorted(set(names) - set(family_names())) + sorted(options.keys() - {"at-once", "stale"})
    if unknown:
        sys.exit(f"{', '.join(unknown)}: neither a family ({', '.join(family_names())}) nor --at-once=N or --stale")
    if "stale" in options:
        print(" ".join(stale_cards(folder)) or "none is stale")
        return 0
    with ThreadPoolExecutor(int(options.get("at-once", 1))) as pool:
        failed = [name for name, made in zip(names, pool.map(partial(_make, folder), names), strict=True) if not made]
    write_index(folder)
    if failed:
        print(f"not made: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def stale_cards(folder: Path) -> list[str]:
    """Families without a card that was made with what is installed now, of the layouts that are tried now."""
    files = {name: folder / f"{name}.yaml" for name in family_names()}
    return [name for name, file in files.items() if not file.is_file() or is_stale(yaml.safe_load(file.read_text()))]


def is_stale(card: Mapping[str, Any]) -> bool:
    from dhp.doctor.card import LAYOUTS, versions

    tried = {one["name"]: tuple(one["settings"]) for one in card["layouts"]}
    return card["versions"] != versions() or tried != dict(LAYOUTS)


def _make(folder: Path, name: str) -> bool:
    """Whether it was written; a family that is not equal has a card too."""
    file = folder / f"{name}.yaml"
    before = file.stat().st_mtime_ns if file.is_file() else 0
    command = [sys.executable, "-m", "dhp", "card", name, f"out={folder}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing was said"]
    except subprocess.TimeoutExpired:
        said = [f"took more than {LIMIT_S} s"]
    made = file.is_file() and file.stat().st_mtime_ns > before
    card = yaml.safe_load(file.read_text()) if made else {}
    print(f"{name}: {'verified' if card.get('verified') else 'not equal in all' if made else said[-1]}", flush=True)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
