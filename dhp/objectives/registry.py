"""The objectives by name; supervised fine-tuning's cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dhp.core.batch import IGNORED
from dhp.core.errors import ConfigError
from dhp.core.kinds import takes
from dhp.core.text import did_you_mean, nearest
from dhp.data.sample.sample import Sample
from dhp.objectives.objective import Chosen, Head, Judged, Objective
from dhp.parallel.tensor.loss import judge_tokens, token_loss_sum


class CrossEntropy(Objective):
    """targets: for each token the one that follows it in its sample, -100 where nothing is to be predicted."""

    columns = MappingProxyType({"targets": IGNORED})

    def values(self, sample: Sample) -> dict[str, np.ndarray]:
        return {"targets": next_labels(sample)}

    def weight(self, sample: Sample) -> float:
        return sample.target_tokens

    def choose(self, columns: Mapping[str, Tensor]) -> Chosen:
        return find_targets(columns["targets"])

    def counted(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        return columns["targets"] != IGNORED

    def share(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Tensor:
        """The head runs on the positions that have a target only: image and prompt tokens never cost a row of
        logits."""
        positions, tokens = chosen
        if not len(tokens):  # one row keeps the head, its collectives and every parameter in the graph
            return token_loss_sum(head.matrix, states[:1], tokens.new_zeros(1), rule=head.rule, factor=0.0)
        rows, factor = states.index_select(0, positions), 1 / (total or 1)
        return token_loss_sum(head.matrix, rows, tokens, rule=head.rule, factor=factor, losses=head.losses)

    def judge(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Judged:
        """Counted are targets; right is one that has the highest logit."""
        positions, tokens = chosen
        if not len(tokens):  # the head's ranks take part all the same
            judge_tokens(head.matrix, states[:1], tokens.new_zeros(1), rule=head.rule)
            return Judged(states.new_zeros(()), tokens.new_zeros(0, dtype=torch.bool))
        rows = states.index_select(0, positions)
        return Judged(*judge_tokens(head.matrix, rows, tokens, rule=head.rule, factor=1 / (total or 1)))


def next_labels(sample: Sample) -> np.ndarray:
    """For each token of a sample the label of the one behind it, int64 [L]; IGNORED for the last."""
    return np.append(sample.labels[1:], IGNORED).astype(np.int64)


def find_targets(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of `targets` [rows, tokens] those that are not IGNORED: at which of the flattened rows × tokens, and which token;
    both int64 [targets]. On the host, where looking for them holds nothing up."""
    flat = targets.flatten()
    positions = (flat != IGNORED).nonzero()[:, 0]
    return positions, flat[positions]


OBJECTIVES: dict[str, type[Objective]] = {"sft": CrossEntropy}
takes("objective", OBJECTIVES.values)


def find_objective(name: str) -> Objective:
    """The objective of that name. Raises ConfigError where there is none."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"training.objective={name} does not exist. Set one of {', '.join(OBJECTIVES)}, or name the module that "
            f"registers it in plugins{did_you_mean([nearest(name, list(OBJECTIVES))])}"
        )
    return OBJECTIVES[name]()
