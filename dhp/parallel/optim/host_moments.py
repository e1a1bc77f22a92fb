"""Rows of moments between host memory and a device, beside what computes there.

On a GPU, copies run on streams of their own from and into pinned memory: while rows are updated, the next ones come and
the ones before go. On other devices clones stand in for the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class HasMoments(Protocol):
    """Something that an optimizer does with rows of moments."""

    @property
    def moments(self) -> Sequence[Tensor]:
        """The rows, in host memory."""


Job = TypeVar("Job", bound=HasMoments)


class HostMoments:
    """The copies of one optimizer."""

    def __init__(self, device: torch.device):
        """device: that the rows are updated on."""
        self._device, self._cuda = device, device.type == "cuda"
        if self._cuda:
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._cuda)

    def ahead(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Tensor]]]:
        """Each job, with its rows on the device. Those of the next one are on their way by then."""
        if self._cuda:
            self._coming.wait_stream(self._going)  # of the step before
        waiting = None
        for job in jobs:
            coming = job, self._fetch(job.moments)
            if waiting is not None:
                yield self._arrived(*waiting)
            waiting = coming
        if waiting is not None:
            yield self._arrived(*waiting)

    def put_back(self, host: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Begin to copy updated `rows` to where they came from."""
        if not self._cuda:
            for there, here in zip(host, rows, strict=True):
                there.copy_(here)
            return
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            for there, here in zip(host, rows, strict=True):
                there.copy_(here, non_blocking=True)
                here.record_stream(self._going)  # its memory is not reused before it was read

    def settle(self) -> None:
        """Wait until all rows are back."""
        if self._cuda:
            self._going.synchronize()

    def _fetch(self, host: Sequence[Tensor]) -> list[Tensor]:
        if not self._cuda:
            return [rows.clone() for rows in host]
        with torch.cuda.stream(self._coming):
            return [rows.to(self._device, non_blocking=True) for rows in host]

    def _arrived(self, job: Job, rows: list[Tensor]) -> tuple[Job, list[Tensor]]:
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._coming)
            for one in rows:
                one.record_stream(current)
        return job, rows
