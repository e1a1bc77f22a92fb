"""dhp.objectives.preferences: both sides of each preference, in every layout, beside the plain model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.config.training import PreferenceConfig
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.parameters import AdapterSettings
from dhp.core.preferences import CHOSEN, OTHER, REJECTED, Mark
from dhp.data.sample.sample import Sample, joined_sides
from dhp.doctor.plain_model import model_inputs
from dhp.models import lora
from dhp.objectives.objective import MarkedSamples
from dhp.objectives.preferences import Dpo
from tests.helpers.alike import assert_exact, assert_exact_in_single_precision
from tests.helpers.exact_ranks import EXACT, ExactText, ExactVision
from tests.helpers.layouts import FIRST_OUT, Case, Fault, compare
from tests.helpers.norms import use_exact_norms
from tests.helpers.oracle import Oracle, Step
from tests.helpers.rows import slow_but
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
BETA = PreferenceConfig().beta


def preference(
    grids: Sequence[tuple[int, int, int]],
    texts: tuple[int, int],
    targets: tuple[int, int],
    seed: int,
    sides: tuple[int, int],
) -> Sample:
    """Two answers of so many tokens to one question with pictures, or of the second side to another."""
    first, second = (
        make_sample(grids, text, of_side, seed + side, IMAGE_TOKEN)
        for side, (text, of_side) in enumerate(zip(texts, targets, strict=True))
    )
    marks = [Mark(of, -5.0 - seed - side, side == 0) for side, of in enumerate(sides)]
    first = replace(first, mark=marks[0])
    return joined_sides(first, replace(second, pixels=(), position=first.position, again=True, mark=marks[1]))


def pairs(sides: tuple[tuple[int, int], ...] = ((CHOSEN, REJECTED),)) -> list[list[Sample]]:
    """Two steps: sides of unlike lengths, several pictures, none, an answer of one token."""
    of = lambda number: sides[number % len(sides)]
    return [
        [
            preference([(1, 6, 10)], (9, 5), (6, 2), 1, of(0)),
            preference([(1, 4, 6), (1, 8, 2)], (12, 20), (9, 17), 11, of(1)),
            preference([], (8, 6), (1, 5), 21, of(2)),
            preference([(1, 10, 14)], (4, 30), (2, 3), 31, of(3)),
        ],
        [preference([], (7, 9), (3, 4), 41 + 2 * number, of(number)) for number in range(4)],
    ]


class PreferenceOracle(Oracle):
    """The formulas as they are published, of each preference alone."""

    def weight(self, sample: Sample) -> float:
        return 1.0

    def logps(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Of the targets of both sides, one by one."""
        assert sample.sides is not None
        first, second = sample.sides
        inputs = model_inputs(first, self._family, self.model)
        features: dict[str, Any] = {}
        if first.pixels:  # once, as a picture of both sides has one way back
            names = ("pixel_values", "image_grid_thw")
            features = {"image": self.model.model.get_image_features(*(inputs[name] for name in names))}
        return self._logps(first, features), self._logps(replace(second, pixels=first.pixels), features)

    def _logps(self, side: Sample, features: dict[str, Any]) -> Tensor:
        inputs = model_inputs(side, self._family, self.model)
        inputs.pop("pixel_values", None)
        logits = self.model(**inputs, mm_encoder_outputs=features or None, use_cache=False).logits[0, :-1]
        targets = torch.from_numpy(side.labels)[1:]
        counts = targets >= 0
        return logits[counts].log_softmax(-1).gather(1, targets[counts][:, None])[:, 0]

    def ratios(self, sample: Sample) -> tuple[Tensor, Tensor]:
        assert sample.sides is not None
        pairs = zip(self.logps(sample), sample.sides, strict=True)
        return tuple(logps.sum() - side.mark.reference for logps, side in pairs)  # type: ignore[return-value,union-attr]


class DpoOracle(PreferenceOracle):
    def _loss_sum(self, sample: Sample) -> Tensor:
        chosen, rejected = self.ratios(sample)
        return -torch.log(torch.sigmoid(BETA * (chosen - rejected)))


class OrpoOracle(PreferenceOracle):
    def _loss_sum(self, sample: Sample) -> Tensor:
        chosen, rejected = (logps.mean().exp() for logps in self.logps(sample))
        odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
        return -chosen.log() - BETA * F.logsigmoid(odds.log())


class KtoOracle(PreferenceOracle):
    """Of one micro-batch a step."""

    def step(self, samples: Sequence[Sample]) -> Step:
        with torch.no_grad():
            moved = [self.ratios(sample)[1] for sample in samples]
        self.point = max(0.0, float(sum(moved)) / len(moved))
        return super().step(samples)

    def _loss_sum(self, sample: Sample) -> Tensor:
        assert sample.sides is not None and sample.sides[0].mark is not None
        side = sample.sides[0].mark.side
        return 1 - torch.sigmoid(BETA * side * (self.ratios(sample)[0] - self.point))


