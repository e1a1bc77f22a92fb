"""Ranks that are slow are named after 50 steps in a row; uneven work alone names nobody."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from dhp.observe import ranks as stragglers_module
from dhp.observe.ranks import STEPS, TOGETHER, RankShare, Stragglers, _Peers, pace

EVEN = [4.0, 4.0, 4.0, 4.0]


def shares(seconds: list[float], work: list[float], stage: str = "text") -> list[RankShare]:
    return [RankShare(f"{stage} rank {rank}", *own) for rank, own in enumerate(zip(seconds, work, strict=True))]


def feed(stragglers: Stragglers, steps: int, *stages: list[RankShare]) -> list[str]:
    named = {of[0].who.split()[0]: of for of in stages}
    return [message for _ in range(steps) for message in stragglers.add(named)]


def test_a_slow_rank_is_named_once_after_fifty_steps() -> None:
    stragglers, slow = Stragglers(), shares([1.0, 1.0, 1.3, 1.0], EVEN)
    vision = shares([9.0, 9.0], [1.0, 1.0], "vision")  # no peers of the others
    assert feed(stragglers, STEPS - 1, slow, vision) == []
    (message,) = feed(stragglers, 30, slow, vision)
    assert message.startswith("text rank 2 is slow: for 50 steps in a row it has computed for more than 1.2 times")
    assert "(now 1.3 s, they 1 s)" in message and list(stragglers.named) == ["text rank 2"]


def test_of_two_the_slower_is_named() -> None:
    stragglers = Stragglers()
    assert len(feed(stragglers, STEPS, shares([1.0, 1.25], [4.0, 4.0]))) == 1
    assert list(stragglers.named) == ["text rank 1"]


def test_one_step_in_which_it_keeps_up_is_noise_and_some_begin_the_count_anew() -> None:
    stragglers, slow, even = Stragglers(), shares([1.0, 1.0, 1.4, 1.0], EVEN), shares([1.0] * 4, EVEN)
    assert feed(stragglers, STEPS - 2, slow) == feed(stragglers, 1, even) == []
    assert len(feed(stragglers, 1, slow)) == 1
    stragglers = Stragglers()
    assert feed(stragglers, STEPS - 3, slow) == feed(stragglers, TOGETHER, even) == []
    assert feed(stragglers, STEPS - 1, slow) == [] and list(stragglers.named) == []
    assert len(feed(stragglers, TOGETHER, slow)) == 1


def test_a_step_without_work_does_not_count() -> None:
    stragglers, slow = Stragglers(), shares([1.0, 1.3], [4.0, 4.0])
    assert feed(stragglers, STEPS - 1, slow) == []
    assert feed(stragglers, 20, shares([0.1, 0.1], [0.0, 0.0]), shares([1.0, 0.1], [4.0, 0.0])) == []
    assert len(feed(stragglers, 1, slow)) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("fixed_s", [0.0, 0.5, 20.0])
def test_uneven_work_alone_names_nobody(ranks: int, fixed_s: float) -> None:
    """Though a rank has more of it than the others in every step, whatever a rank takes besides."""
    random, stragglers = Random(7), Stragglers()
    for _ in range(4 * STEPS):
        work = [random.uniform(1.0, 3.0) * (1 + 2 * (rank == 0)) for rank in range(ranks)]
        assert stragglers.add({"text": shares([fixed_s + own for own in work], work)}) == []
    for _ in range(
        STEPS + TOGETHER
    ):  # with all this one that takes 1.5 times as long is found, where it holds up the others
        work = [3.0] * ranks
        stragglers.add({"text": shares([(fixed_s + 3.0) * (1.5 if rank == 1 else 1.0) for rank in range(ranks)], work)})
    assert list(stragglers.named) == ["text rank 1"]


def test_the_median_of_the_others_is_the_plain_one_bit_for_bit() -> None:
    random = Random(11)
    for ranks in [*range(2, 12), 100, 101]:
        for values in ([random.random() for _ in range(ranks)], [float(random.randrange(3)) for _ in range(ranks)]):
            peers = _Peers(values)
            plain = [median(values[:own] + values[own + 1 :]) for own in range(ranks)]
            assert [peers.median(own) for own in values] == plain


def test_a_step_of_many_ranks_sorts_their_values_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each rank, which takes a third of a second a step at a thousand."""
    sorts: list[int] = []
    monkeypatch.setattr(stragglers_module, "sorted", lambda of: sorts.append(len(of)) or sorted(of), raising=False)
    monkeypatch.setattr(stragglers_module, "median", None)  # which sorts itself
    assert feed(Stragglers(), 3, shares([1.0] * 64, [4.0] * 64)) == []
    assert sorts == [64] * 6


def test_the_pace_is_seconds_over_what_was_predicted() -> None:
    slow = shares([1.0, 1.0, 2.0, 1.0], EVEN)
    assert pace(slow, 0.5) == {"min": 2.0, "median": 2.0, "max": 4.0, "rank": "text rank 2"}
    assert pace(slow, None) == {"min": 0.8, "median": 0.8, "max": 1.6, "rank": "text rank 2"}  # of the mean rank's
    uneven = shares([1.0, 3.0], [2.0, 6.0])
    assert pace(uneven, None) == {"min": 1.0, "median": 1.0, "max": 1.0, "rank": "text rank 0"}
    assert pace(shares([1.0, 0.0], [2.0, 0.0]), 1.0) == {"min": 0.5, "median": 0.5, "max": 0.5, "rank": "text rank 0"}
    assert pace(shares([1.0, 1.0], [0.0, 0.0]), 1.0) is None and pace(shares([0.0], [1.0]), None) is None
