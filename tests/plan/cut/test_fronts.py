"""The least seconds of recomputing, against every choice of every unit."""

from itertools import product

import numpy as np
import pytest

from dhp.plan.cut.run_tables import Fronts, pareto
from dhp.plan.cut.units import Saved, Unit
from tests.plan.cut.made import chain


def alike(units: tuple[Unit, ...], every: int) -> tuple[Unit, ...]:
    """The same units in kinds: each has the choices of one of the first `every`."""
    return tuple(Unit(**{**one.__dict__, "saved": units[at % every].saved}) for at, one in enumerate(units))


def every_choice(units: tuple[Unit, ...]) -> list[tuple[float, float]]:
    """(bytes, seconds) of all of them."""
    options = [list(one.saved.values()) for one in units]
    return [(sum(o.held_bytes for o in chosen), sum(o.replay_s for o in chosen)) for chosen in product(*options)]


@pytest.mark.parametrize("kinds", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_no_choice_takes_less(seed: int, kinds: int) -> None:
    units = alike(chain(seed, 7), kinds)
    fronts, points = Fronts(units, 0), every_choice(units)
    caps = np.array([0.0, *np.linspace(min(p[0] for p in points) - 1, max(p[0] for p in points), 40)])
    wanted = [min((s for held, s in points if held <= cap), default=np.inf) for cap in caps]
    assert fronts.least(0, 7, caps) == pytest.approx(wanted)
    for cap, seconds in zip(caps, wanted, strict=True):
        if np.isinf(seconds):
            with pytest.raises(ValueError, match="from 0 to 7 keep more than"):
                fronts.choose(0, 7, cap)
            continue
        chosen = [units[at].saved[choice] for at, choice in enumerate(fronts.choose(0, 7, cap))]
        assert sum(one.held_bytes for one in chosen) <= cap
        assert sum(one.replay_s for one in chosen) == pytest.approx(seconds)


def test_of_units_alike_the_first_keep_least() -> None:
    units = alike(chain(0, 5), 1)
    none, light, _ = (one.held_bytes for one in units[0].saved.values())
    assert Fronts(units, 0).choose(0, 5, 3 * none + 2 * light) == ("light", "light", "none", "none", "none")


def test_units_before_the_first_that_trains_keep_nothing() -> None:
    units = chain(0, 5)
    assert Fronts(units, 5).least(0, 5, np.array([0.0, -1.0])).tolist() == [0.0, np.inf]
    assert Fronts(units, 3).choose(0, 5, 2.0) == ("none", "none", "none", "all", "all")


def test_a_choice_that_saves_nothing_is_none() -> None:
    """Recomputing that keeps as much, and choices that are worse than another in both."""
    saved = {
        "none": Saved(8.0),
        "light": Saved(8.0, 0.0, 1.0),
        "mlp": Saved(4.0, 4.0, 5.0),
        "all": Saved(2.0, 6.0, 3.0),
    }
    (one,) = chain(0, 3)[:1]
    fronts = Fronts((Unit(**{**one.__dict__, "saved": saved}),), 0)
    assert [name for name, _ in fronts.options(0)] == ["all", "none"]


def test_a_front_has_no_point_that_is_no_better() -> None:
    front = pareto(np.array([3.0, 1.0, 2.0, 2.0, 4.0]), np.array([2.0, 5.0, 3.0, 2.0, 2.0]))
    assert front.held.tolist() == [1.0, 2.0] and front.seconds.tolist() == [5.0, 2.0]
