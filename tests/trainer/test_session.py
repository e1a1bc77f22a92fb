"""Which refs of the next step's data which rank fetches beside the step that runs, and under which limits a run is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.checkpoint.resume import Start
from dhp.cluster.remote_values import RemoteValue
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.axes import Degrees
from dhp.trainer import session
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


def test_steps_wait_for_a_checkpoint_only_where_it_is_not_written_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "weight_bytes", lambda *_: 0)
    for background, saving_s in (("true", 0.0), ("false", 900.0)):
        overrides = [f"training.save_in_background={background}", "training.save_timeout_s=900"]
        config = resolve(compose_config("tiny", overrides=overrides))
        assert session._layout(config, make_graph(), tmp_path, Start()).saving_s == saving_s
