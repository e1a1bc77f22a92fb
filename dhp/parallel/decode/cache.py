"""Keys and values of a row that ranks share: each keeps those of its own tokens, where prefill computed them.

They are kept as a layer made them, before any Ulysses exchange: of this rank's tokens, all key/value heads that tensor
parallelism leaves it. New tokens go to the ranks in turn, so that all caches grow alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class ShardedCacheIndex:
    """Which tokens of a row a rank has; shared by all layers of its cache."""

    def __init__(self, places: Sequence[int], total: int, rank: int, ranks: int, room: int):
        """places: of its prompt's tokens in the row, ascending. total: tokens of the prompt on all ranks. rank, ranks:
        of those that share the row. room: new tokens that there will be at most."""
        self.places, self.total = list(places), total
        self._rank, self._ranks = rank, ranks
        self.own = len(self.places)
        self.most = self.own + -(-room // ranks)
        self.filling = True

    @property
    def takes(self) -> bool:
        """Whether the next token is kept here."""
        return self.total % self._ranks == self._rank

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Around the forward of one new token."""
        self.filling = False
        if self.takes:
            self.places.append(self.total)
        yield
        self.total += 1

    def since(self, first: int) -> int:
        """The number of tokens here before the row's token `first`."""
        return bisect_left(self.places, first)


class HeldLayer(CacheLayerMixin):
    """One layer's keys and values [1, heads, tokens, dim], in memory that is taken once."""

    is_sliding = False

    def __init__(self, held: ShardedCacheIndex):
        super().__init__()
        self._held, self._count = held, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for all tokens that will come."""
        self.dtype, self.device = key_states.dtype, key_states.device
        make = lambda states: states.new_empty((*states.shape[:-2], self._held.most, states.shape[-1]))
        self.keys, self.values = make(key_states), make(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep what is to be kept here. Of a prompt, the states as they came; of a new token, all that are here."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._held.filling:
            self._keep(key_states[..., : self._held.own, :], value_states[..., : self._held.own, :])
            return key_states, value_states  # a rank without any has a token that is not used
        if self._held.takes:
            self._keep(key_states, value_states)
        return self.keys[..., : self._count, :], self.values[..., : self._count, :]

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        end = self._count + keys.shape[-2]
        self.keys[..., self._count : end, :] = keys
        self.values[..., self._count : end, :] = values
        self._count = end

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values kept."""
        held = (self.keys, self.values) if self.is_initialized else ()
        return sum(states[..., : self._count, :].numel() * states.element_size() for states in held)

    def get_seq_length(self) -> int:
        """Tokens on all ranks: positions and masks of the library go by it."""
        return 0 if self._held.filling else self._held.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Called by the library; no mask is made of it."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1


class ShardedKVCache(Cache):
    """The cache of one row on one rank."""

    def __init__(self, layers: int, held: ShardedCacheIndex):
        super().__init__(layers=[HeldLayer(held) for _ in range(layers)])
        self.held = held

    @property
    def bytes(self) -> int:
        """Bytes that all layers keep."""
        return sum(layer.bytes for layer in self.layers)
