"""The layout whose driver is measured, and the routes that its images take."""

import numpy as np
import pytest

from experiments.driver_scale.__main__ import IMAGES, TENSOR, make_graph, sparse


@pytest.mark.parametrize("ranks", [8, 32])
def test_both_stages_have_all_ranks_on_the_same_devices(ranks: int) -> None:
    vision, text = make_graph(ranks).stages
    assert vision.degrees.world == text.degrees.world == vision.degrees.shards == ranks
    assert text.degrees.shards == ranks // TENSOR
    assert vision.devices == text.devices == range(ranks)


def test_every_image_owner_is_in_the_routes() -> None:
    for ranks in (8, 16, 64):
        graph, rng, drawn = make_graph(ranks), np.random.default_rng(1), np.random.default_rng(1)
        drawn.lognormal(6.5, 0.6, IMAGES * ranks)
        owners = set(drawn.integers(0, ranks // TENSOR, IMAGES * ranks).tolist())
        route = sparse(graph, rng)
        assert set(route.sources) == owners
        assert set(route.targets) <= set(range(ranks))
        assert list(route.pairs) == sorted(set(route.pairs))


@pytest.mark.slow
def test_pairs_grow_with_ranks_and_not_with_their_square() -> None:
    rng = np.random.default_rng(0)
    counts = {ranks: len(sparse(make_graph(ranks), rng).pairs) for ranks in (16, 64, 256)}
    for ranks, pairs in counts.items():
        assert ranks / TENSOR <= pairs <= IMAGES * ranks
    assert counts[256] < 1.5 * 4 * counts[64]  # all to all: 16 ×
