"""Preferences between answers: what their log-probabilities cost."""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.core.preferences import PAIRS, SINGLES
from dhp.data.sample.sample import Sample
from dhp.objectives.log_probabilities import LogProbabilityObjective, SummedCosts
from dhp.objectives.objective import Chosen, Head, MarkedSamples
from dhp.parallel.comm import sum_in_place


class Preference(LogProbabilityObjective):
    """A sum over preferences. A subclass says what they cost."""

    compares: ClassVar[str] = PAIRS

    @abstractmethod
    def costs(self, logps: Tensor, samples: MarkedSamples) -> tuple[Tensor, Tensor]:
        """Of each preference its loss, and whether the better answer has won: [preferences] both, the same on all ranks
        that share the rows. logps: of the targets here, float32 or float64 [targets]."""

    def weight(self, sample: Sample) -> float:
        """Of the step's preferences one."""
        return 1.0 if sample.mark is not None and sample.mark.first else 0.0

    def sum_costs(self, logps: Tensor, head: Head, chosen: Chosen) -> SummedCosts:
        """Counted are preferences; right is one whose better answer has won."""
        samples = _samples_of(head)
        losses, won = self.costs(logps, samples)
        return SummedCosts(losses.sum(), won if samples.first else won[:0], samples.sharing)


def _samples_of(head: Head) -> MarkedSamples:
    if head.samples is None:
        raise ValueError("an objective of preferences was given rows without their samples")
    return head.samples


SIDE, REFERENCE = range(2)  # columns of the marks


def _ratios(logps: Tensor, samples: MarkedSamples) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sides' answers beside the reference's, [preferences]."""
    first, second = samples.sum(logps).view(-1, 2).unbind(1)
    references = samples.pairs(REFERENCE, logps)
    return first - references[0], second - references[1]


class Dpo(Preference):
    """Direct preference optimization (Rafailov et al. 2023, equation 7); with label smoothing, Mitchell 2023's
    conservative form."""

    refers = True

    def costs(self, logps: Tensor, samples: MarkedSamples) -> tuple[Tensor, Tensor]:
        chosen, rejected = _ratios(logps, samples)
        margins, wrong = self.settings.beta * (chosen - rejected), self.settings.label_smoothing
        losses = -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)
        return losses, margins > 0


class Kto(Preference):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 8): single answers that are liked or not. Its
    reference point is the mean, over a micro-batch of all replicas, of how far answers to other prompts have moved."""

    compares, refers = SINGLES, True

    def costs(self, logps: Tensor, samples: MarkedSamples) -> tuple[Tensor, Tensor]:
        ratios, others = _ratios(logps, samples)
        moved = torch.stack([others.detach().sum(), others.new_tensor(float(len(others)))])
        if samples.replicas is not None:
            sum_in_place(moved, samples.replicas)
        point = (moved[0] / moved[1].clamp(min=1)).clamp(min=0)
        sides = samples.pairs(SIDE, logps)[0]
        weights = torch.where(sides > 0, self.settings.liked_weight, self.settings.disliked_weight)
        values = torch.sigmoid(self.settings.beta * sides * (ratios - point))
        return weights * (1 - values), sides * (ratios - point) > 0


class Orpo(Preference):
    """Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7): no reference, the chosen answer's
    cross-entropy by token, and beta × the odds of both answers."""

    def costs(self, logps: Tensor, samples: MarkedSamples) -> tuple[Tensor, Tensor]:
        counts = samples.sum(torch.ones_like(logps.detach()))
        chosen, rejected = (samples.sum(logps) / counts.clamp(min=1)).view(-1, 2).unbind(1)
        odds = chosen - rejected - (_log_complement(chosen) - _log_complement(rejected))
        losses = -chosen - self.settings.beta * F.logsigmoid(odds)
        return losses, odds > 0


def _log_complement(logp: Tensor) -> Tensor:
    """log(1 − p)."""
    return torch.log1p(-logp.exp())
