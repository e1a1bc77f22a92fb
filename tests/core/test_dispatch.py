"""Arguments over ranks: declared, never guessed."""

import pytest

from dhp.core.dispatch import PerRank, per_rank, spread


def test_a_plain_argument_goes_to_every_rank_even_when_its_length_is_the_number_of_ranks() -> None:
    assert spread(([1, 2], "x"), 2) == [([1, 2], "x"), ([1, 2], "x")]


def test_values_per_rank_go_one_to_each() -> None:
    assert spread((7, per_rank(v * v for v in range(3))), 3) == [(7, 0), (7, 1), (7, 4)]
    assert per_rank([3, 4]) == PerRank((3, 4))


def test_no_argument_is_an_empty_tuple_for_each_rank() -> None:
    assert spread((), 2) == [(), ()]


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 ranks"):
        spread((per_rank("ab"),), 3)
