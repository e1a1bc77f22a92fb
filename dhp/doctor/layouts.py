"""The layouts that each part of a family admits, by the checks that a run makes before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.base.errors import DhpError
from dhp.config.checks import check_stages
from dhp.config.degrees import PARALLELISMS, resolve_part
from dhp.config.part import PartConfig
from dhp.models.family import Family
from dhp.run.preflight import check_plan

ACTORS = 2  # of a layout that is tried


@dataclass(frozen=True)
class Layouts:
    """Those that a part admits, and why not the others, by `part.parallelism`."""

    possible: tuple[str, ...]
    refused: dict[str, str]


def find_layouts(name: str, family: Family, source: str) -> Layouts:
    """The layouts of the part ("vision" or "text")."""
    refused: dict[str, str] = {}
    for layout in PARALLELISMS[name]:
        try:
            _check(name, layout, family, source)
        except DhpError as error:
            refused[f"{name}.{layout}"] = str(error)
    return Layouts(tuple(one for one in PARALLELISMS[name] if f"{name}.{one}" not in refused), refused)


def _check(name: str, layout: str, family: Family, source: str) -> None:
    actors = 1 if layout == "none" else ACTORS
    asked = PartConfig(source, layout, actors, zero_stage=1 if layout == "deepspeed" else 0)
    part = resolve_part(name, asked)
    family.parts[name].check(part)
    check_plan(name, part, source, family)
    if layout == "pipeline":
        check_stages(len(family.parts[name].layers.kinds), ACTORS, 1)
