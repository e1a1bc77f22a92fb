"""What dhp calls and an older torch lacks, and a name in Ray's place. To be imported before dhp.

`varlen_attn` came with torch 2.10, and its scale, windows and grouped heads later. Its kernel has been there for long.
`reduce_scatter_single` is the later name of `reduce_scatter_tensor`. Of Ray a rank's process imports errors and calls
one function."""

import inspect
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "torch.nn.attention.varlen"
OWN = "torch's own"
NEEDED = {"scale", "window_size", "enable_gqa"}


class StandIn(torch.autograd.Function):
    """Flash attention, all heads and any number of keys' heads that divides them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *how: Any) -> Tensor:
        causal, scale = how
        output, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, bounds, bounds, longest, longest, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, bounds, output, lse, seed, offset)
        ctx.longest, ctx.how = longest, how
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bounds, output, lse, seed, offset = ctx.saved_tensors
        (causal, scale), longest = ctx.how, ctx.longest
        gradients = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, key, value, output, lse, bounds, bounds, longest, longest, 0.0, causal,
            seed, offset, scale=scale,
        )  # fmt: skip
        return *gradients, None, None, None, None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's, as far as `dhp.parallel.attention.attention_kernels` calls it: queries and keys of the same segments.
    Named as torch names them, since dhp looks at the names. Raises NotImplementedError for a window."""
    if window_size not in ((-1, -1), (-1, 0)):
        raise NotImplementedError(f"the stand-in for varlen_attn has no windows, and {window_size} is one")
    return StandIn.apply(query, key, value, bounds, longest, window_size == (-1, 0), scale)


def _provide() -> str:
    """Put the stand-in where torch's own is not there, or takes too few arguments. Which of them it is."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        varlen = sys.modules[NAME] = ModuleType(NAME)
    own = getattr(varlen, "varlen_attn", None)
    missing = NEEDED if own is None else NEEDED - set(inspect.signature(own).parameters)
    if not missing:
        return OWN
    # A fork server may have imported the second before.
    for module in (varlen, sys.modules.get("dhp.parallel.attention.attention_kernels")):
        if module is not None:
            module.varlen_attn = varlen_attn
    return f"a stand-in for torch's, which lacks {', '.join(sorted(missing))}"


if not hasattr(dist, "reduce_scatter_single"):
    dist.reduce_scatter_single = dist.reduce_scatter_tensor

WAY = _provide()


LOOPBACK = "127.0.0.1"
ERRORS = ("GetTimeoutError", "RayActorError", "RayError", "RayTaskError")


def _provide_ray() -> None:
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    for name in ERRORS:
        setattr(errors, name, type(name, (Exception,), {}))
    ray.exceptions, ray.ObjectRef = errors, type("ObjectRef", (), {})
    ray.util = ModuleType("ray.util")
    ray.util.get_node_ip_address = lambda: LOOPBACK  # a rank on a GPU names its node in errors
    sys.modules |= {"ray": ray, "ray.exceptions": errors, "ray.util": ray.util}


if find_spec("ray") is None:
    _provide_ray()
