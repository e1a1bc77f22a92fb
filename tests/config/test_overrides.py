"""Overrides of entries with free names, as Hydra is handed them."""

from __future__ import annotations

import pytest

from dhp.config.command_line import _Entry, _joined

SECTION = "data.data_registry"


def entry(path: str, value: str, section: str = SECTION) -> _Entry:
    return _Entry(section, tuple(path.split(".")), value)


@pytest.mark.parametrize(
    "given, expected",
    [
        ([entry("a.x", "1"), entry("a.y", "2")], ["++data.data_registry={a:{x:1,y:2}}"]),
        ([entry("a.x", "1"), "++seed=1", entry("b.x", "2")], ["++data.data_registry={a:{x:1},b:{x:2}}", "++seed=1"]),
        ([entry("a.x", "1"), entry("a.x", "2")], ["++data.data_registry={a:{x:2}}"]),
        (
            [entry("a.x", "1"), f"~{SECTION}.a", entry("a.y", "2")],
            ["++data.data_registry={a:{x:1}}", "~data.data_registry.a", "++data.data_registry={a:{y:2}}"],
        ),
        (
            [entry("a", "{x:1}"), entry("a.y", "2")],  # neither is lost where there is no sweep
            ["++data.data_registry={a:{x:1}}", "++data.data_registry={a:{y:2}}"],
        ),
        (
            [entry("a.x", "1"), entry("calm.lr", "3", "training.groups")],
            ["++data.data_registry={a:{x:1}}", "++training.groups={calm:{lr:3}}"],
        ),
        (["++seed=1"], ["++seed=1"]),
    ],
)
def test_entries_of_a_section_are_one_override(given: list[str | _Entry], expected: list[str]) -> None:
    assert _joined(given) == expected
