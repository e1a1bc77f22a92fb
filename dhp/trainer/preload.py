"""Imports what actors need while a run is checked."""

import json
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from dhp.cluster.address import LOCAL, chosen_address
from dhp.cluster.forks.start_server import fork_server
from dhp.config.parts import parts
from dhp.config.schema import Config

_ALWAYS = ("dhp.engine.engines", "dhp.batch.reader")
_DEEPSPEED = "dhp.parallel.deepspeed:preload_deepspeed"


def preloaded(config: Config) -> AbstractContextManager[None]:
    """A Ray of the run's own that is started in here finds the actors' imports done. config: as it was read."""
    if config.training.dry_run or chosen_address(config.cluster.address) != LOCAL:
        return nullcontext()
    on_cpu = config.cluster.device == "cpu"
    return fork_server(modules(config), not on_cpu, sharing=on_cpu)


def modules(config: Config) -> list[str]:
    """What `dhp.cluster.forks.server` is to load."""
    found = [*_ALWAYS]
    for part in parts(config).values():
        file = Path(part.model_name) / "config.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # which the checks will name
            kind = json.loads(file.read_text())["model_type"]
            if kind.isidentifier():
                found.append(f"transformers.models.{kind}.modeling_{kind}")
        if part.parallelism in ("deepspeed", "autotp") or (part.zero_stage and part.zero_engine != "fsdp"):
            found.append(_DEEPSPEED)
    return list(dict.fromkeys(found))
