"""Cross-entropy of a head split over tensor ranks, in chunks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from dhp.core.batch import CHUNK_ROWS, LogitRule
from dhp.core.torch_private import local_shape_and_offset, require_later
from dhp.parallel.comm import largest_in_place, sum_in_place
from dhp.parallel.tensor.slices import AdapterCut, cut_of

PLAIN = LogitRule()


def token_loss_sum(
    head: nn.Linear,
    states: Tensor,
    targets: Tensor,
    chunk_rows: int = CHUNK_ROWS,
    rule: LogitRule = PLAIN,
    factor: float | Tensor = 1.0,
    losses: list[Tensor] | None = None,
    entropy_factor: Tensor | None = None,
) -> Tensor:
    """Σ −factor × log softmax(logits)[targets] of the logits that `rule` makes of head(states), a scalar in float32
    (float64 for float64 states).

    entropy_factor: of each row, [rows], by which the entropy of softmax(logits) is multiplied and added; None: it is
    not.

    states: [rows, hidden], the same on every tensor rank; targets: int64 [rows]; factor: of all rows, or of each,
    [rows]. `head.weight` is whole, or this rank's slice of the vocabulary (`dhp.parallel.tensor.slices`, or a
    DTensor). Raises ValueError for any other split, and for a head with a bias, which no known family has.

    losses: gets the loss of each row without its factor, a tensor a chunk, on each tensor rank.

    The result may be added to, but not multiplied: its gradient must be 1, and whatever the loss is multiplied by is
    given as `factor`. So nothing passes over the head's gradient a second time. Backward raises otherwise."""
    weight, first, group, _ = _head_slice(head)
    of_rows = (factor, entropy_factor)
    return _TokenLossSum.apply(states, weight, targets, first, group, chunk_rows, rule, of_rows, losses)


@torch.no_grad()
def judge_tokens(
    head: nn.Linear,
    states: Tensor,
    targets: Tensor,
    chunk_rows: int = CHUNK_ROWS,
    rule: LogitRule = PLAIN,
    entropies: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, −log softmax(logits)[targets], and bool [rows]: whether no token has a higher logit than
    the target. Saves nothing for backward. As `token_loss_sum` otherwise.

    entropies: gets the entropy of softmax(logits) of each row, in nats, a tensor a chunk."""
    weight, first, group, _ = _head_slice(head)
    exact = torch.float64 if states.dtype == torch.float64 else torch.float32
    losses, right = [], []
    for rows, target in zip(states.split(chunk_rows), targets.split(chunk_rows), strict=True):
        found = _softmax(rows, weight, target - first, group, exact, rule, entropies is not None)
        losses.append(found.losses)
        right.append(found.wanted >= 0)
        if entropies is not None:
            entropies.append(found.entropies)
        del found  # or two chunks' logits would exist at a time
    return torch.cat(losses), torch.cat(right)


def whole_logits(head: nn.Linear, states: Tensor, rule: LogitRule = PLAIN) -> Tensor:
    """The logits of all tensor ranks' vocabulary, [rows, vocabulary], on each of them; without gradients. As
    `token_loss_sum` otherwise, and as it raises."""
    weight, first, group, size = _head_slice(head)
    exact = torch.float64 if states.dtype == torch.float64 else torch.float32
    own = _logits(states, weight, exact, rule)
    if group is None:
        return own
    every = own.new_zeros((len(own), size))  # what another rank adds to it is 0: nothing is rounded
    every[:, first : first + own.shape[1]] = own
    return sum_in_place(every, group)


def _head_slice(head: nn.Linear) -> tuple[Tensor, int, dist.ProcessGroup | None, int]:
    """This rank's rows of the head, the token id of the first, the ranks that hold the others, and how many there are
    in all."""
    if head.bias is not None:
        raise ValueError("a head with a bias is not supported; add its gradient here and to the tests first")
    weight, cut = head.weight, cut_of(head, "weight")
    if isinstance(weight, DTensor):  # a model that transformers' own styles cut
        cut = AdapterCut(weight.device_mesh, weight.placements, weight.shape)
        weight = weight.to_local(grad_placements=weight.placements)
    return weight, *_row_slice(cut), len(weight) if cut is None else cut.shape[0]


def _row_slice(cut: AdapterCut | None) -> tuple[int, dist.ProcessGroup | None]:
    """The token id of this rank's first row of the head, and the ranks that hold the others."""
    if cut is None or all(placement.is_replicate() for placement in cut.placements):
        return 0, None  # summing over ranks that all hold the whole vocabulary would count it several times
    if cut.placements != (Shard(0),):
        raise ValueError(
            f"the head is split as {cut.placements}, but a vocabulary split over one mesh axis, (Shard(dim=0),), "
            "is what the loss knows; change the model's tensor-parallel plan for the head"
        )
    _, offset = local_shape_and_offset(cut.shape, cut.mesh, cut.placements)
    return offset[0], cut.mesh.get_group()


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        group: dist.ProcessGroup | None,
        chunk_rows: int,
        rule: LogitRule,
        factors: tuple[float | Tensor, Tensor | None],
        kept: list[Tensor] | None,
    ) -> Tensor:
        exact = torch.float64 if states.dtype == torch.float64 else torch.float32
        total = states.new_zeros((), dtype=exact)
        grad_states, grad_weight = torch.empty_like(states), None
        for rows, target, grad, *of_rows in zip(
            *(one.split(chunk_rows) for one in (states, targets, grad_states)),
            *(_factors(factor, len(states), chunk_rows, exact) for factor in factors),
            strict=True,
        ):
            found = _softmax(rows, weight, target - first, group, exact, rule, of_rows[1] is not None)
            total += (found.losses * of_rows[0]).sum()
            if of_rows[1] is not None:
                total += (found.entropies * of_rows[1]).sum()
            if kept is not None:
                kept.append(found.losses)
            slopes = _slopes(found, rule, *of_rows)
            del found  # or two chunks' logits would exist at a time
            slopes = slopes.to(rows.dtype)
            torch.mm(slopes, weight, out=grad)
            # A single chunk's product is rounded once, as autograd's own is; several are summed before they are.
            grad_weight = _added(grad_weight, slopes.T, rows, exact if len(rows) < len(states) else weight.dtype)
        ctx.group = group
        ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        once = (gradient == 1) | gradient.isnan()
        require_later(once, "the sum of token losses was multiplied; give what by as `factor`")
        grad_states, grad_weight = ctx.saved_tensors
        for made in (grad_states, grad_weight):  # one element that is not a number breaks the norm of all of them
            made.data[:1, :1].mul_(gradient)
        if ctx.group is not None:  # each rank has the part that its own vocabulary gives
            grad_states = sum_in_place(grad_states.clone(), ctx.group)
        return grad_states, grad_weight, None, None, None, None, None, None, None


