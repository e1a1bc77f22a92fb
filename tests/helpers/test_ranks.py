"""Ranks begin with everything loaded, which a mistake in what the fork server imports would undo without a word."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.ranks import WARM, run_on_ranks


def _loaded(name: str) -> bool:
    return name in sys.modules


@pytest.mark.parametrize("name", WARM)
def test_the_fork_server_has_imported_what_ranks_need(name: str) -> None:
    assert run_on_ranks(_loaded, 1, name) == [True]
