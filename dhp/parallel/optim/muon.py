"""Muon: orthogonalized momentum for hidden matrices, cut or whole."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.core.parameters import MOMENTS, MOMENTUM, ParameterGroup
from dhp.core.torch_private import muon_rate, muon_step, orthogonalize, scale_each
from dhp.parallel.comm import exchange_rows
from dhp.parallel.optim.base import STEP, group_parameters, make_adamw_of
from dhp.parallel.optim.value_ranges import Place, PlacedOptimizer

Change = Callable[[Tensor], Tensor]  # a whole matrix → another of its shape and format


class WholeMatrices:
    """Some matrices of one group of ranks, all of which make it together. places: of what this rank holds of each."""

    def __init__(self, places: Sequence[Place], group: dist.ProcessGroup):
        self._group, self._own = group, places
        self._of_ranks: list[list[Place]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(self._of_ranks, list(places), group=group)

    def changed(self, part: Callable[[int], Tensor], change: Change, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The number of each matrix, and this rank's part of what `change` makes of it. All ranks together.

        part: this rank's part of a matrix, by its number. like: a tensor of the parts' device and format."""
        ranks, own = len(self._of_ranks), dist.get_rank(self._group)
        for first in range(0, len(self._own), ranks):
            round_of = range(first, min(first + ranks, len(self._own)))
            mine = first + own if first + own in round_of else None
            send = [self._own[number].count for number in round_of] + [0] * (ranks - len(round_of))
            held = [] if mine is None else [places[mine] for places in self._of_ranks]
            receive = [place.count for place in held] or [0] * ranks
            sent = torch.cat([part(number).flatten() for number in round_of])
            came = exchange_rows(sent, send, receive, self._group)
            back = _change(came, held, change) if held else like.new_empty(0)
            parts = exchange_rows(back, receive, send, self._group).split(send)
            for number, values in zip(round_of, parts):
                yield number, values.view(self._own[number].shape)


def _change(came: Tensor, held: Sequence[Place], change: Change) -> Tensor:
    """Put parts together, change the whole, and take it apart again."""
    whole = came.new_empty(held[0].whole)
    for place, values in zip(held, came.split([place.count for place in held]), strict=True):
        whole[place.numbers] = values.view(place.shape)
    changed = change(whole)
    return torch.cat([changed[place.numbers].flatten() for place in held])


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
            scale_each(gradients, self.coefficient)
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
        muon_step(weights, [w.grad for w in weights], momenta, has_complex=False, **{key: group[key] for key in keys})

    def _update_cut(self) -> None:
        """The same of matrices that are cut; torch has it in these steps."""
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
                weight.add_(update, alpha=-muon_rate(group["lr"], group["adjust_lr_fn"], whole))

    def _make_exchanges(self) -> Iterator[tuple[list[Tensor], WholeMatrices]]:
        """The cut matrices of each group of ranks, in an order that is the same on all of them."""
        matrices = [weight for group in self._matrix_groups() for weight in group["params"]]
        for ranks, numbers in self.by_ranks(matrices).items():
            weights = [matrices[number] for number in numbers]
            yield weights, WholeMatrices([self.shared[weight].place for weight in weights], ranks)


def _orthogonalizer(group: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Orthogonalizes a whole matrix as a group of torch.optim.Muon says."""
    return lambda whole: orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def make_muon(
    named: Iterable[tuple[str, nn.Parameter]],
    group: Callable[[str], ParameterGroup],
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