LORA = (("text", AdapterSettings(4, 8.0)), ("vision", AdapterSettings(2, 4.0)))
CASES = [
    Case(ONE, ONE),
    Case(Degrees(ulysses=2), Degrees(ring=2), packing=True, micro_batches=2),
    Case(Degrees(data=2), Degrees(data=2, tensor=2), packing=True, micro_batches=1),
    Case(Degrees(data=2), Degrees(ulysses=2), packing=True, micro_batches=1, sequence_groups="auto"),
    Case(ONE, ONE, 4, schedule="1f1b", stages=2, recompute="full", packing=True),
    Case(ONE, Degrees(data=2), 2, text_zero_stage=3, fsdp=True, packing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 1, text_zero_stage=2, packing=True),
    Case(ONE, Degrees(tensor=2), 2, packing=True, lora=LORA),
    Case(ONE, Degrees(data=2), 2, packing=True, vision_batch=2),
]


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_norms(monkeypatch.setattr)
    monkeypatch.setattr(lora, "FIRST_OUT", FIRST_OUT)


@pytest.mark.parametrize("case", slow_but(CASES, CASES[1]), ids=str)
def test_pairs_equal_the_plain_model(case: Case, made_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(made_model, replace(case, objective="dpo"), pairs(), EXACT, DpoOracle))


@pytest.mark.parametrize("case", slow_but(CASES[:3], CASES[2]), ids=str)
def test_odds_equal_the_plain_model(case: Case, made_model: str) -> None:
    assert_exact(compare(made_model, replace(case, objective="orpo"), pairs(), EXACT, OrpoOracle))


@pytest.mark.parametrize("case", slow_but([replace(case, micro_batches=1) for case in CASES[:4]], CASES[2]), ids=str)
def test_single_answers_equal_the_plain_model(case: Case, made_model: str) -> None:
    steps = pairs(((CHOSEN, OTHER), (REJECTED, OTHER)))
    assert_exact(compare(made_model, replace(case, objective="kto"), steps, EXACT, KtoOracle))


class Alone(ExactText):
    """Each rank that shares a row sums what it has itself."""

    def load_slice(self) -> Any:
        model = super().load_slice()
        self._others = (None, None)
        return model


class Unreferenced(ExactText):
    def _chosen(self, work: Any) -> Any:
        return super()._chosen(replace(work, marks=tuple(mark._replace(reference=0.0) for mark in work.marks)))


def _in_order(data: StepData) -> StepData:
    """The second side of each preference has the first rows of pictures again, whatever it shows."""
    text = tuple(
        tuple(
            replace(
                one, placements={name: places % max(1, len(places) // 2) for name, places in one.placements.items()}
            )
            for one in of_text
        )
        for of_text in data.work["text"]
    )
    return replace(data, work={**data.work, "text": text})


@pytest.mark.parametrize(
    "fault",
    [Fault(ExactVision, Alone), Fault(ExactVision, Unreferenced), Fault(ExactVision, ExactText, _in_order)],
    ids=["sums of one rank", "no reference", "other pictures"],
)
def test_a_mistake_shows(fault: Fault, made_model: str) -> None:
    case = Case(ONE, Degrees(ring=2), packing=True, micro_batches=1, objective="dpo")
    assert compare(made_model, case, pairs(), fault, DpoOracle).gradient > 1e-3


def test_costs_are_those_that_are_published() -> None:
    """Two preferences by hand, both lost."""
    logps = torch.tensor([-1.0, -2.0, -0.5, -4.0, -3.0], dtype=torch.float64)
    marks = [Mark(CHOSEN, -2.5), Mark(REJECTED, -1.0, False), Mark(CHOSEN, -3.0), Mark(REJECTED, -3.5, False)]
    samples = MarkedSamples(torch.tensor([0, 0, 1, 2, 3]), torch.tensor(marks, dtype=torch.float64))
    losses, won = Dpo(PreferenceConfig(beta=0.5, label_smoothing=0.1)).costs(logps, samples)
    margins = [0.5 * ((-3.0 + 2.5) - (-0.5 + 1.0)), 0.5 * ((-4.0 + 3.0) - (-3.0 + 3.5))]
    log = lambda margin: float(np.log(1 / (1 + np.exp(-margin))))
    assert losses.tolist() == pytest.approx(
        [-0.9 * log(margins[0]) - 0.1 * log(-margins[0]), -0.9 * log(margins[1]) - 0.1 * log(-margins[1])]
    )
    assert won.tolist() == [False, False]
