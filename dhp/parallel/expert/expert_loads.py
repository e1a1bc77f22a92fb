"""Counts which experts tokens visit."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dhp.parallel.expert.expert_modules import is_experts
from dhp.parallel.expert.expert_shares import count_visits


class ExpertLoads:
    """The rows of each expert of the layers of a model, of this rank's tokens, in forwards that backward follows. What
    backward runs again counts twice, as it is computed twice: in a layer, of all experts alike."""

    def __init__(self, model: nn.Module, layers: str, experts: int):
        """layers: the path of the model's layers. experts: of each layer, on all ranks together."""
        self._experts = experts
        self._counts: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if is_experts(module) and name.startswith(f"{layers}."):
                layer = name.removeprefix(f"{layers}.").removesuffix(".experts").removesuffix(".mlp")
                module.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)

    def take(self) -> dict[str, tuple[int, ...]]:
        """By layer since the last time, the rows of each expert. The host waits for the device."""
        counts, self._counts = self._counts, {}
        rows = torch.stack([*counts.values()]).tolist() if counts else []
        return {layer: tuple(of) for layer, of in zip(counts, rows, strict=True)}

    def _count(self, layer: str, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        visited = given[1] if len(given) > 1 else named["top_k_index"]
        if not torch.is_grad_enabled() or visited.is_meta:
            return
        pairs = visited.detach().flatten().clamp(max=self._experts)  # beyond them are some that compute nothing
        found = count_visits(pairs, self._experts + 1)[:-1]
        self._counts[layer] = self._counts[layer] + found if layer in self._counts else found
