"""A forward pass that runs out of memory under a plan: made again where nobody waits for the rank, told, and exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from tests.helpers.layouts import Case, Fault, Running, make_reader
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
DROPPING = (("text", AdapterSettings(2, 4.0, dropout=0.5)),)  # what a pass drew is drawn again


class ShortText(TextEngine):
    """Its last rank has no room for a first micro-batch of which any layer is kept."""

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        last, keeps = self.rank == self.mesh.size() - 1, set(self.layers.choices) != {"all"}

        def short() -> Any:
            output = compute()
            if keeps and last and micro_batch == 0 and set(self.layers.choices) != {"all"}:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        return super().forward(rows, micro_batch, short)


def everything(stage: Any) -> tuple[str, ...]:
    return ("all",) * len(stage.layers)


def trained(model: str, text: Degrees, kind: type) -> list[Any]:
    """Losses and norms of three steps, the second of which keeps all; which ranks were short, and have usages."""
    case = Case(ONE, text, 2, "float32", packing=True, lora=DROPPING, trainable=("text",))
    samples = [make_sample([(1, 8, 8)], 20, 10, seed, IMAGE_TOKEN) for seed in range(2 * text.shards)]
    feed = make_reader(model, case, [samples] * 3)
    told: list[Any] = []
    with Running(model, case, Fault(EncoderEngine, kind), measure=True, recompute=everything) as running:
        for step, choice in enumerate(("all", "none", "all")):
            group = running.groups["text"]
            layers = len(running.graph.stage("text").layers)
            group.execute_all_async("set_recompute", (choice,) * layers, returns=0)
            loss, reports = running.step(feed.step(step))
            of_text = reports["text"]
            told.append((loss, of_text[0].grad_norm, [r.short for r in of_text], [r.usage is None for r in of_text]))
        return told


def test_it_is_made_again_and_nothing_else_changes(made_model: str) -> None:
    plain = trained(made_model, Degrees(data=2), TextEngine)
    short = trained(made_model, Degrees(data=2), ShortText)
    assert [step[:2] for step in short] == [step[:2] for step in plain]  # to the bit
    assert [step[2] for step in plain] == [[False, False]] * 3
    assert [step[2] for step in short] == [[False, False], [False, True], [False, False]]
    assert [step[3] for step in short] == [[False, False], [False, True], [False, False]]


def test_where_others_may_wait_in_a_collective_it_is_an_error(made_model: str) -> None:
    with pytest.raises(Exception, match="CUDA out of memory"):
        trained(made_model, Degrees(tensor=2), ShortBoth)


class ShortBoth(ShortText):
    """Every rank has no room, so that none waits for another one here."""

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        def short() -> Any:
            output = compute()
            if set(self.layers.choices) != {"all"}:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        return TextEngine.forward(self, rows, micro_batch, short)
