"""The objective of a step: Σ token losses / N_global, and its only scaling.

N_global is the number of target tokens of the global batch. Every other file sums: over micro-batches, data,
sequence and tensor ranks, and over the parts.
"""

from __future__ import annotations

from torch import Tensor, nn

from dhp.parallel.loss import token_loss_sum

IGNORED = -100


def share_of_objective(head: nn.Linear, hidden: Tensor, labels: Tensor, target_tokens: int) -> Tensor:
    """These rows' share of the step's objective, a scalar.

    hidden: [rows, tokens, hidden]; labels: [rows, tokens], not shifted, -100 where there is no target.
    The head runs on the places that have a target only: image and prompt tokens never cost a row of logits.
    """
    targets = labels[:, 1:]
    wanted = targets != IGNORED
    if not bool(wanted.any()):
        # One row keeps the head, its collectives and every parameter in the graph.
        return token_loss_sum(head, hidden[:1, 0], targets.new_zeros(1)) * 0.0
    return token_loss_sum(head, hidden[:, :-1][wanted], targets[wanted]) / max(target_tokens, 1)
