"""Private names of torch; tests/core/test_torch_private.py has their canaries."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as ShardingMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as MeshPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental import _config as shapes
from torch.optim._muon import _adjust_lr as muon_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize
from torch.optim._muon import muon as muon_step
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "CHECKS",
    "COPIES",
    "FRONT_KEY",
    "FUSED_ATTENTION",
    "MeshPlacement",
    "ShardingMesh",
    "StridedShard",
    "TorchDispatchMode",
    "add_each",
    "all_groups",
    "backends_of",
    "copy_each",
    "count_graphs",
    "forks_may_use_gpus",
    "is_traceable_wrapper_subclass",
    "is_view_of_parameter",
    "keys_behind",
    "limit_group",
    "local_shape_and_offset",
    "longest_timeout",
    "muon_rate",
    "muon_step",
    "norms_of",
    "orthogonalize",
    "persistent_buffers",
    "require_later",
    "saved_tensor_hooks",
    "scale_each",
    "set_allocator",
    "split_tensor",
    "tell_sizes_apart",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


CHECKS = torch.ops.aten._is_all_true.default  # of torch._check and its kin, on a tensor
COPIES = torch.ops.aten._to_copy.default  # of Tensor.to
FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # has a meta kernel, and a backward
_ANSWER_S = 60  # a driver without a daemon that keeps it is loaded first


def forks_may_use_gpus() -> bool:
    """Whether CUDA works in a fork of this process, which it does as long as nothing has asked the driver here. Asked
    of a fork that ends at once: the answer would be what spoils it. Torch counts no GPU where the driver fails."""
    if not torch.cuda._is_compiled():
        return True
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_ANSWER_S)
            none = torch.cuda._device_count_nvml() <= 0
            if not torch.cuda._is_in_bad_fork() and (none or torch._C._cuda_getDeviceCount() > 0):
                os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def count_graphs() -> tuple[int, int]:
    """Graphs that torch.compile has made in this process, and how often it gave a function up behind as many as it
    makes of one."""
    utils = sys.modules.get("torch._dynamo.utils")  # without it nothing was compiled, and to import it takes seconds
    if utils is None:
        return 0, 0
    counters = utils.counters
    given_up = [n for of in list(counters.values()) for name, n in list(of.items()) if _LIMIT in str(name)]
    return counters["stats"]["unique_graphs"], sum(given_up)


_LIMIT = "recompile limit exceeded"


def tell_sizes_apart() -> None:
    """Let what is compiled from here on in this process not take two sizes for one because they are equal once: with
    data of varied lengths each chance of this kind becomes a graph."""
    shapes.use_duck_shape = False


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process."""
    return list(_world.pg_map)


def limit_group(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a group's collectives this limit."""
    _set_pg_timeout(timeout, group)


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Of each kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def longest_timeout(group: dist.ProcessGroup) -> timedelta:
    """Of a group's backends."""
    return max(backend.options._timeout for backend in backends_of(group))


def split_tensor(placement: Any, tensor: Tensor, ranks: int) -> list[Tensor]:
    """The pieces of a tensor that ranks have under a placement."""
    return placement._split_tensor(tensor, ranks, with_padding=False, contiguous=True)[0]


def scale_each(tensors: Sequence[Tensor], factor: Any) -> None:
    """Multiply all in place, in few kernels."""
    torch._foreach_mul_(list(tensors), factor)


def copy_each(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy all in few kernels."""
    torch._foreach_copy_(list(into), list(tensors))


def add_each(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Add all in few kernels."""
    if into[0].is_cuda and into[0].dtype != tensors[0].dtype:  # one kernel of several tensors adds one format
        narrow, tensors = tensors, [torch.empty_like(one) for one in into]
        copy_each(tensors, narrow)
    torch._foreach_add_(list(into), list(tensors))


def norms_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, in few kernels."""
    return list(torch._foreach_norm(list(tensors), dtype=dtype))


def require_later(condition: Tensor, message: str) -> None:
    """Raise where a tensor of one truth is false, without waiting for a device."""
    torch._assert_async(condition, message)


FRONT_KEY = torch._C.DispatchKey.BackendSelect  # of kernels in front of those of collectives


def keys_behind(key: Any) -> Any:
    """The dispatcher's keys behind this one, to which a kernel in front hands a call on."""
    return torch._C._dispatch_keyset_full_after(key)


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks that are in force: pack and unpack. The only way to build on those of torch's own
    checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_view_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a parameter."""
    return isinstance(tensor._base, nn.Parameter)


def set_allocator(settings: str) -> None:
    """The settings of the allocator of device memory; torch may have read the environment when it was imported."""
    torch._C._accelerator_setAllocatorSettings(settings)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with a model's weights, though nothing trains them."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
