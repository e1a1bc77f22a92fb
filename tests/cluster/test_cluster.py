"""What a cluster says of itself."""

from __future__ import annotations

import pytest

from dhp.cluster.address import LOCAL
from dhp.cluster.cluster import Cluster, Layout
from dhp.core.graph import StageGraph
from tests.helpers.graphs import make_graph


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (make_graph(), "1 vision and 1 text actors on cpu, sharing devices"),
        (make_graph(stages=3), "1 vision, 1 text.0, 1 text.1 and 1 text.2 actors on cpu, sharing devices"),
    ],
)
def test_it_lists_its_actors(graph: StageGraph, told: str) -> None:
    cluster = Cluster(Layout(graph, "cpu", LOCAL, 1, 60.0, 60.0, "logs", "checkpoints"))
    cluster.device, cluster._where = "cpu", ""
    assert cluster.describe() == told
