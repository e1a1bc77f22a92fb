"""Checks that tensor ranks hold the same bits of parameters that are not cut: norms, biases of row-wise layers,
embeddings of patches.

Nothing sends these parameters from rank to rank: they stay alike because each rank computes the same bits. A device
that miscounts, or a kernel whose sums have no order, makes them differ silently, and the model that is saved is neither
rank's (Megatron-LM compares them as well).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp.core.errors import PartFailed
from dhp.parallel.comm import gather_alike
from dhp.parallel.tensor.slices import cut_of, owned_parameters

_CHUNK = 1 << 22  # values that are widened at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare 64-bit hashes of the parameters that every rank of `group` holds whole. All its ranks together.

    Raises PartFailed, on each of them, with the names of those that differ.
    """
    if dist.get_world_size(group) == 1:
        return
    held = {
        name: owner.get_parameter(own) for name, owner, own in owned_parameters(model) if cut_of(owner, own) is None
    }
    if not held:
        return
    own = torch.stack([hash_bits(parameter.detach()) for parameter in held.values()])
    of_ranks = gather_alike(own, group)
    differing = (of_ranks != of_ranks[0]).any(0).tolist()
    names = [name for name, differs in zip(held, differing, strict=True) if differs]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PartFailed(
            f"tensor ranks no longer hold the same {', '.join(names[:5])}{more}: each computes the same updates of "
            "what none of them cuts, so a device or a kernel gave differing results. Nothing was saved; go on from the "
            "last checkpoint, on other devices if it comes again, and please report the layout"
        )


def hash_bits(tensor: Tensor) -> Tensor:
    """64 bits of all of a tensor's bits and their order, a scalar int64 on its device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.contiguous().view(_INTEGERS[local.dtype.itemsize]).flatten()
    total = torch.full((), len(bits), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        # Odd factors: by an even one, the sign of a float64 would be lost modulo 2^64.
        places = torch.arange(len(chunk), device=bits.device) * 2 + 1 + 2 * number * _CHUNK
        total += (chunk.long() * (places * 0x9E3779B97F4A7C1)).sum()
    return total
