"""Muon: a hidden layer's matrix moves by its orthogonalized momentum, all else by AdamW.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable for
LLM Training", whose factor 0.2 √max(rows, columns) gives an update the size of AdamW's, so that both take the same
learning rate and decay. Matrices that a rank holds whole are torch's own; of one that is cut, momentum stays cut, and
what is orthogonalized is put together on one rank: orthogonalizing parts of a matrix by themselves is another
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz, muon

from dhp.core.parameters import Group
from dhp.core.state_forms import MOMENTS, MOMENTUM
from dhp.parallel.optim.base import STEP, group_parameters, make_adamw_of
from dhp.parallel.optim.places import PlacedOptimizer
from dhp.parallel.optim.whole_matrices import WholeMatrices

MATCH_ADAMW, ORIGINAL = ADJUSTMENTS = ("match_rms_adamw", "original")  # of the learning rate, as torch names them


class Muon(PlacedOptimizer):
    """torch.optim.Muon of the `matrices`, each a group of parameters, and torch.optim.AdamW of the `others`."""

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        momentum: float,
        adjust: str,
        betas: Sequence[float],
        eps: float,
    ):
        self._adamw = make_adamw_of(others, betas, eps) if others else None
        # torch's own, for its checks and its groups' settings.
        self._muon = torch.optim.Muon(list(matrices), momentum=momentum, adjust_lr_fn=adjust) if matrices else None
        made = [one for one in (self._muon, self._adamw) if one is not None]
        super().__init__([{"params": []}], {"fused": self._adamw is not None and self._adamw.defaults["fused"]})
        # One dictionary of states and one list of groups for both, which who holds the optimizer reads and sets.
        self.param_groups = [group for one in made for group in one.param_groups]
        for one in made:
            one.state = self.state
        self._matrices = {weight for group in self._matrix_groups() for weight in group["params"]}
        self._exchanges: list[tuple[list[Tensor], WholeMatrices]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient, times `coefficient`; all ranks that share matrices together. There
        is no closure."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.coefficient != 1.0 and gradients:
            torch._foreach_mul_(gradients, self.coefficient)
        for group in self._matrix_groups():
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if MOMENTUM not in state:
                        state |= {STEP: torch.tensor(0.0), **self.new_states(weight)}
                    state[STEP] += 1
            self._update_whole(group)
        self._update_cut()
        if self._adamw is not None:
            self._adamw.step()

    def new_states(self, weight: Tensor) -> dict[str, Tensor]:
        """As `PlacedOptimizer.new_states`."""
        kinds = (MOMENTUM,) if weight in self._matrices else MOMENTS
        return {kind: torch.zeros_like(weight) for kind in kinds}

    def _matrix_groups(self) -> list[dict[str, Any]]:
        return [] if self._muon is None else self._muon.param_groups

    def _update_whole(self, group: dict[str, Any]) -> None:
        weights = [w for w in group["params"] if w.grad is not None and w not in self.shared]
        keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        momenta = [self.state[weight][MOMENTUM] for weight in weights]
        muon(weights, [w.grad for w in weights], momenta, has_complex=False, **{key: group[key] for key in keys})

    def _update_cut(self) -> None:
        """The same of matrices that are cut; `torch.optim._muon` has it in these steps."""
        if self._exchanges is None:
            self._exchanges = list(self._make_exchanges())
        groups = {weight: group for group in self._matrix_groups() for weight in group["params"]}
        for weights, exchange in self._exchanges:
            if weights[0].grad is None:
                continue  # in a step without any, and all ranks have none then

            def ascended(number: int, weights: Sequence[Tensor] = weights) -> Tensor:
                weight, momentum = weights[number], groups[weights[number]]["momentum"]
                kept = self.state[weight][MOMENTUM].lerp_(weight.grad, 1 - momentum)
                return weight.grad.lerp(kept, momentum).bfloat16()  # orthogonalizing begins with that

            orthogonal = _orthogonalizer(groups[weights[0]])
            for number, update in exchange.changed(ascended, orthogonal, weights[0].new_empty(0).bfloat16()):
                weight, group = weights[number], groups[weights[number]]
                whole = torch.Size(self.shared[weight].place.whole)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], whole))

    def _make_exchanges(self) -> Iterator[tuple[list[Tensor], WholeMatrices]]:
        """The cut matrices of each group of ranks, in an order that is the same on all of them."""
        matrices = [weight for group in self._matrix_groups() for weight in group["params"]]
        for ranks, numbers in self.by_ranks(matrices).items():
            weights = [matrices[number] for number in numbers]
            yield weights, WholeMatrices([self.shared[weight].place for weight in weights], ranks)


def _orthogonalizer(group: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Orthogonalizes a whole matrix as a group of torch.optim.Muon says."""
    return lambda whole: _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def make_muon(
    named: Iterable[tuple[str, nn.Parameter]],
    group: Callable[[str], Group],
    betas: Sequence[float],
    eps: float,
    matrices: Collection[str],
    momentum: float,
    adjust: str,
) -> Muon:
    """The optimizer of named parameters, those of each `group` in one or two groups of it, which keep its name.
    matrices: names of those that are orthogonalized."""
    found = list(named)
    hidden = group_parameters([(name, weight) for name, weight in found if name in matrices], group)
    others = group_parameters([(name, weight) for name, weight in found if name not in matrices], group)
    return Muon(hidden, others, momentum, adjust, betas, eps)
