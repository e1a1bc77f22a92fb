"""What activations take on real ranks: a share of a shared image, and what the planner expects of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from dhp.core.reports import StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.costs import arrange, predicted_bytes
from dhp.plan.recompute.planner import Planner
from dhp.plan.recompute.profile import usage_of
from tests.helpers.layouts import Case, Fault, Running, graph_of, make_reader, settings
from tests.helpers.ranks import LocalGroup
from tests.helpers.rows import slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
PATCHES = 32 * 32


class Encoding(EncoderEngine):
    """A tower that encodes and goes back on its own."""

    def peak(self, *works: object) -> int:
        """Bytes, of one image."""
        work = works[self.rank]
        (embeddings,) = self.forward_step(0, 0, work)
        self.backward_step(0, 0, True, Bundle({n: torch.ones_like(t) for n, t in embeddings.tensors.items()}))
        usage = self.meter.take(self.layers.choices)
        assert 0.9 * PATCHES < usage.rows * self.mesh.size() < 1.1 * PATCHES
        return usage.peak_bytes


@pytest.fixture(scope="module")
def encode(made_model: str) -> Callable[[Degrees, str], list[int]]:
    """Peak bytes of every rank with one image of 1,024 patches."""

    @cache
    def peaks(degrees: Degrees, recompute: str) -> list[int]:
        case = Case(degrees, ONE, 1, "float32", packing=True, recompute=recompute)
        feed = make_reader(made_model, case, [[make_sample([(1, 32, 32)], 8, 4, 0, IMAGE_TOKEN)]])
        graph = graph_of(made_model, case)
        own = replace(settings(graph.stage("vision"), graph, made_model, case), measure=True)
        with LocalGroup(Encoding, degrees.world, own) as group:
            return group.execute_all("peak", *feed.step(0).work["vision"][0])

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


@pytest.mark.parametrize("schedule", ["sequential", slow("vision_ahead")])
def test_a_plan_takes_what_the_planner_expects(made_model: str, schedule: str) -> None:
    case = Case(Degrees(ulysses=2), Degrees(tensor=2), 2, "float32", schedule=schedule, packing=True)
    samples = [make_sample([(1, 16, 16)], 40, 20, seed, IMAGE_TOKEN) for seed in range(2)]
    data = make_reader(made_model, case, [samples]).step(0)
    graph, everything = graph_of(made_model, case), lambda stage: ("all",) * len(stage.layers)
    family = load_family(made_model)
    kinds = {"vision": family.tower.layers.kinds, "text": family.decoder.layers.kinds}
    with Running(made_model, case, Fault(EncoderEngine, TextEngine), measure=True, recompute=everything) as running:
        arrangement = arrange(graph, running.schedule, "cpu")

        def step(planner: Planner) -> dict[str, StageUsage | None]:
            for stage, group in running.groups.items():
                group.execute_all_async("set_recompute", planner.asked[stage], returns=0)
            _, reports = running.step(data)
            return {stage: usage_of(of_ranks) for stage, of_ranks in reports.items()}

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
