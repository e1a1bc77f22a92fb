"""Spread of micro-batches: by hand, and that the page says what the rows do."""

import numpy as np
import pytest

from dhp.data.balance.packs import Limits, Loads, single
from experiments.balance.sets import operations
from experiments.balance.spread import efficiencies, least_spread, spread_rows, tower_seconds
from tests.helpers.figures import cells, fixed, missing, one, rows, short

PAGE = "experiments/balance/README.md"


def test_the_least_spread_leaves_long_samples_alone() -> None:
    assert least_spread(np.array([6.0, 1.0, 1.0]), 2) == pytest.approx(0.5)  # 6 and 2
    assert least_spread(np.array([2.0, 1.0, 1.0]), 2) == 0.0
    assert least_spread(np.array([8.0, 5.0, 1.0, 1.0]), 3) == pytest.approx(np.std([8, 5, 2]) / 5)


def test_a_tower_whose_pictures_are_assigned_has_whole_units() -> None:
    packs, loads = single(np.arange(8)), Loads(np.array([6, 0, 3, 0, 2, 2, 4, 0]), np.ones(8, dtype=np.int64))
    own = tower_seconds(packs, loads, 2, assigned=False)
    assert own.tolist() == [[6, 0, 3, 0, 2, 2, 4, 0]]
    assert tower_seconds(packs, loads, 2, assigned=True).tolist() == [[3, 3, 2, 1, 2, 2, 2, 2]]


def test_balanced_rows_are_at_the_bound_of_whole_units_and_random_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    vision = rng.choice([0, 1, 3, 5], 4000)
    loads = Loads(vision, 256 * vision + rng.integers(20, 600, 4000))
    padded, packed, balanced = spread_rows("drawn", loads, Limits(9, 4096, 4), 8, 0, ["random", "balanced"])
    assert min(padded["decoder"], packed["decoder"]) > 10 * balanced["decoder"] and padded["tower"] == packed["tower"]
    assert balanced["tower"] == balanced["tower_bound"] < packed["tower"] / 15
    assert balanced["decoder"] > balanced["decoder_bound"]
    assert balanced["random_over"][0][0] == pytest.approx(padded["decoder"] / balanced["decoder"], rel=0.01)


def test_efficiency_of_a_step_by_hand() -> None:
    """Two replicas, of which the first has 3 of a micro-batch's 4 units of the decoder, and all of its 4 pictures; the
    tower's share is half, so that a picture takes a unit."""
    decoder, tower = np.array([[3, 1] * 4]), np.array([[4, 0] * 4])
    own = efficiencies(decoder, tower, 2, assigned=False)
    assert own == {way: pytest.approx({0.1: 4.444 / 6.889, 0.3: 5.714 / 9.429, 0.5: 8 / 14}, rel=1e-3) for way in own}
    found = efficiencies(decoder, np.array([[3, 2, 2, 2, 1, 0, 3, 3]]), 2, assigned=True)
    assert found["a pass a micro-batch"][0.5] == pytest.approx(16 / (12 + 9), abs=1e-4)
    assert found["one pass"][0.5] == pytest.approx(16 / (12 + 8), abs=1e-4)


def test_operations_grow_with_pairs() -> None:
    assert operations(np.array([36864])).tolist() == [2 * 36864]


def test_the_page_has_the_rows() -> None:
    sentences = []
    for source in ("made 1.2M", "ai2d", "chartqa", "ai2d, chartqa"):
        padded, packed = rows("balance_spread", source=source, spread="random")
        own = one("balance_spread", source=source, spread="balanced")
        (decoder, tower), (unpadded, _) = own["random_over"]
        ratio = f"{fixed(decoder, 1)}, {fixed(unpadded, 1)}"
        figures = [short(row[key], 3) for row, key in ((padded, "decoder"), (packed, "decoder"), (padded, "tower"))]
        least = short(own["tower_bound"], 4)
        figures += [short(own["decoder"], 4), short(own["tower"], 4), ratio, fixed(tower, 1), least]
        sentences.append((PAGE, cells(source, *figures)))
        isf, each, whole = one("balance_spread", source=source, spread="isf"), "a pass a micro-batch", "one pass"
        of = ((padded, whole), (packed, whole), (isf, whole), (own, each), (own, whole))
        shown = [", ".join(f"{value:.2f}" for value in row["efficiency"][way].values()) for row, way in of]
        sentences.append((PAGE, cells(source, *shown)))
    assert missing(sentences) == []
