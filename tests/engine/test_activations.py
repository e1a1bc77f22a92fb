"""Kept activations and recomputing, measured and equal."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from dhp.core.parameters import AdapterSettings
from dhp.core.reports import StageUsage
from dhp.engine import stage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.costs import arrange, predicted_bytes
from dhp.plan.recompute.planner import Planner
from dhp.plan.recompute.profile import usage_of
from tests.helpers.alike import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Fault, Running, Trained, compare, graph_of, make_reader, settings, train
from tests.helpers.ranks import LocalGroup
from tests.helpers.rows import on_demand, slow
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
    [slow("none", Degrees(ulysses=4)), ("none", Degrees(ring=2, ulysses=2)), slow("full", Degrees(ulysses=4))],
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


# The vision tower has four layers and the decoder two, so that an item beyond 1 would not do for both.
EXACT = [Case(ONE, ONE, recompute="linear:0,mlp:1")]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_plain_model_in_double_precision(case: Case, made_model: str) -> None:
    assert_exact(compare(made_model, case, awkward_steps()))


@pytest.mark.grid
def test_key_value_heads_that_ranks_share(few_keys_model: str) -> None:
    assert_exact(compare(few_keys_model, Case(ONE, Degrees(tensor=4), recompute="light"), awkward_steps()))


KEPT = Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", packing=True)


@pytest.fixture(scope="module")
def plain(made_model: str) -> Trained:
    return train(made_model, KEPT, awkward_steps())


@pytest.mark.parametrize("recompute", [slow("light"), "mlp", *map(slow, ("linear", "full", "light:0,all:1"))])
def test_the_same_to_the_bit_as_without(recompute: str, plain: Trained, made_model: str) -> None:
    again = train(made_model, replace(KEPT, recompute=recompute), awkward_steps())
    assert plain.losses == again.losses
    assert plain.norms == again.norms
    for ours, theirs in zip(plain.weights, again.weights, strict=True):
        assert all(torch.equal(weight, theirs[0][name]) for name, weight in ours[0].items())


ZERO = [
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=2), 1, "float32", 3, recompute="light", packing=True, text_zero_stage=3)
    ),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), 2, "float32", 1, recompute="mlp", text_zero_stage=2)),
]


@pytest.mark.parametrize("case", ZERO, ids=str)
def test_zero(case: Case, made_model: str) -> None:
    from tests.helpers.alike import assert_exact_in_single_precision

    assert_exact_in_single_precision(compare(made_model, case, awkward_steps()))


DROPPING = (("text", AdapterSettings(2, 4.0, dropout=0.5)),)  # what a pass drew is drawn again


class ShortText(TextEngine):
    """Its last rank has no room for a first micro-batch of which any layer is kept."""

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        last, keeps = self.rank == self.mesh.size() - 1, set(self.layers.choices) != {"all"}

        def short() -> Any:
            output = compute()
            if keeps and last and micro_batch == 0 and set(self.layers.choices) != {"all"}:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        return super().forward(rows, micro_batch, short)


def everything(stage: Any) -> tuple[str, ...]:
    return ("all",) * len(stage.layers)


def trained(model: str, text: Degrees, kind: type) -> list[Any]:
    """Losses and norms of three steps, the second of which keeps all; which ranks were short, and have usages."""
    case = Case(ONE, text, 2, "float32", packing=True, lora=DROPPING, trainable=("text",))
    samples = [make_sample([(1, 8, 8)], 20, 10, seed, IMAGE_TOKEN) for seed in range(2 * text.shards)]
    feed = make_reader(model, case, [samples] * 3)
    told: list[Any] = []
    with Running(model, case, Fault(EncoderEngine, kind), measure=True, recompute=everything) as running:
        for step, choice in enumerate(("all", "none", "all")):
            group = running.groups["text"]
            layers = len(running.graph.stage("text").layers)
            group.execute_all_async("set_recompute", (choice,) * layers, returns=0)
            loss, reports = running.step(feed.step(step))
            of_text = reports["text"]
            told.append((loss, of_text[0].grad_norm, [r.short for r in of_text], [r.usage is None for r in of_text]))
        return told


class ShortBehind(TextEngine):
    """Its last rank has room for what forward keeps, and none for what backward takes on top of it."""

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        def full(nbytes: int, device: torch.device) -> None:
            if nbytes and self.rank == self.mesh.size() - 1 and micro_batch == 0:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")

        with patch.object(stage, "require_memory", full):
            return super().forward(rows, micro_batch, compute)


@pytest.mark.parametrize("kind", [ShortText, ShortBehind])
def test_it_is_made_again_and_nothing_else_changes(kind: type, made_model: str) -> None:
    plain = trained(made_model, Degrees(data=2), TextEngine)
    short = trained(made_model, Degrees(data=2), kind)
    assert [step[:2] for step in short] == [step[:2] for step in plain]  # to the bit
    assert [step[2] for step in plain] == [[False, False]] * 3
    assert [step[2] for step in short] == [[False, False], [False, True], [False, False]]
    assert [step[3] for step in short] == [[False, False], [False, True], [False, False]]


def test_where_others_may_wait_in_a_collective_it_is_an_error(made_model: str) -> None:
    with pytest.raises(Exception, match="CUDA out of memory"):
        trained(made_model, Degrees(tensor=2), ShortBoth)


class ShortBoth(ShortText):
    """Every rank has no room, so that none waits for another one here."""

    def forward(self, rows: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        def short() -> Any:
            output = compute()
            if set(self.layers.choices) != {"all"}:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        return TextEngine.forward(self, rows, micro_batch, short)
