"""Random draws as functions of their purpose, without state.

Each token that a part computes has a key, made of the run's seed, the step, the sample and the token's number in it; of
a tower, the picture and the patch's number in it. A module's draw for a token and a column hashes the token's key, the
module's name and the column (counter-based, as Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). So
whichever rank holds a token draws what one process would, once or again.

Layers are given tokens in many shapes: all, some of them at a time, several as one. `drawing` says which tokens the
states of the calls inside have, and those who cut or sort tokens say how."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

DrawRun = tuple[int, int, int]  # (key, first, tokens): tokens of one sample or picture, from its `first`-th on

# Shifts and factors of mixers: of 64 bits that of SplitMix64, of 32 bits one by Wellons' hash-prospector with factors
# below 2³¹.
_ROUNDS_64 = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_ROUNDS_32 = ((16, 0x21F0AAAD), (15, 0x735A2D97))
# Whose bits are in memory at a time: so few that a CPU keeps them in its cache, and takes one thread to them; of a GPU,
# so few that the eight bytes an element that hashing takes are 16 MiB, which no forecast of its memory counts.
_CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 21}


def draw_key(*what: object) -> int:
    """64 bits, as a signed number, that are another one for each choice of `what`."""
    digest = blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, eq=False)
class TokenKeys:
    """The keys of the tokens that a part's layers are given.

    keys: of each, in order, int64 [tokens]. unit: consecutive ones that become one, as patches do behind a tower.

    tile: so many consecutive keys are of one picture, of which layers see more tokens or other ones; those are
    numbered. 0: layers see the tokens themselves.

    ranks: that have a share of the tokens each between blocks (`dhp.parallel.tensor.sequence_norms`)."""

    keys: Tensor
    unit: int = 1
    tile: int = 0
    ranks: int = 1

    def of_rows(self, rows: int) -> Tensor | None:
        """Keys of the rows of states, int64 [rows]; None where which tokens they are does not follow from how many."""
        tokens = len(self.keys)
        if self.tile and tokens and rows % (tokens // self.tile) == 0:
            each = rows * self.tile // tokens
            numbers = torch.arange(each, device=self.keys.device)
            return mix(self.keys[:: self.tile, None] + numbers).flatten()
        if rows == tokens:
            return self.keys
        if rows * self.unit == tokens:
            return self.keys[:: self.unit]
        return None

    def said(self) -> str:
        """Of how many tokens, or pictures, they are, in words."""
        if self.tile:
            return f"{len(self.keys) // self.tile} pictures, which take no whole number of rows each"
        return f"{len(self.keys)} tokens, {self.unit} of which may become one"

    def chosen(self, order: Tensor | None) -> TokenKeys:
        """Keys of these tokens, by number, as all there are; None: of all, in order."""
        return self if order is None else replace(self, keys=self.keys[order])

    def split(self, counts: Sequence[int]) -> list[TokenKeys]:
        """Keys of so many tokens each."""
        return [replace(self, keys=keys) for keys in self.keys.split(list(counts))]

    def of_call(self, pictures: Sequence[int]) -> TokenKeys:
        """Of pictures with one key each, the key of the one that a call takes; of a dummy where it takes none."""
        assert len(pictures) <= 1, f"pictures {pictures} go together through a tower whose adapters draw"
        kept = self.keys.new_zeros(1) if not pictures else self.keys[pictures[0] : pictures[0] + 1]
        return replace(self, keys=kept)

    def part(self, shape: Sequence[int], number: int, parts: int) -> TokenKeys:
        """Keys of what a block is given where its states, of `shape` without their width, are cut into parts along
        their last dimension. Where ranks have shares, a block gathers the parts of all."""
        rows = prod(shape)
        if self.ranks > 1:
            filled = F.pad(self.keys, (0, rows * self.ranks - len(self.keys)))
            return replace(self, keys=filled.view(self.ranks, rows).tensor_split(parts, dim=-1)[number].flatten())
        keys = self.of_rows(rows)
        cut = torch.empty(0) if keys is None else keys.view(*shape).tensor_split(parts, dim=-1)[number].flatten()
        return replace(self, keys=cut, unit=1, tile=0)


_here = threading.local()  # on GPUs, backward runs layers again in threads of autograd's own


def current_keys() -> TokenKeys | None:
    """Keys of the tokens that are computed here; None where nobody has said."""
    return getattr(_here, "keys", None)


@contextmanager
def drawing(keys: TokenKeys | None) -> Iterator[None]:
    """In the block layers are given these tokens; None: nothing is known of them."""
    outer = current_keys()
    _here.keys = keys
    try:
        yield
    finally:
        _here.keys = outer


def mix(keys: Tensor) -> Tensor:
    """int64 whose bits each depend on all bits of one of `keys`."""
    for shift, factor in _ROUNDS_64:
        keys = _folded(keys, shift) * factor
    return _folded(keys, 31)


def _folded(keys: Tensor, shift: int) -> Tensor:
    return keys ^ ((keys >> shift) & ((1 << 64 - shift) - 1))


def keys_of(runs: Sequence[DrawRun]) -> Tensor:
    """Keys of the tokens of these runs, int64 [tokens]."""
    numbered = [torch.arange(first, first + count) + key for key, first, count in runs]
    return mix(torch.cat(numbered)) if numbered else torch.empty(0, dtype=torch.long)


def column_bits(first: int, count: int, device: torch.device) -> Tensor:
    """Bits of columns of the states of a whole model, int32 [count]."""
    return (mix(torch.arange(first + 1, first + count + 1, device=device)) >> 32).to(torch.int32)


def draw_dropped(keys: Tensor, module: int, columns: Tensor, share: float) -> Tensor:
    """Which elements a module drops, bool [tokens, columns]: each with a chance of `share`, by itself.

    module: a number for it, of 64 bits. columns: their `column_bits`."""
    tokens = ((keys * (2 * module + 1 & (1 << 63) - 1)) >> 32).to(torch.int32)[:, None]
    threshold = round(share * (1 << 32)) - (1 << 31)
    dropped = torch.empty(len(keys), len(columns), dtype=torch.bool, device=keys.device)
    each = max(1, _CHUNK_ELEMENTS[keys.device.type] // max(1, len(columns)))
    for begin in range(0, len(keys), each):
        bits = tokens[begin : begin + each] + columns
        for shift, factor in _ROUNDS_32:  # arithmetic shifts forget a bit of 32, and save a pass over all of them
            bits.bitwise_xor_(bits >> shift).mul_(factor)
        torch.lt(bits, threshold, out=dropped[begin : begin + each])
    return dropped
