"""Samples that are too long."""

from __future__ import annotations

import pytest

from dhp.base.errors import DataError
from dhp.base.geometry import PositionRange
from dhp.data.lengths.limits import Length, check_length


def test_what_fits_passes() -> None:
    check_length(Length(vision=90, text=100), None, None)
    check_length(Length(90, 100), 100, PositionRange(100, of_pictures=True))
    check_length(Length(90, 100), None, PositionRange(10, of_pictures=False))


@pytest.mark.parametrize(
    ("most", "positions", "told"),
    [
        (99, None, r"100 tokens \(90 of images and videos\) are more than data.max_tokens=99"),
        (None, PositionRange(99, True), r"100 tokens are more than the 99 positions .* data.max_tokens=99 with"),
        (None, PositionRange(9, False), "10 tokens beside 90 of images and videos are more than the 9 positions"),
    ],
)
def test_what_does_not_is_told(most: int | None, positions: PositionRange | None, told: str) -> None:
    with pytest.raises(DataError, match=told):
        check_length(Length(90, 100), most, positions)
