"""Streams weights from the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dhp.checkpoint.shard_reader import describe_pieces, join_pieces
from dhp.cluster.hangs.watch import wait_all
from dhp.config.parts import model_name
from dhp.core.parameters import COMPENSATION, MASTER
from dhp.step.stages import EngineProtocol
from dhp.trainer.session import Session

Tensor = Any  # torch's


def stream_weights(session: Session) -> Iterator[tuple[str, Tensor]]:
    """By key, what an export would write of the weights that ranks have; a layer at a time is there."""
    from dhp.models.streamed import stream_published
    from dhp.parallel.optim.base import saved_master

    def pieces(wanted: Mapping[str, Sequence[str] | None]) -> dict[str, list[Any]]:
        refs = {
            name: session.stages[name].group.execute_all_async(EngineProtocol.pieces, names)
            for name, names in wanted.items()
        }
        wait_all(session.take_watched(), session.config.cluster.step_timeout_s)
        return {name: [one for (ref,) in of for one in session.values([ref])[0]] for name, of in refs.items()}

    found = pieces(dict.fromkeys(session.stages))
    held = {stage: describe_pieces(of) for stage, of in found.items()}
    stage_of = {name: stage for stage, of in held.items() for name in of}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        of_stages: dict[str, list[str]] = {}
        for name in names:
            of_stages.setdefault(stage_of[name.removesuffix(f".{MASTER}").removesuffix(f".{COMPENSATION}")], []).append(
                name
            )
        return join_pieces([piece for of in pieces(of_stages).values() for piece in of])

    def exact(name: str, weight: Tensor) -> Tensor | None:
        states = read([f"{name}.{MASTER}", f"{name}.{COMPENSATION}"]) if name in stage_of else {}
        return saved_master(name, weight, states, states.__getitem__)

    every = {name: one for of in held.values() for name, one in of.items()}
    plan = session.plan
    yield from stream_published(model_name(session.config), every, read, exact, plan.adapters, plan.rules.trains)
