"""The next step's data are fetched and pinned beside the step that runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dhp.cluster.transport import shared_memory
from dhp.cluster.transport.shared_memory import Lookahead, RemoteValue, pin_tensors


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Values by the names that stand for refs; one that is not there raises, as a lost one does."""
    values: dict[str, Any] = {}
    monkeypatch.setattr(shared_memory.ray, "get", values.__getitem__)
    return values


def test_values_are_prepared_in_order_before_anybody_asks(store: dict[str, Any]) -> None:
    events: list[str] = []
    done = threading.Event()

    def prepare(value: str) -> str:
        events.append(f"pin {value}")
        if value == "b":
            done.set()
        return value.upper()

    ahead = Lookahead(prepare)
    store |= {"first": "a", "second": RemoteValue("third"), "third": "b", "other": "c"}
    ahead.begin(["first", "second"])
    assert done.wait(60)
    events.append("step begins")
    assert [ahead.take(RemoteValue(ref)) for ref in ("first", "second")] == ["A", "B"]
    assert events == ["pin a", "pin b", "step begins"]
    assert ahead.take(RemoteValue("other")) == "c"  # nobody began to: as it is


def test_what_is_under_way_is_waited_for_and_what_is_lost_is_raised_where_it_is_needed(store: dict[str, Any]) -> None:
    held = threading.Event()
    ahead = Lookahead(lambda value: (held.wait(60), value)[1])
    store["late"] = 7
    ahead.begin(["late", "lost"])
    threading.Timer(0.05, held.set).start()
    assert ahead.take(RemoteValue("late")) == 7
    with pytest.raises(KeyError, match="lost"):
        ahead.take(RemoteValue("lost"))


def test_a_step_is_taken_behind_the_call_that_begins_the_next_one(store: dict[str, Any]) -> None:
    """As a rank's calls come: its look ahead to the next step, then the verbs of this one."""
    prepared: list[int] = []
    ahead = Lookahead(lambda value: (prepared.append(value), -value)[1])
    store |= {number: number for number in range(1, 6)}
    taken = []
    for number in range(1, 5):
        ahead.begin([number + 1])
        taken.append(ahead.take(RemoteValue(number)))
    assert taken == [1, -2, -3, -4]  # nobody looked ahead for the first; all else is fetched once, and prepared
    assert ahead.take(RemoteValue(5)) == -5 and prepared == [2, 3, 4, 5]


def test_what_nobody_looked_ahead_for_is_found_where_it_leads_to(store: dict[str, Any]) -> None:
    store |= {"shard": RemoteValue("video"), "video": 7}
    assert Lookahead(lambda value: value).take(RemoteValue("shard")) == 7


def test_a_step_that_never_came_is_forgotten(store: dict[str, Any]) -> None:
    seen: list[int] = []
    ahead = Lookahead(lambda value: (seen.append(value), value)[1])
    store |= {"old": 1, "new": 2, "newer": 3}
    for ref in ("old", "new", "newer"):
        ahead.begin([ref])
    assert list(ahead._begun) == ["new"] and list(ahead._coming) == ["newer"]
    assert ahead.take(RemoteValue("new")) == 2 and ahead.take(RemoteValue("newer")) == 3
    assert not ahead._begun and not ahead._coming


@dataclass(frozen=True)
class Work:
    pixels: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]


def test_large_tensors_of_a_shard_are_pinned_and_all_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: (pinned.append(tuple(self.shape)), self.clone())[1], raising=False
    )
    work = Work(torch.ones(64, 1176), torch.ones(64), (64,))
    found = pin_tensors(work)
    assert pinned == [(64, 1176)] and torch.equal(found.pixels, work.pixels)
    assert found.positions is work.positions and found.lengths == (64,)
    small = Work(torch.ones(2), torch.ones(2), (2,))
    assert pin_tensors(small) is small and pin_tensors(5) == 5
