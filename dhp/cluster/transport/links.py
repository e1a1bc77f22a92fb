"""Sends tensors from rank to rank: by NCCL between GPUs, by gloo between CPUs.

On each way (`dhp.core.graph.Way`) each two ranks have a connection of their own, on GPUs with a stream of its own, so
that what waits in one of them holds up nothing else. A sender begins to send and goes on; a `LinkParcel` of a hundred
bytes goes through Ray, as everything does that a call needs, and makes its receiver take what is under way already.
Nobody waits for a rank that has nothing to send. Host memory is not touched. Between two ranks that share a GPU, which
NCCL does not connect, CUDA IPC maps the tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.cluster.transport.shared_memory import Inbox, Outbox
from dhp.core.errors import PartFailed
from dhp.core.graph import Way

Peer = tuple[str, int]  # a stage, and a rank of it


@dataclass(frozen=True)
class LinkParcel:
    """A tensor that is under way.

    numbers: by rank that receives it, its number among all that the sender has sent there on this way. near: the parcel
    of ranks on the sender's GPU; None where there are none."""

    way: int
    sender: int
    numbers: Mapping[int, int]
    near: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


class Links:
    """A rank's connections with ranks of other stages, made before the first step."""

    def __init__(
        self,
        own: Peer,
        ways: Sequence[Way],
        sizes: Mapping[str, int],
        store: dist.Store,
        device: torch.device,
        near: Collection[Peer],
        timeout_s: float,
    ):
        """ways: of the run, the same on all ranks. sizes: ranks of each stage. near: ranks on this one's GPU.

        All ranks together: each waits for those that it is connected with."""
        self._own, self._ways, self._sizes, self._device = own, ways, sizes, device
        self._near = frozenset(near)
        self._sent: Counter[tuple[int, int]] = Counter()
        self._taken: Counter[tuple[int, int]] = Counter()
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._outbox, self._inbox = Outbox(on_device=device.type == "cuda"), Inbox()
        make = _MAKERS[device.type]
        self._groups = {
            number: make(dist.PrefixStore(f"way {number}", store), self._member(way, own), timedelta(seconds=timeout_s))
            for number, way in enumerate(ways)
            if way.pairs and own[0] in (way.source, way.target)
        }
        self._connect()

    def send(self, tensor: Tensor, way: int, to: Sequence[int]) -> LinkParcel:
        """Begin to send a tensor to ranks of the way's target; it must not be written to before `end_step`."""
        self._under_way = [one for one in self._under_way if not one[0].is_completed()]
        target, sent = self._ways[way].target, tensor.detach().contiguous()
        near = {rank for rank in to if (target, rank) in self._near}
        numbers = {}
        for rank in to:
            if rank in near:
                continue
            numbers[rank] = self._sent[way, rank]
            self._sent[way, rank] += 1
            work = self._groups[way].send([sent], self._index(way, (target, rank)), 0)
            self._under_way.append((work, sent))
        parcel = self._outbox.send(sent) if near else None
        return LinkParcel(way, self._own[1], numbers, parcel, tuple(tensor.shape), tensor.dtype)

    def open(self, parcel: LinkParcel) -> Tensor:
        """The tensor, on this rank's device. Raises PartFailed where one that was sent before it was not taken."""
        source, key = self._ways[parcel.way].source, (parcel.way, parcel.sender)
        if self._own[1] not in parcel.numbers:
            return self._inbox.open(parcel.near)
        if parcel.numbers[self._own[1]] != self._taken[key]:
            raise PartFailed(
                f"{self._own[0]} rank {self._own[1]} takes tensor {parcel.numbers[self._own[1]]} of {source} rank "
                f"{parcel.sender} where {self._taken[key]} comes next: its schedule takes micro-batches in another "
                "order than they are sent in. Set cluster.transport=auto"
            )
        self._taken[key] += 1
        buffer = torch.empty(parcel.shape, dtype=parcel.dtype, device=self._device)
        self._groups[parcel.way].recv([buffer], self._index(parcel.way, (source, parcel.sender)), 0).wait()
        return buffer

    def end_step(self) -> None:
        """End the step: all that was sent has been taken, so its memory may be used again."""
        for work, _ in self._under_way:
            work.wait()  # on GPUs the stream waits, not the host
        self._under_way.clear()
        self._outbox.end_step()

    def _connect(self) -> None:
        """Exchange a number with each rank, in an order that all have: connections are made when they are first used,
        and the first to use one waits for the other."""
        number = torch.zeros(1, device=self._device)
        for way, group in self._groups.items():
            source, target = self._ways[way].source, self._ways[way].target
            for here, there in sorted(self._ways[way].pairs, key=lambda pair: ((pair[1] - pair[0]), pair)):
                ends = (source, here), (target, there)
                if self._own not in ends or self._own in self._near_ends(ends):
                    continue
                other = ends[0] if self._own == ends[1] else ends[1]
                exchange = group.send if self._own == ends[0] else group.recv
                exchange([number], self._index(way, other), 0).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _near_ends(self, ends: tuple[Peer, Peer]) -> tuple[Peer, ...]:
        """Both, where they share a GPU."""
        return ends if any(end in self._near for end in ends) else ()

    def _member(self, way: Way, peer: Peer) -> tuple[int, int]:
        """A rank's number in the way's group, and how many are in it."""
        sources = self._sizes[way.source]
        return (peer[1] if peer[0] == way.source else sources + peer[1]), sources + self._sizes[way.target]

    def _index(self, way: int, peer: Peer) -> int:
        return self._member(self._ways[way], peer)[0]


def _by_gloo(store: dist.Store, member: tuple[int, int], timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, *member, timeout)


def _by_nccl(store: dist.Store, member: tuple[int, int], timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # of a tensor from when it is sent until it is taken: as long as a step may take
    return dist.ProcessGroupNCCL(store, *member, options)


_MAKERS: Mapping[str, Callable[[dist.Store, tuple[int, int], timedelta], Any]] = {"cpu": _by_gloo, "cuda": _by_nccl}
