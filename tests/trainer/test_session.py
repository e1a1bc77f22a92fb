"""Which refs of the next step's data which rank fetches beside the step that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dhp.cluster.remote_values import RemoteValue
from dhp.core.axes import Degrees
from dhp.trainer.session import look_ahead, named_elsewhere
from tests.helpers.graphs import make_graph

WORK = {"vision": [["v00", "v01"], ["v10", "v11"]], "text": [["t0"], ["t1"]]}


def test_each_rank_of_an_encoder_fetches_its_shard_of_all_micro_batches() -> None:
    graph = make_graph(Degrees(data=2, tensor=2), Degrees(tensor=4))
    asked: dict[str, Any] = {}
    groups: Any = {
        name: SimpleNamespace(look_ahead=lambda refs, name=name: asked.update({name: refs}))
        for name in ("vision", "text")
    }
    fetched = look_ahead(groups, graph, WORK)
    assert asked == {"vision": [["v00", "v10"], ["v00", "v10"], ["v01", "v11"], ["v01", "v11"]]}
    assert fetched == {"v00", "v01", "v10", "v11"}
    assert look_ahead(groups, graph, {}) == frozenset()  # behind the last step
    assert named_elsewhere(WORK, fetched - {"v11"}) == {
        "vision": [[RemoteValue("v00"), RemoteValue("v01")], [RemoteValue("v10"), "v11"]],
        "text": WORK["text"],
    }
