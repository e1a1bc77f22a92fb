"""Rows: whether a micro-batch makes the host wait for the device, in each layout of the parity rows that one process
holds."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dhp.cluster.transport import shared_memory
from dhp.cluster.transport.shared_memory import Inbox, Outbox
from dhp.core.batch import Bundle, StepData
from dhp.core.reports import StageReport
from dhp.engine.engines import make_rank
from dhp.models.registry import load_family
from experiments.gpu_check.pair import Mark, Pair, join, no_mark
from experiments.gpu_check.parity import deal_step, make_tiny, read_layout, require_packages, stage_settings
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION, pair_of

SAYS = "called a synchronizing"  # CUDA operation


class HandingOver(Pair):
    """With memory between the parts that other processes could map, as between actors."""

    def __init__(self, pinned: bool, vision: Any, text: Any):
        super().__init__(vision, text)
        shared_memory.SMALLEST_BYTES = 1  # small ones, as those of tiny models, would be copied while the host waits
        self._inbox, self._outbox = Inbox(pinned), Outbox(pinned=pinned)

    def hand_over(self, bundles: Sequence[Bundle]) -> Sequence[Bundle]:
        """Through the outbox and the inbox."""
        sent = [_carried(bundle, self._outbox.send) for bundle in bundles]
        with _unwatched():
            self._outbox.flush()
        return [_carried(bundle, self._inbox.open) for bundle in sent]

    def end_step(self, data: StepData, mark: Mark = no_mark) -> tuple[StageReport, StageReport]:
        """And what was sent may be written over."""
        reports = super().end_step(data, mark)
        self._outbox.end_step()
        return reports


def check(setting: Setting, name: str) -> dict[str, Any]:
    """Deviates where any operation waits: torch raises at the first, and a second pass tells all by their places. The
    hand-over has to wait, and is left out. Without a GPU the micro-batch runs, and nothing is watched."""
    layout = read_layout(name)
    require_packages(setting, layout)
    join()
    graph, data = pair_of(load_family(make_tiny(setting, layout.family).folder)), deal_step(setting, layout, 0)
    trainers = (make_rank(stage_settings(setting, graph, part, layout, setting.format)) for part in (VISION, TEXT))
    pair = HandingOver(setting.cuda, *trainers)
    micro_batch, end_step = partial(pair.micro_batch, data), partial(pair.end_step, data)
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


@contextmanager
def _unwatched() -> Iterator[None]:
    """torch counts what waits by a stream, as the hand-over does, among what waits for the device."""
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


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
