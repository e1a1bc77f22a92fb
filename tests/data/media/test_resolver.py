"""Addresses that hold their own bytes."""

from __future__ import annotations

import pytest

from dhp.core.errors import DataError
from dhp.data.media import sources


def test_an_address_of_twice_the_bytes_that_may_lie_in_memory_is_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 20)
    find = sources.MediaResolver(None).find
    assert find("data:image/png;base64," + "A" * 40, "image").content == bytes(30)
    with pytest.raises(DataError, match="data: address of 44 characters; put it into a file below data_path"):
        find("data:image/png;base64," + "A" * 44, "image")
