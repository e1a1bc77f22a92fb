"""The table of nearness: whose pictures share a pass of the tower."""

import numpy as np

from dhp.batch.assign_images import Locality
from dhp.cli.inspect_data import locality_table
from dhp.data.balance.packs import Loads, single

TWO = Locality(((0, 2), (2, 0)), 0.0)  # text replicas, each with a vision replica on its own device


def _first_line(batch: int) -> tuple[str, list[str]]:
    """Two steps of three micro-batches; the first replica alone has pictures."""
    packs, loads = single(np.arange(12)), Loads(np.array([4, 0] * 6), np.ones(12, dtype=np.int64))
    heading, first, *_ = locality_table(packs, loads, TWO, 3, batch)
    return heading, first.split()[-3:]


def test_each_micro_batch_has_one_picture_whose_replica_is_near() -> None:
    heading, figures = _first_line(1)
    assert heading.endswith("of 6 passes of vision") and figures == ["100.0%", "1.0000", "1.0"]


def test_a_pass_over_two_micro_batches_gives_each_tower_rank_one() -> None:
    """Of three micro-batches the last one has a pass of its own: 2 × (8 + 4) tokens, of which 2 × (4 + 4) are near."""
    heading, figures = _first_line(2)
    assert heading.endswith("of 4 passes of vision") and figures == ["66.7%", "1.0000", "1.5"]


def test_one_vision_replica_has_no_table() -> None:
    assert locality_table(single(np.arange(2)), Loads(np.ones(2, int), np.ones(2, int)), None, 1, 1) == []
