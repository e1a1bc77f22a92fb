"""Rows: whether a micro-batch makes the host wait for the device, in each layout of the parity rows that one process
holds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dhp.base.messages import Bundle
from dhp.cluster.transport.shared_memory import Inbox, Outbox
from dhp.models.registry import load_family
from dhp.trainers.kinds import make_rank
from experiments.gpu_check.pair import join
from experiments.gpu_check.parity import deal_step, read_layout, require_packages, stage_settings
from experiments.gpu_check.setting import Setting
from experiments.gpu_check.tiny import make_tiny
from experiments.pair import TEXT, VISION, pair_of

SAYS = "called a synchronizing"  # CUDA operation


def check(setting: Setting, name: str) -> dict[str, Any]:
    """Deviates where any operation waits: torch raises at the first, and a second pass tells all by their places. The
    hand-over, which has to, waits by the stream and is not seen. Without a GPU the micro-batch runs, and nothing is
    watched."""
    layout = read_layout(name)
    require_packages(setting, layout)
    join()
    tiny = make_tiny(setting, layout.family)
    chain, data = pair_of(load_family(tiny.folder)), deal_step(setting, layout, 0)
    format = "bfloat16" if setting.cuda else "float32"
    vision, text = (make_rank(stage_settings(setting, chain, part, layout, format)) for part in (VISION, TEXT))
    inbox, outbox = Inbox(setting.cuda), Outbox(pinned=setting.cuda)

    def hand_over(bundles: tuple[Bundle, ...]) -> list[Bundle]:
        sent = [_carried(bundle, outbox.send) for bundle in bundles]
        outbox.flush()
        return [_carried(bundle, inbox.open) for bundle in sent]

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
    if not setting.cuda:
        micro_batch()
        return {"ok": True, "watched": False}
    raised = _first_wait(micro_batch)
    places = _places(micro_batch) if raised else Counter()
    at_the_end = _places(end_step)
    counts = {"count": places.total(), "step_count": at_the_end.total()}
    told = {"places": dict(places.most_common(20)), "step_places": dict(at_the_end.most_common(20))}
    return {"ok": raised is None, "watched": True, "raised": raised, **counts, **told}


def _carried(bundle: Bundle, by: Callable[[Any], Any]) -> Bundle:
    return Bundle({name: by(tensor) for name, tensor in bundle.tensors.items()})


def _first_wait(call: Callable[[], None]) -> str | None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if SAYS not in str(error):
            raise
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _places(call: Callable[[], None]) -> Counter[str]:
    """How often each line waits."""
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
