"""Decodes tokens over ranks that share a row.

They are kept as a layer made them, before any Ulysses exchange: of this rank's tokens, all key/value heads that tensor
parallelism leaves it. New tokens go to the ranks in turn, so that all caches grow alike."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dhp.core.batch import Sampling, is_greedy
from dhp.parallel.attention.attention_kernels import AUTO, Block, Dense, choose_kernel, takes_varlen
from dhp.parallel.attention.ulysses import UlyssesGroup
from dhp.parallel.attention.visibility import LayerRule, layer_rule
from dhp.parallel.comm import gather_alike


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
    """The cache of one row on one rank. states: tensors of layers that carry state along the row, by their names, of
    this rank's heads."""

    def __init__(self, layers: int, held: ShardedCacheIndex):
        super().__init__(layers=[HeldLayer(held) for _ in range(layers)])
        self.held, self.states = held, dict[str, tuple[Tensor | None, ...]]()

    @property
    def bytes(self) -> int:
        """Bytes that all layers keep."""
        states = [one for state in self.states.values() for one in state if one is not None]
        return sum(layer.bytes for layer in self.layers) + sum(one.numel() * one.element_size() for one in states)


def merge_over_ranks(output: Tensor, lse: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[heads, dim] of all ranks' keys, the same bits on every rank.

    output: [heads, dim] of this rank's keys, and lse: [heads], the log-sum-exp of its scores, -inf where it has no key;
    both in the exact format. One message a layer: heads × (dim + 1) numbers to each rank."""
    every = gather_alike(torch.cat([output, lse[:, None]], dim=1), group)  # [ranks, heads, dim + 1]
    return merge(every[..., :-1], every[..., -1])


def merge(outputs: Tensor, lses: Tensor) -> Tensor:
    """[heads, dim] from outputs [parts, heads, dim] and lses [parts, heads], summed in the order of the parts."""
    return (lses.softmax(0)[..., None] * outputs).sum(0)


@dataclass(frozen=True)
class NewToken:
    """Arguments of a layer's attention for the one new token of a row: the row's tokens on this rank, and the ranks
    that have the others; None: this one has all. row: the ranks that share the heads of layers which carry state along
    the row."""

    held: ShardedCacheIndex
    group: dist.ProcessGroup | None
    backend: str = AUTO
    row: UlyssesGroup | None = None


def new_token_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    segments: NewToken,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attention of a decoder's layer in transformers' terms: query [1, heads, 1, dim], key and value [1, kv heads,
    tokens here, dim], output [1, 1, heads, dim].

    Raises ModelError for what is not computed here (`dhp.parallel.attention.visibility.layer_rule`)."""
    rule = layer_rule(module, attention_mask, named)
    # Tokens here are in the row's order, so a window or a chunk is the last ones of them: nothing is masked.
    first = segments.held.since(rule.first_key(segments.held.total))
    states = query[0].transpose(0, 1), key[0, :, first:].transpose(0, 1), value[0, :, first:].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, lse = attend_cached(*states, scale, rule, segments.backend)
    if segments.group is not None:
        output = merge_over_ranks(output, lse, segments.group)
    return output.to(query.dtype)[None, None], None


def attend_cached(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rule: LayerRule, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Output [heads, width of value] and log-sum-exp [heads] of one query [1, heads, dim] that sees all keys [tokens,
    kv heads, dim], in float32 (float64 for float64). Without keys, 0 and -inf: kernels fail without any."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not len(key):
        empty = query.new_zeros((query.shape[1], value.shape[-1]), dtype=exact)
        return empty, query.new_full((query.shape[1],), float("-inf"), dtype=exact)
    block = Block(False, scale, softcap=rule.softcap)
    width, wanted = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (
        s if s.shape[-1] == wanted else F.pad(s, (0, wanted - s.shape[-1])) for s in (query, key, value)
    )
    slow = rule.softcap is not None or (query.is_cuda and not takes_varlen(query))  # no fast kernel there is so wide
    kernel = Dense() if slow else choose_kernel(query, backend)
    output, lse = kernel.forward(query, key, value, block)
    return output[0, :, :width].to(exact), lse[:, 0].to(exact)


class Chooser:
    """Chooses the tokens of one answer. A number between 0 and 1 is drawn for each on the host, and looked up among the
    shares of all tokens by their ids: so a seed's tokens are the same in every layout and on every device, but for
    shares that rounding moves past the number."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self._draws = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """A token's id, int64 []. logits: [vocabulary]."""
        if is_greedy(self._sampling):
            return logits.argmax()
        drawn = torch.rand((), generator=self._draws, dtype=torch.float64).item()
        shares = (keep_likeliest(logits, self._sampling)).double().softmax(0).cumsum(0)
        found = torch.searchsorted(shares, shares[-1:] * drawn, right=True)[0]
        return found.clamp(max=len(shares) - 1)


def keep_likeliest(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, -inf where a token is not to be drawn: first top_k, then top_p of what it left, as
    transformers has them. The likeliest token is always kept."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)  # the share of all that are likelier
        dropped = (before >= sampling.top_p).index_fill(0, order.new_zeros(1), False)
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), float("-inf"))
    return logits
