"""Cross-entropy of a head split over tensor ranks, in chunks."""

from collections.abc import Sequence
from typing import Any

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
) -> Tensor:
    """Σ −factor × log softmax(logits)[targets] of the logits that `rule` makes of head(states), a scalar in float32
    (float64 for float64 states).

    states: [rows, hidden], the same on every tensor rank; targets: int64 [rows]; factor: of all rows, or of each,
    [rows]. `head.weight` is whole, or this rank's slice of the vocabulary (`dhp.parallel.tensor.slices`, or a
    DTensor). Raises ValueError for any other split, and for a head with a bias, which no known family has.

    losses: gets the loss of each row without its factor, a tensor a chunk, on each tensor rank.

    The result may be added to, but not multiplied: its gradient must be 1, and whatever the loss is multiplied by is
    given as `factor`. So nothing passes over the head's gradient a second time. Backward raises otherwise."""
    weight, first, group, _ = _head_slice(head)
    return _TokenLossSum.apply(states, weight, targets, first, group, chunk_rows, rule, factor, losses)


@torch.no_grad()
def judge_tokens(
    head: nn.Linear, states: Tensor, targets: Tensor, chunk_rows: int = CHUNK_ROWS, rule: LogitRule = PLAIN
) -> tuple[Tensor, Tensor]:
    """The loss of each row, −log softmax(logits)[targets], and bool [rows]: whether no token has a higher logit than
    the target. Saves nothing for backward. As `token_loss_sum` otherwise."""
    weight, first, group, _ = _head_slice(head)
    exact = torch.float64 if states.dtype == torch.float64 else torch.float32
    losses, right = [], []
    for rows, target in zip(states.split(chunk_rows), targets.split(chunk_rows), strict=True):
        logits, highest, mine, column = _found(rows, weight, target - first, group, exact, rule)
        wanted = torch.where(mine, logits.gather(1, column)[:, 0] - highest, 0.0)
        sums = torch.stack([(logits - highest[:, None]).exp_().sum(-1), wanted])
        if group is not None:
            sum_in_place(sums, group)
        losses.append(sums[0].log() - sums[1])
        right.append(sums[1] >= 0)
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
        factor: float | Tensor,
        kept: list[Tensor] | None,
    ) -> Tensor:
        exact = torch.float64 if states.dtype == torch.float64 else torch.float32
        total = states.new_zeros((), dtype=exact)
        grad_states, grad_weight = torch.empty_like(states), None
        for rows, target, grad, of_rows in zip(
            *(one.split(chunk_rows) for one in (states, targets, grad_states)),
            _factors(factor, len(states), chunk_rows, exact),
            strict=True,
        ):
            losses, slopes = _chunk(rows, weight, target - first, group, exact, rule, of_rows)
            total += (losses * of_rows).sum()
            if kept is not None:
                kept.append(losses)
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


def _factors(factor: float | Tensor, rows: int, chunk_rows: int, dtype: torch.dtype) -> Sequence[float | Tensor]:
    if isinstance(factor, Tensor):
        return factor.to(dtype).split(chunk_rows)
    return [factor] * max(1, -(-rows // chunk_rows))


def _chunk(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    exact: torch.dtype,
    rule: LogitRule,
    factor: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk's rows over the whole vocabulary, [rows], and factor × d loss / d output of this rank's part of
    the head, [rows, own vocabulary]. factor: of all rows, or [rows].

    target: relative to this rank's first token, so out of range on the ranks that do not hold it."""
    logits, highest, mine, column = _found(rows, weight, target, group, exact, rule)
    exponentials = (logits - highest[:, None]).exp_()
    wanted = torch.where(mine, logits.gather(1, column)[:, 0] - highest, 0.0)
    sums = torch.stack([exponentials.sum(-1), wanted])  # [2, rows]
    if group is not None:
        sum_in_place(sums, group)
    factor = factor * rule.factor
    slopes = exponentials.mul_((factor / sums[0])[:, None])
    slopes.scatter_add_(1, column, (mine.to(exact) * -factor)[:, None])
    if rule.softcap is not None:
        slopes *= 1 - (logits / rule.softcap).square_()
    return sums[0].log() - sums[1], slopes


def _found(
    rows: Tensor, weight: Tensor, target: Tensor, group: dist.ProcessGroup | None, exact: torch.dtype, rule: LogitRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's logits [rows, own vocabulary]; of each row the highest on any rank, whether the target is in this
    rank's part, and its column there, [rows, 1]. target: as in `_chunk`."""
    logits = _logits(rows, weight, exact, rule)
    highest = logits.max(dim=-1).values
    if group is not None:
        largest_in_place(highest, group)
    mine = (target >= 0) & (target < len(weight))
    return logits, highest, mine, target.clamp(0, len(weight) - 1)[:, None]


def _logits(rows: Tensor, weight: Tensor, exact: torch.dtype, rule: LogitRule) -> Tensor:
    """[rows, own vocabulary]."""
    logits = (rows @ weight.T).to(exact)
    if rule.factor != 1.0:
        logits *= rule.factor
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return logits
