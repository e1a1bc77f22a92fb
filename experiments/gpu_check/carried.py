"""Trainers whose tensors go between processes as those of actors do, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import experiments.gpu_check.older_torch  # noqa: F401, I001  before dhp
from dhp.base.messages import Bundle
from dhp.cluster.transport import shared_memory
from dhp.trainers.settings import StageSettings
from tests.helpers.layouts import Fault, InspectedText, InspectedVision


class _Carried:
    """A trainer behind the transport of its process. on_device: by CUDA IPC, else in shared memory."""

    trainer: type
    on_device: bool

    def __init__(self, settings: StageSettings):
        shared_memory.SMALLEST_BYTES = 1  # bytes: whatever is handed over goes that way
        pinned = settings.device == "cuda"
        self._inbox, self._outbox = shared_memory.Inbox(pinned), shared_memory.Outbox(self.on_device, pinned)
        self._trainer = self.trainer(settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def forward_step(self, *given: Any) -> Any:
        return self._carry(self._trainer.forward_step, given)

    def backward_step(self, *given: Any) -> Any:
        return self._carry(self._trainer.backward_step, given)

    def optimizer_step(self, *given: Any) -> Any:
        report = self._trainer.optimizer_step(*given)
        self._outbox.end_step()
        return report

    def _carry(self, verb: Any, given: tuple[Any, ...]) -> Any:
        result = verb(*(carried(value, self._inbox.open) for value in given))
        result = tuple(carried(value, self._outbox.send) for value in result)
        self._outbox.flush()
        return result


def carried(value: Any, by: Callable[[Any], Any]) -> Any:
    """A bundle, each of whose tensors went through `by`; anything else as it is."""
    return Bundle({name: by(tensor) for name, tensor in value.tensors.items()}) if isinstance(value, Bundle) else value


class SharedVision(_Carried):
    trainer, on_device = InspectedVision, False


class SharedText(_Carried):
    trainer, on_device = InspectedText, False


class MappedVision(_Carried):
    trainer, on_device = InspectedVision, True


class MappedText(_Carried):
    trainer, on_device = InspectedText, True


TRAINERS = {
    shared_memory.SHARED_MEMORY: Fault(SharedVision, SharedText),
    shared_memory.CUDA_IPC: Fault(MappedVision, MappedText),
}
