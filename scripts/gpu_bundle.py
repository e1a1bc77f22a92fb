"""Puts what a machine with little more than PyTorch lacks into a folder for each package: see gpu_bundle.sh.

`python scripts/gpu_bundle.py FOLDER [PACKAGE …]`: prints the folders' names, `name-version-tag`. PACKAGE: what is there
already, with all that it needs, in the place of THERE."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from shutil import copy

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# What a machine for PyTorch has; their own requirements are there with them.
THERE = ("torch", "numpy", "pillow", "numba", "tensorboard", "psutil", "aiohttp")
LEFT_OUT = ("av", "pytest", "pytest-timeout", "pytest-xdist")  # of the requirements: no videos, no tests
# Of Ray, what nothing in dhp asks for; of all, caches, tests and sources that are compiled where they are used.
UNUSED = re.compile(
    r"ray/(jars|rllib|cpp|data|serve|tune|train|llm|air|dashboard/client|core/generated/.*_grpc\.pyi)/"
    r"|(^|/)(__pycache__|tests?|testing_data)/|\.(pyx|pxd|pyi|pyc)$|^\.\./|^deepspeed/ops/csrc/"
)
ELF = b"\x7fELF"


def read_requirements(file: Path) -> list[str]:
    """Names of packages in a file of pins, without their extras."""
    return re.findall(r"^([A-Za-z][\w.-]*)", file.read_text(encoding="utf-8"), re.MULTILINE)


def find_needed(names: Sequence[str], without: Mapping[str, Distribution] | None = None) -> dict[str, Distribution]:
    """The packages of these names and all that they need here, but for those `without`. Raises PackageNotFoundError for
    a name that is not installed; what others need on other machines alone is none."""
    found: dict[str, Distribution] = {}
    left = [(canonicalize_name(name), frozenset[str]()) for name in names]
    while left:
        name, extras = left.pop()
        if name in found or name in (without or {}):
            continue
        found[name] = distribution(name)
        for line in found[name].requires or []:
            needed = Requirement(line)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                left.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return found


def files_of(package: Distribution) -> Iterator[str]:
    """Its files in site-packages that a run may need."""
    if package.files is None:
        raise SystemExit(f"{package.name} has no list of its files: it was not installed by pip")
    return (str(file) for file in package.files if not UNUSED.search(str(file)))


def pack(package: Distribution, folder: Path) -> str:
    """Copy it without symbols that only debuggers need; the name of its folder in `folder`."""
    name = f"{package.name}-{package.version}-cp{sys.version_info.major}{sys.version_info.minor}"
    for file in files_of(package):
        to = folder / name / file
        to.parent.mkdir(parents=True, exist_ok=True)
        copy(str(package.locate_file(file)), to)
        with to.open("rb") as copied:
            compiled = copied.read(len(ELF)) == ELF
        if compiled:
            to.chmod(to.stat().st_mode | 0o200)
            subprocess.run(["strip", "--strip-unneeded", str(to)], check=True)
    return name


def find_lacking(there: Sequence[str]) -> dict[str, Distribution]:
    """What a run without videos needs beside the packages that are there."""
    named = [name for name in read_requirements(ROOT / "requirements.txt") if name not in LEFT_OUT]
    return find_needed(named, without=find_needed(there))


def main(folder: str, *there: str) -> None:
    """Print the name of each folder when it is whole. Exits with a sentence for what is not installed."""
    try:
        lacking = find_lacking(there or THERE)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error}: `make install` first") from error
    for name in sorted(lacking):
        print(pack(lacking[name], Path(folder)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
