"""The part of vLLM 0.33.0 that weights are handed to: names, arguments and rules, as published; a test holds them
against vLLM where it is installed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "vllm.distributed.weight_transfer"
VERSION = "0.33.0"
# Of `inspect.signature`, names of arguments alone.
ARGUMENTS = {
    "ParamMeta": ["name", "dtype", "shape", "owners", "mesh_shape", "placements"],
    "WeightSource.iter_full": ["self"],
    "WeightSource.iter_local": ["self"],
    "WeightSource.owned_names": ["self", "rank"],
    "WeightSource.implements_iter_full": ["self"],
    "WeightTransferTrainerFactory.trainer_init": ["init_info", "client", "source"],
}


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.__dict__.get("metadata", cached_property(len)), cached_property):
            raise TypeError("metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


def make_modules() -> dict[str, ModuleType]:
    """The module and its packages, for `sys.modules`."""
    names = ["vllm", "vllm.distributed", MODULE]
    made = {name: ModuleType(name) for name in names}
    made[MODULE].ParamMeta, made[MODULE].WeightSource = ParamMeta, WeightSource
    return made