def _added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right, in `dtype`; the first product is the total."""
    # torch multiplies 16-bit matrices into 32 bits on GPUs alone.
    wide = left.is_cuda and left.dtype.itemsize == 2 and dtype == torch.float32
    product = torch.mm(left, right, out_dtype=dtype) if wide else torch.mm(left, right)
    return product.to(dtype) if total is None else total.add_(product)


def _factors(
    factor: float | Tensor | None, rows: int, chunk_rows: int, dtype: torch.dtype
) -> Sequence[float | Tensor | None]:
    if isinstance(factor, Tensor):
        return factor.to(dtype).split(chunk_rows)
    return [factor] * max(1, -(-rows // chunk_rows))


class _Softmax(NamedTuple):
    """Of a chunk's rows: this rank's logits [rows, own vocabulary], and the highest on any rank; whether the target is
    in this rank's part, and its column there, [rows, 1]; and e^(logit − highest), with its sum over all ranks.

    wanted: the target's logit − highest. spread: Σ e^(logit − highest) × (logit − highest) over all ranks, where it was
    asked for."""

    logits: Tensor
    highest: Tensor
    mine: Tensor
    column: Tensor
    exponentials: Tensor
    total: Tensor
    wanted: Tensor
    spread: Tensor

    @property
    def losses(self) -> Tensor:
        return self.total.log() - self.wanted

    @property
    def entropies(self) -> Tensor:
        return self.total.log() - self.spread / self.total


def _softmax(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    exact: torch.dtype,
    rule: LogitRule,
    spreads: bool,
) -> _Softmax:
    """target: relative to this rank's first token, so out of range on the ranks that do not hold it."""
    logits = _logits(rows, weight, exact, rule)
    highest = logits.max(dim=-1).values
    if group is not None:
        largest_in_place(highest, group)
    mine = (target >= 0) & (target < len(weight))
    column = target.clamp(0, len(weight) - 1)[:, None]
    exponentials = (logits - highest[:, None]).exp_()
    wanted = torch.where(mine, logits.gather(1, column)[:, 0] - highest, 0.0)
    spread = [(exponentials * (logits - highest[:, None])).sum(-1)] if spreads else []
    sums = torch.stack([exponentials.sum(-1), wanted, *spread])
    if group is not None:
        sum_in_place(sums, group)
    return _Softmax(logits, highest, mine, column, exponentials, sums[0], sums[1], sums[-1])


def _slopes(found: _Softmax, rule: LogitRule, factor: float | Tensor, entropy_factor: Tensor | None) -> Tensor:
    """factor × d loss / d output of this rank's part of the head, [rows, own vocabulary], and that of the entropy.
    factors: [rows] each, or of all rows. Takes the place of the exponentials."""
    scale = rule.factor / rule.temperature
    factor = factor * scale
    more = None
    if entropy_factor is not None:  # d entropy / d logit = −p × (log p + entropy)
        beyond = (found.spread / found.total)[:, None]
        more = (found.logits - found.highest[:, None]).sub_(beyond).mul_(found.exponentials)
        more *= (entropy_factor * -scale / found.total)[:, None]
    slopes = found.exponentials.mul_((factor / found.total)[:, None])
    slopes.scatter_add_(1, found.column, (found.mine.to(slopes.dtype) * -factor)[:, None])
    if more is not None:
        slopes += more
    if rule.softcap is not None:
        slopes *= 1 - (found.logits * (rule.temperature / rule.softcap)).square_()
    return slopes


def _logits(rows: Tensor, weight: Tensor, exact: torch.dtype, rule: LogitRule) -> Tensor:
    """[rows, own vocabulary]."""
    logits = (rows @ weight.T).to(exact)
    if rule.factor != 1.0:
        logits *= rule.factor
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if rule.temperature != 1.0:
        logits /= rule.temperature
    return logits
