"""How the server is started that imports for actors."""

from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.trainer import preload


@pytest.mark.parametrize(
    ("settings", "sharing"),
    [
        (["training.schedule=vision_ahead", "cluster.device=cpu"], True),
        (["training.schedule=sequential", "cluster.device=cpu"], True),
        (["training.schedule=vision_ahead", "cluster.device=cuda"], False),
    ],
)
def test_threads_rest_where_parts_work_at_once_on_cpus(
    settings: list[str], sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(preload, "fork_server", lambda modules, gpus, sharing: asked.append({"sharing": sharing}))
    preload.preloaded(compose_config("tiny", overrides=["cluster.address=local", *settings]))
    assert asked == [{"sharing": sharing}]
