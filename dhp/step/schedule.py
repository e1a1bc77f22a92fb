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


def vision_ahead(micro_batches: int) -> Schedule:
    """Vision encodes micro-batch m+1 while text works on m, all within one step: F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 …

    Each part runs its own actions in order and waits only for what it needs, so the overlap needs no more than this
    order. Two micro-batches of vision activations are alive at a time instead of one.
    """
    actions: list[Forward | Backward] = [Forward(VISION, 0)]
    for m in range(micro_batches):
        if m + 1 < micro_batches:
            actions.append(Forward(VISION, m + 1))
        actions += [Forward(TEXT, m), Backward(TEXT, m), Backward(VISION, m)]
    return tuple(actions)


SCHEDULES = {"sequential": sequential, "vision_ahead": vision_ahead}
