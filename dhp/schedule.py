"""In which order a step visits parts and micro-batches: a list of values, printable and comparable."""

from __future__ import annotations

from dataclasses import dataclass

VISION, TEXT = 0, 1


@dataclass(frozen=True)
class Forward:
    """Run micro-batch `micro_batch` forward through part `part`."""

    part: int
    micro_batch: int

    def __str__(self) -> str:
        return f"F{self.part}.{self.micro_batch}"


@dataclass(frozen=True)
class Backward:
    """Run micro-batch `micro_batch` backward through part `part`."""

    part: int
    micro_batch: int

    def __str__(self) -> str:
        return f"B{self.part}.{self.micro_batch}"


Schedule = tuple[Forward | Backward, ...]


def sequential(micro_batches: int) -> Schedule:
    """One micro-batch after the other, forward through both parts and back: F0.0 F1.0 B1.0 B0.0 F0.1 …"""
    return tuple(
        action
        for m in range(micro_batches)
        for action in (Forward(VISION, m), Forward(TEXT, m), Backward(TEXT, m), Backward(VISION, m))
    )
