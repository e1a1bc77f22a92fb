"""Loads of pictures by preprocessing: tiles and tokens counted by hand, the same pictures for every way."""

import numpy as np

from experiments.balance.__main__ import SAMPLES, WAYS, anyres, made_loads, own_size, tiles
from tests.helpers.figures import rows


def test_tiles_and_tokens_by_hand() -> None:
    assert tiles((448, 448), 12) == (1, 256) and tiles((100, 900), 1) == (1, 256)
    assert tiles((448, 896), 12) == (3, 768)  # two tiles and the thumbnail
    assert tiles((448, 896), 4, side=224) == (3, 192)
    assert own_size((476, 644)) == (34 * 46, 17 * 23)
    # A canvas of 1 × 2 tiles of 24 × 24 tokens without padding, 24 newlines, and the whole picture.
    assert anyres((336, 672)) == (3, 24 * 48 + 24 + 24 * 24)


def test_every_way_has_the_same_texts_and_pictures() -> None:
    loads = {way.name: made_loads(way, 3) for way in (WAYS[0], WAYS[-1])}
    one, other = loads.values()
    assert len(one) == SAMPLES
    assert np.array_equal(one.vision > 0, other.vision > 0)
    without = one.vision == 0
    assert np.array_equal(one.text[without], other.text[without]) and 0.04 < without.mean() < 0.06


def test_balanced_packs_stay_even_where_isfs_do_not() -> None:
    def worst(method: str, *kinds: str) -> float:
        return max(row[kind] for row in rows("balance_preprocessing", method=method) for kind in kinds)

    assert worst("balanced", "dist_assigned", "dist_text") < 0.01
    assert worst("balanced_stages", "dist_vision", "dist_assigned", "dist_text") < 0.01
    assert 0.1 < worst("isf", "dist_vision", "dist_text") < worst("random", "dist_vision", "dist_text")
