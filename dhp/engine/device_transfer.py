"""Host-to-device transfers: many tensors in one, without blocking."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dhp.parallel.attention.segment_plan import SegmentPlan, index_tensors, with_tensors

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. Where it is there already, it stays in the memory it was received in, which must not be
    written to."""
    if tensor.device.type == device.type:
        return tensor
    return _pinned(tensor).to(device, non_blocking=True)


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors on `device` that the model may write to, integers as int64; all in one transfer."""
    if not tensors:
        return []
    flat = torch.cat([_as_integers(tensor.reshape(-1)) for tensor in tensors])
    if device.type != "cpu":
        flat = _pinned(flat).to(device, non_blocking=True)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [_as_before(piece, tensor).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def move_with_plans(
    tensors: Sequence[Tensor], plans: Sequence[SegmentPlan], device: torch.device
) -> tuple[list[Tensor], list[SegmentPlan]]:
    """`move_together` of the tensors and of what the plans hold."""
    inside = [index_tensors(plan) for plan in plans]
    moved = iter(move_together([*tensors, *(tensor for held in inside for tensor in held)], device))
    return [next(moved) for _ in tensors], [with_tensors(plan, moved) for plan in plans]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of all tensors, one behind another; a single tensor as it is, without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _as_integers(tensor: Tensor) -> Tensor:
    """int64 of as many; numbers with fractions (positions by seconds) by their bits."""
    return (tensor.view(_BITS[tensor.dtype]) if tensor.is_floating_point() else tensor).long()


def _as_before(integers: Tensor, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return integers
    return integers.to(_BITS[tensor.dtype]).view(tensor.dtype)


def _pinned(tensor: Tensor) -> Tensor:
    # From pageable memory a transfer waits until all that is queued on the device is done.
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def gradient_of(leaf: Tensor) -> Tensor:
    """A leaf's gradient; zeros where nothing depends on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def rows_of(placement: Tensor | None, inside: Tensor) -> Tensor:
    """The place of each row of an encoder's embeddings, as received, among the flattened rows × tokens; where some rows
    go to several tokens, of each token in order, behind `repeats_of`. inside: not 0 at the tokens in whose places they
    go, [rows, tokens]."""
    if placement is None:
        return torch.empty(0, dtype=torch.long)
    places = inside.flatten().nonzero()[:, 0]
    if repeats_of(placement) is not None:
        return places
    rows = torch.empty_like(placement)
    rows[placement] = places
    return rows


def repeats_of(placement: Tensor | None) -> Tensor | None:
    """Which row received goes to each token, where some go to several; None where each goes to one."""
    if placement is None or len(placement) == int(placement.max()) + 1:
        return None
    return placement
