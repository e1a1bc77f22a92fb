"""Saved state as optimizers write and read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StateSink(Protocol):
    """Takes the state to save: `dhp.checkpoint.shard_writer.ShardWriter`."""

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that all ranks of the stage hold alike, or a DTensor, of which each holds its slice."""

    def add_once(self, name: str, tensor: Tensor) -> None:
        """A tensor that all ranks of the part hold alike, in whichever stage."""

    def add_flat(self, name: str, elements: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """A range of the elements of a tensor of `shape`."""

    def add_block(self, name: str, block: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """A block of a tensor of `shape` that begins at `offset` in it. A rank may hold several of one tensor."""


class StateSource(Protocol):
    """Returns saved state: what `dhp.checkpoint.shard_reader.open_source` finds in a folder."""

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of writing."""

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""

    def stored(self, name: str) -> Tensor | None:
        """All of a tensor as it lies in one file, mapped; None: several pieces make it."""

    def like(self, name: str, held: Tensor) -> Tensor:
        """This rank's share of a tensor laid out as `held`."""

    def flat(self, name: str, start: int, count: int) -> Tensor:
        """A range of a tensor's elements."""

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of a tensor that begins at `offset` and has `shape`."""
