"""Ranks that several tests share, because starting them costs more than most of what they run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.ranks import LocalGroup, _Caller

RunOnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[RunOnRanks]:
    """As `tests.helpers.ranks.run_on_ranks`, on ranks that live as long as the module's tests."""
    groups: dict[int, LocalGroup] = {}

    def run(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        if size not in groups:
            groups[size] = LocalGroup(_Caller, size)
        try:
            return groups[size].execute_all("call", function, *arguments)
        except BaseException:
            groups.pop(size).close()  # the others wait in a collective for the one that failed
            raise

    yield run
    for group in groups.values():
        group.close()
