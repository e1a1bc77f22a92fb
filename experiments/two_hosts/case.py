"""What is measured: one sharded attention, and what it should send."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.plan.count.rank_traffic import DividedAttention

FORWARD, BACKWARD = "forward", "backward"
ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True)
class Case:
    """Ranks in order, Ulysses innermost: with ulysses=2 the exchange stays on a host and the ring crosses."""

    layout: str
    ring: int
    ulysses: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    gather: bool = False

    @property
    def kv_ratio(self) -> float:
        return self.kv_heads / self.heads

    def bytes_sent(self, direction: str) -> float:
        """By a rank, in all."""
        shape = self._shape()
        return shape.exchange() + self._around(shape, direction)

    def bytes_over_link(self, direction: str) -> float:
        """By the rank that sends most to the other host. A ring of 4 crosses at two places, one of 2 everywhere; of the
        three peers of a Ulysses rank two are there, or none."""
        shape = self._shape()
        return shape.exchange() * (2 / 3 if self.ulysses == 4 else 0) + self._around(shape, direction)

    def _around(self, shape: DividedAttention, direction: str) -> float:
        return shape.ring_forward() if direction == FORWARD else shape.ring_backward()

    def _shape(self) -> DividedAttention:
        numbers = (self.tokens, self.heads, self.kv_heads, self.dim, self.ring, self.ulysses)
        return DividedAttention(*numbers, ELEMENT_BYTES, gather=self.gather)
