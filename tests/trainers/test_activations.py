"""What activations take on real ranks: a share of a shared image, and what the planner expects of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from dhp.base.messages import PartUsage
from dhp.models.registry import load_family
from dhp.parallel.comm.mesh import Degrees
from dhp.planner.costs import predicted_bytes
from dhp.planner.planner import Planner
from dhp.run.adaptive_recompute import arrange, usage_of
from dhp.step.schedule import SCHEDULES, TEXT, VISION
from dhp.step.stages import Batch, make_parts
from dhp.step.step import train_step
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer
from tests.helpers.layouts import Case, make_feed, settings
from tests.helpers.ranks import LocalGroup
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
PATCHES = 32 * 32
PARTS = {"vision": VISION, "text": TEXT}


class Encoding(VisionTrainer):
    """A tower that encodes and goes back on its own."""

    def peak(self, *works: object) -> int:
        """Bytes, of one image."""
        work = works[self.part.rank]
        (embeddings,) = self.forward_step(0, work, True)
        self.backward_step(0, work, torch.ones_like(embeddings))
        usage = self.part.meter.take(self.part.layers.choices)
        assert 0.9 * PATCHES < usage.rows * self.part.mesh.size() < 1.1 * PATCHES
        return usage.peak_bytes


@pytest.fixture(scope="module")
def encode(made_model: str) -> Callable[[Degrees, str], list[int]]:
    """Peak bytes of every rank with one image of 1,024 patches."""

    @cache
    def peaks(degrees: Degrees, recompute: str) -> list[int]:
        case = Case(degrees, ONE, 1, "float32", packing=True, recompute=recompute)
        feed = make_feed(made_model, case, [[make_sample([(1, 32, 32)], 8, 4, 0, IMAGE_TOKEN)]])
        own = replace(settings("vision", made_model, case), measure=True)
        with LocalGroup(Encoding, degrees.world, own) as group:
            return group.execute_all("peak", *feed.step(0).vision[0])

    return peaks


@pytest.mark.parametrize(
    ("recompute", "degrees"),
    [("none", Degrees(ulysses=4)), ("none", Degrees(ring=2, ulysses=2)), ("full", Degrees(ulysses=4))],
    ids=str,
)
def test_each_of_four_ranks_keeps_a_quarter(encode: Callable, recompute: str, degrees: Degrees) -> None:
    """Not with layers that keep attention but recompute around it: those keep what was exchanged too."""
    (alone,) = encode(ONE, recompute)
    assert encode(degrees, recompute) == pytest.approx([alone / 4] * 4, rel=0.1)


@pytest.mark.parametrize("schedule", ["sequential", "vision_ahead"])
def test_a_plan_takes_what_the_planner_expects(made_model: str, schedule: str) -> None:
    case = Case(Degrees(ulysses=2), Degrees(tensor=2), 2, "float32", schedule=schedule, packing=True)
    samples = [make_sample([(1, 16, 16)], 40, 20, seed, IMAGE_TOKEN) for seed in range(2)]
    data = make_feed(made_model, case, [samples]).step(0)
    batch, turns = Batch(data.info, data.vision, data.text), SCHEDULES[schedule](2)
    own = {part: replace(settings(part, made_model, case), measure=True, recompute="auto") for part in PARTS}
    family = load_family(made_model)
    kinds = {"vision": family.vision_layers.kinds, "text": family.text_layers.kinds}
    arrangement = arrange(turns, True, "cpu")
    with (
        LocalGroup(VisionTrainer, 2, own["vision"]) as vision,
        LocalGroup(TextTrainer, 2, own["text"]) as text,
    ):
        parts = make_parts(vision, text, case.vision, case.text, 2)

        def step(planner: Planner) -> dict[str, PartUsage | None]:
            for part, group in (("vision", vision), ("text", text)):
                group.execute_all_async("set_recompute", planner.asked[part], returns=0)
            reports = train_step(parts, turns, batch).reports
            return {part: usage_of(reports[n]) for part, n in PARTS.items()}

        measuring = Planner(kinds, {}, arrangement, float("inf"))
        while not measuring.settled:
            measuring.learn(step(measuring))
        costs = measuring.costs()
        for share in (0.3, 0.7):
            least, most = (
                predicted_bytes(costs, {part: (choice,) * len(kinds[part]) for part in kinds}, arrangement)
                for choice in ("all", "none")
            )
            planner = Planner(kinds, {}, arrangement, least + share * (most - least), known=costs)
            assert planner.asked != measuring.asked
            assert planner.measured_bytes(step(planner)) == pytest.approx(planner.predicted_bytes(), rel=0.05)
