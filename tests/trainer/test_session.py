"""Which refs of the next step's data which rank fetches beside the step that runs; what reads other data; limits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.checkpoint.resume import Start
from dhp.cluster.transport.shared_memory import RemoteValue
from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.axes import Degrees
from dhp.plan.batches import feed_settings
from dhp.plan.stage_graph import devices_as_planned
from dhp.trainer import session as module
from dhp.trainer.session import Session, look_ahead, named_elsewhere
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


def test_what_reads_for_evaluation_draws_nothing() -> None:
    """Adapters drop in training alone: without draws, towers that take pictures whole take several at a time."""
    config = resolve(compose_config("tiny", overrides=["text.lora.rank=2", "text.lora.dropout=0.1"]))
    opened: list[Any] = []
    actor = SimpleNamespace(take_watched=list)
    session = Session.__new__(Session)
    session.graph = make_graph(Degrees(data=2), Degrees(data=2))
    session._cluster = SimpleNamespace(
        devices=devices_as_planned(session.graph),
        dataset_actor=lambda make, settings, **more: opened.append(settings) or actor,
    )
    assert feed_settings(config).drawing == ("text",)
    assert session.open_reader(config, "others") is actor
    assert [(one.drawing, one.exchange) for one in opened] == [((), "others")]


def test_steps_wait_for_a_checkpoint_only_where_it_is_not_written_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "weight_bytes", lambda *_: 0)
    for background, saving_s in (("true", 0.0), ("false", 900.0)):
        overrides = [f"training.save_in_background={background}", "training.save_timeout_s=900"]
        config = resolve(compose_config("tiny", overrides=overrides))
        assert module._layout(config, make_graph(), tmp_path, Start()).saving_s == saving_s
