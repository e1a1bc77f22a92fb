"""Bytes that sharded attention sends, in closed form (after USP, Fang and Zhao 2024, section 4).

Letters: S tokens of the sequence, R ring ranks, U Ulysses ranks in each, N = R·U; H = heads × head dimension, H_kv the
same of keys and values; e bytes an element, x of the gradients of keys and values on their way (float32: 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What is sharded how. dim: of a head; gather: the ring fetches all keys and values at once."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    ring: int
    ulysses: int
    element_bytes: int
    exact_bytes: int = 4
    gather: bool = False

    @property
    def _a_rank(self) -> float:
        return self.tokens / (self.ring * self.ulysses)  # S/N

    @property
    def _sent_kv_width(self) -> int:
        # Heads are repeated until each Ulysses rank gets whole ones.
        return self.kv_heads * (self.ulysses // math.gcd(self.kv_heads, self.ulysses)) * self.dim

    def exchange(self) -> float:
        """Bytes a rank sends to its Ulysses ranks, forward; backward sends as many: e (S/N) (2H + 2H_kv) (U−1)/U."""
        widths = 2 * self.heads * self.dim + 2 * self._sent_kv_width
        return self.element_bytes * self._a_rank * widths * (self.ulysses - 1) / self.ulysses

    def ring_forward(self) -> float:
        """Bytes a rank sends around the ring: 2 e (S/N) H_kv (R−1)."""
        return 2 * self.element_bytes * self._a_rank * self._sent_kv_width * (self.ring - 1)

    def ring_backward(self) -> float:
        """2 (S/N) H_kv (e + x) (R−1): keys and values again, and their gradients, which start at the first other rank.

        Two ranks, and those that fetch all at once, keep the keys and values of forward: 2 (S/N) H_kv x (R−1).
        """
        again = 0 if self.gather or self.ring == 2 else self.element_bytes
        return 2 * self._a_rank * self._sent_kv_width * (again + self.exact_bytes) * (self.ring - 1)
