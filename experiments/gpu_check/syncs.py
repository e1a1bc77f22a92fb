"""Row: where a micro-batch of both parts makes the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dhp.base.messages import Bundle
from dhp.cluster.transport.shared_memory import Inbox, Outbox
from experiments.gpu_check.carried import carried
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.two_layers import deal, make_model, sizes, start
from experiments.pair import TEXT, VISION

SAYS = "called a synchronizing"  # CUDA operation


def check(setting: Setting) -> dict[str, Any]:
    """Deviates where any operation waits. The hand-over, which has to, waits by the stream and is not seen."""
    data = deal(make_model(setting), sizes(setting, 2))
    vision, text = (start(setting, part, "light") for part in (VISION, TEXT))
    inbox, outbox = Inbox(setting.cuda), Outbox(pinned=setting.cuda)

    def hand_over(bundles: tuple[Bundle, ...]) -> list[Bundle]:
        sent = [carried(bundle, outbox.send) for bundle in bundles]
        outbox.flush()
        return [carried(bundle, inbox.open) for bundle in sent]

    def micro_batch() -> None:
        embeddings = hand_over(vision.forward_step(0, 0, data.work[VISION][0][0]))
        text.forward_step(0, 0, data.work[TEXT][0][0], *embeddings)
        vision.backward_step(0, 0, True, *hand_over(text.backward_step(0, 0, True)))

    def end_step() -> None:
        of_vision, of_text = vision.grad_norm_sq(data.info), text.grad_norm_sq(data.info)
        vision.optimizer_step(data.info, of_text)
        text.optimizer_step(data.info, of_vision)
        outbox.end_step()

    micro_batch()  # memory is taken and locked in the first
    end_step()
    waits = _watched(setting, micro_batch)
    at_the_end = _watched(setting, end_step)
    places = {name: dict(counted.most_common(20)) for name, counted in (("places", waits), ("step_places", at_the_end))}
    return {"ok": not waits, "count": waits.total(), "step_count": at_the_end.total(), **places}


def _watched(setting: Setting, call: Any) -> Counter[str]:
    """How often each line waits."""
    if not setting.cuda:
        call()
        return Counter()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{_short(w.filename)}:{w.lineno}" for w in seen if SAYS in str(w.message))


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-3:])
