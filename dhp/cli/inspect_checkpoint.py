"""`python -m dhp inspect checkpoint RUN_OR_CHECKPOINT [--verify]`: what a checkpoint holds, and whether it is sound."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp.checkpoint.files import read_extents
from dhp.checkpoint.folder import find_checkpoint, step_folders, step_of
from dhp.checkpoint.manifest import FORMAT, OPTIMIZER, check_checkpoint, has_checksums, read_about
from dhp.checkpoint.resume import LAYOUT
from dhp.cli.common import make_parser
from dhp.core.errors import CheckpointError
from dhp.trainer.dry_run import gigabytes


def inspect_checkpoint(arguments: Sequence[str]) -> int:
    """Say what a checkpoint holds, and what stands beside it. Exit status 0; 1 where one of them is damaged."""
    parser = make_parser("inspect checkpoint", inspect_checkpoint.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums, of all of them")
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of text")
    given = parser.parse_args(arguments)
    found = _folders(given.checkpoint)
    states = {folder.name: _state(folder, given.verify) for folder in found}
    newest = next((folder for folder in found if states[folder.name] == "sound"), None)
    about = {} if newest is None else describe(newest)
    if given.json:
        print(json.dumps({"checkpoints": states} | about))
    else:
        print("\n".join([*_lines(about), *(f"{name:14} {state}" for name, state in states.items())]))
    return 0 if all(state == "sound" for state in states.values()) else 1


def describe(checkpoint: Path) -> dict[str, Any]:
    """What a sound checkpoint holds. Raises CheckpointError."""
    about = read_about(checkpoint, ("step", "parts", "settings", "files"))
    sizes = {name: one["bytes"] if has_checksums(about) else one for name, one in about["files"].items()}
    parts = {part: _part(checkpoint / part, sizes, part) for part in about["parts"]}
    return {
        "checkpoint": str(checkpoint),
        "format": about.get(FORMAT, 1),
        "step": about["step"],
        "model_name": about.get("model_name"),
        "bytes": sum(sizes.values()),
        "skipped_samples": about.get("skipped_samples"),
        "parts": parts,
        "settings": about["settings"],
    }


def _folders(path: Path) -> list[Path]:
    """The checkpoint that is meant, or all of a run."""
    for parent in (path / "checkpoints", path):
        if path.is_dir() and (found := step_folders(parent)):
            return found
    if path.is_dir() and path.name.startswith("step_") and path.name[5:].isdecimal():
        return [path]
    return [find_checkpoint(path)]


def _state(folder: Path, verify: bool) -> str:
    try:
        check_checkpoint(folder, lambda text: print(text, file=sys.stderr), contents=verify)
    except CheckpointError as error:
        return str(error)
    return "sound"


def _part(folder: Path, sizes: Mapping[str, int], part: str) -> dict[str, Any]:
    """Of one part: ranks that wrote, tensors, their number formats, bytes, and whether pieces make them."""
    extents = [extent for file in sorted(folder.glob("rank_*.json")) for extent in read_extents(file).items()]
    names = {name for name, _ in extents}
    states = [file for file in sorted((folder / OPTIMIZER).glob("rank_*.json")) for _ in read_extents(file)]
    return {
        "ranks": len({name.split("/")[-1][:10] for name in sizes if name.startswith(f"{part}/")}),
        "tensors": len(names),
        "pieces": len(extents),
        "formats": sorted({extent["dtype"] for _, extent in extents if "dtype" in extent}),
        "states": len(states),
        "bytes": sum(size for name, size in sizes.items() if name.startswith(f"{part}/")),
    }


def _lines(about: Mapping[str, Any]) -> list[str]:
    if not about:
        return []
    settings = about["settings"]
    layout: Mapping[str, Any] = settings.get(LAYOUT, {})
    lines = [
        f"checkpoint     {about['checkpoint']}",
        f"step           {step_of(Path(about['checkpoint']))}, format {about['format']}, {gigabytes(about['bytes'])}",
        f"model          {about['model_name']}",
    ]
    for name, part in about["parts"].items():
        formats = f" in {', '.join(part['formats'])}" if part["formats"] else ""
        lines.append(
            f"{name:14} {part['tensors']} tensors{formats} in {part['pieces']} pieces, {part['states']} pieces of the "
            f"optimizer's states, {gigabytes(part['bytes'])} by {part['ranks']} ranks"
        )
        own = {key.partition(".")[2]: value for key, value in layout.items() if key.startswith(f"{name}.")}
        shown = ", ".join(f"{key} {value}" for key, value in own.items() if value != 1)
        lines += [f"{'':14} written with {shown}"] if shown else []
    return lines
