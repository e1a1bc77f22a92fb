"""Steps, evaluations and answers between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, Batch, Sampling
from dhp.core.dispatch import Call as Verb
from dhp.core.dispatch import PerRank, spread
from dhp.core.graph import Route, StageGraph, dense
from dhp.core.parameters import AdapterSettings
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.models import lora as adapters
from dhp.step.schedule import make_schedule
from dhp.step.stages import RankGroup, Stage, make_stages
from dhp.step.step import StepRefs, answer_batch, train_step
from tests.helpers.answers import RecordingText, make_prompt, make_text, plain_answer
from tests.helpers.batches import awkward_steps, mixed_step, step_without_image
from tests.helpers.graphs import make_graph
from tests.helpers.layouts import FIRST_OUT, UPDATE, Case, Fault, Oracle, Running, make_reader, make_sharder
from tests.helpers.rows import slow_but


@dataclass(frozen=True)
class Call:
    """One call as one rank got it."""

    stage: str
    rank: int
    method: str
    arguments: tuple[Any, ...]
    returns: int


class FakeGroup(RankGroup):
    """Stands in for an actor group: writes down what each rank gets, answers with names for refs."""

    def __init__(self, stage: str, size: int, log: list[Call]):
        self.stage, self.size, self.log = stage, size, log
        self.turns: list[str] = []  # verbs of each actor call, in short

    def execute_all_async(
        self, method: Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[str]]:
        counts = [count for (count,) in spread((returns,), self.size)]
        given, name = spread(arguments, self.size), method.__name__
        self.log += [Call(self.stage, rank, name, given[rank], counts[rank]) for rank in range(self.size)]
        where = "".join(map(str, given[0][:2])) if name in ("forward_step", "backward_step") else ""
        short = {"forward_step": "e", "backward_step": "g"}.get(name, name)
        return [[f"{short}{where}:{self.stage}{rank}#{k}" for k in range(counts[rank])] for rank in range(self.size)]

    def execute_in_turn_async(self, *calls: Verb) -> list[list[str]]:
        """The calls of one actor call have its number."""
        short = {"forward_step": "F", "backward_step": "B", "grad_norm_sq": "norm of "}
        self.turns.append(" ".join(f"{short.get(c.name, c.name)}{c.arguments[0]}" for c in calls))
        return super().execute_in_turn_async(*calls)


@dataclass(frozen=True)
class Recorded:
    calls: list[Call]
    refs: StepRefs
    turns: dict[str, list[str]]

    def of(self, stage: str, method: str) -> list[tuple[Any, ...]]:
        """Arguments of that method, rank after rank, call after call."""
        return [call.arguments for call in self.calls if (call.stage, call.method) == (stage, method)]

    def returns(self, stage: str, method: str) -> list[int]:
        return [call.returns for call in self.calls if (call.stage, call.method) == (stage, method)]


def step(graph: StageGraph, routes: Sequence[Route], kind: str = "sequential") -> Recorded:
    """routes: for each micro-batch."""
    calls: list[Call] = []
    groups = {s.name: FakeGroup(s.name, s.degrees.world, calls) for s in graph.stages}
    stages = make_stages(graph, groups)
    micro_batches = len(routes)
    shards = {part: graph.of_part(part)[0].degrees.shards for part in graph.parts()}
    work = {
        part: [
            [f"{part}{m}:{shard}" for shard in range(count)] for m in range(-(-micro_batches // graph.batch_of(part)))
        ]
        for part, count in shards.items()
    }
    schedule = make_schedule(kind, graph, micro_batches)
    refs = train_step(stages, schedule, graph.ties, Batch("info", work, {"vision": routes}))
    return Recorded(calls, refs, {name: group.turns for name, group in groups.items()})


def pair(vision: Degrees, text: Degrees, *routes: Route) -> Recorded:
    """Every vision shard sends to every text replica, unless routes are given."""
    return step(make_graph(vision, text), routes or (dense(vision.shards, text.shards),))


def test_each_vision_rank_gets_its_own_pixels() -> None:
    recorded = pair(Degrees(ulysses=2), Degrees(tensor=2), dense(2, 1), dense(2, 1))
    assert recorded.of("vision", "forward_step") == [(m, 0, f"vision{m}:{v}") for m in (0, 1) for v in (0, 1)]


def test_tensor_ranks_get_what_is_for_their_shard_and_the_first_hands_over() -> None:
    recorded = pair(Degrees(ulysses=2, tensor=2), Degrees(data=2))
    assert recorded.of("vision", "forward_step") == [(0, 0, f"vision0:{shard}") for shard in (0, 0, 1, 1)]
    assert recorded.returns("vision", "forward_step") == [2, 0, 2, 0]
    # Vision ranks 0 and 2 lead shards 0 and 1; result number d is replica d's.
    assert recorded.of("text", "forward_step") == [
        (0, 0, f"text0:{d}", f"e00:vision0#{d}", f"e00:vision2#{d}") for d in (0, 1)
    ]
    gradients = [(0, 0, True, f"g00:text0#{shard}", f"g00:text1#{shard}") for shard in (0, 0, 1, 1)]
    assert recorded.of("vision", "backward_step") == gradients


def test_a_replica_gets_its_rows_and_its_embeddings_on_all_its_tensor_ranks() -> None:
    recorded = pair(Degrees(ulysses=3), Degrees(data=2, tensor=2))
    of_replica = [(0, 0, f"text0:{d}", *(f"e00:vision{v}#{d}" for v in range(3))) for d in (0, 1)]
    assert recorded.of("text", "forward_step") == [of_replica[0], of_replica[0], of_replica[1], of_replica[1]]
    assert recorded.returns("text", "backward_step") == [3, 0, 3, 0]


def test_only_refs_that_carry_rows_are_passed() -> None:
    recorded = pair(Degrees(data=3), Degrees(data=2), Route(((0, 0), (2, 0), (2, 1))))
    assert recorded.returns("vision", "forward_step") == [1, 0, 2]
    assert recorded.of("text", "forward_step") == [
        (0, 0, "text0:0", "e00:vision0#0", "e00:vision2#0"),
        (0, 0, "text0:1", "e00:vision2#1"),
    ]
    assert recorded.returns("text", "backward_step") == [2, 1]
    assert recorded.of("vision", "backward_step") == [
        (0, 0, True, "g00:text0#0"),
        (0, 0, True),  # it has no rows, but its neighbours may wait for it in a collective
        (0, 0, True, "g00:text0#1", "g00:text1#0"),
    ]


def test_a_micro_batch_without_pictures_leaves_vision_alone_and_its_last_backward_is_the_one_before() -> None:
    recorded = pair(Degrees(), Degrees(), dense(1, 1), dense(1, 1), Route(()))
    assert [arguments[:3] for arguments in recorded.of("vision", "backward_step")] == [(0, 0, False), (1, 0, True)]
    assert recorded.of("text", "forward_step")[2] == (2, 0, "text2:0")
    assert [arguments[2] for arguments in recorded.of("text", "backward_step")] == [False, False, True]


def test_hidden_states_go_from_stage_to_stage_and_their_gradients_back() -> None:
    recorded = step(make_graph(text=Degrees(data=2, tensor=2), stages=2), [dense(1, 2)])
    own = [f"text0:{d}" for d in (0, 0, 1, 1)]
    states = ["e00:text.00#0", "e00:text.00#0", "e00:text.02#0", "e00:text.02#0"]
    assert recorded.of("text.1", "forward_step") == [(0, 0, o, s) for o, s in zip(own, states, strict=True)]
    assert recorded.returns("text.0", "forward_step") == [1, 0, 1, 0]
    assert recorded.returns("text.1", "forward_step") == [0] * 4
    back = ["g00:text.10#0", "g00:text.10#0", "g00:text.12#0", "g00:text.12#0"]
    assert recorded.of("text.0", "backward_step") == [(0, 0, True, gradient) for gradient in back]
    assert recorded.of("text.1", "backward_step") == [(0, 0, True)] * 4


def test_a_tensor_that_enters_a_later_stage_goes_there_beside_the_hidden_states() -> None:
    graph = make_graph(stages=2, enters={"deepstack.0": 0, "deepstack.1": 2})
    recorded = step(graph, [dense(1, 1)])
    assert recorded.returns("vision", "forward_step") == [2]
    assert recorded.of("text.0", "forward_step") == [(0, 0, "text0:0", "e00:vision0#0")]
    assert recorded.of("text.1", "forward_step") == [(0, 0, "text0:0", "e00:vision0#1", "e00:text.00#0")]
    assert recorded.of("text.0", "backward_step") == [(0, 0, True, "g00:text.10#1")]
    assert recorded.of("vision", "backward_step") == [(0, 0, True, "g00:text.00#0", "g00:text.10#0")]


def test_chunks_of_an_interleaved_stage_are_told_apart() -> None:
    recorded = step(make_graph(stages=2, chunks=2), [dense(1, 1)] * 2, "interleaved")
    assert [arguments[:2] for arguments in recorded.of("text.0", "forward_step")] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert recorded.of("text.0", "forward_step")[2] == (0, 1, "text0:0", "e00:text.10#0")
    last = [arguments[:3] for arguments in recorded.of("text.0", "backward_step")]
    assert last == [(0, 1, False), (1, 1, False), (0, 0, False), (1, 0, True)]


def test_a_frozen_tower_gets_no_gradients_and_nobody_makes_them() -> None:
    recorded = step(make_graph(vision_trains=False), [dense(1, 1)])
    assert recorded.of("vision", "backward_step") == []
    assert recorded.returns("text", "backward_step") == [0]


def test_a_frozen_decoder_lets_gradients_through() -> None:
    recorded = step(make_graph(stages=2, text_trains=False), [dense(1, 1)])
    assert recorded.returns("text.0", "backward_step") == [1]
    assert recorded.of("vision", "backward_step") == [(0, 0, True, "g00:text.00#0")]


def test_stages_that_share_a_weight_get_one_another_s_gradient_before_the_norm() -> None:
    recorded = step(make_graph(text=Degrees(tensor=2), stages=3, tied=True), [dense(1, 1)])
    assert recorded.of("text.0", "grad_norm_sq") == [("info", f"tied_gradient:text.2{rank}#0") for rank in (0, 1)]
    assert recorded.of("text.2", "grad_norm_sq") == [("info", f"tied_gradient:text.0{rank}#0") for rank in (0, 1)]
    assert recorded.of("text.1", "grad_norm_sq") == [("info",)] * 2
    frozen = step(make_graph(stages=2, text_trains=False, tied=True, tie_trained=False), [dense(1, 1)])
    assert frozen.of("text.0", "tied_gradient") == []


def test_the_norm_of_a_stage_goes_to_every_rank_of_the_others() -> None:
    recorded = pair(Degrees(ulysses=2), Degrees(tensor=2))
    assert recorded.of("vision", "grad_norm_sq") == recorded.of("text", "grad_norm_sq") == [("info",)] * 2
    assert recorded.of("vision", "optimizer_step") == [("info", "grad_norm_sq:text0#0")] * 2
    assert recorded.of("text", "optimizer_step") == [("info", "grad_norm_sq:vision0#0")] * 2


def test_a_step_answers_with_the_report_of_every_rank() -> None:
    recorded = pair(Degrees(), Degrees(tensor=2))
    reports = {"vision": ["optimizer_step:vision0#0"], "text": ["optimizer_step:text0#0", "optimizer_step:text1#0"]}
    assert recorded.refs == StepRefs("info", reports)


def test_calls_are_submitted_in_the_order_of_the_schedule() -> None:
    recorded = pair(Degrees(), Degrees(), dense(1, 1), dense(1, 1))
    order = [(c.stage, c.method) for c in recorded.calls]
    there_and_back = [
        ("vision", "forward_step"),
        ("text", "forward_step"),
        ("text", "backward_step"),
        ("vision", "backward_step"),
    ]
    update = [(s, m) for m in ("grad_norm_sq", "optimizer_step") for s in ("vision", "text")]
    assert order == there_and_back * 2 + update


def test_a_backward_that_needs_nothing_from_others_goes_with_the_forward_before_it() -> None:
    """A forward never waits in a call for what is before it: its own data come meanwhile. The norm goes with a last
    backward that sends nothing."""
    three, norm = (dense(1, 1),) * 3, "norm of info"
    found = step(make_graph(), three).turns
    assert found == {"vision": ["F0", "B0", "F1", "B1", "F2", f"B2 {norm}"], "text": ["F0 B0", "F1 B1", "F2 B2", norm]}
    pipeline = step(make_graph(stages=2), three, "gpipe").turns
    assert pipeline == {
        "vision": ["F0", "F1", "F2", "B0", "B1", f"B2 {norm}"],
        "text.0": ["F0", "F1", "F2", "B0", "B1", "B2", norm],
        "text.1": ["F0", "F1", "F2 B0", "B1", "B2", norm],
    }
    frozen = step(make_graph(vision_trains=False), three).turns
    assert frozen == {"vision": ["F0", "F1", "F2", norm], "text": ["F0 B0", "F1 B1", f"F2 B2 {norm}"]}


def test_a_pass_of_the_tower_sends_to_each_of_its_micro_batches_and_gets_all_their_gradients() -> None:
    """Shard 1 of vision has nothing for micro-batch 1, no shard has for 2 and 3, so that pass is left out."""
    routes = (dense(2, 1), Route(((0, 0),)), Route(()), Route(()))
    found = step(make_graph(Degrees(ulysses=2), Degrees(), batch=2), routes, "vision_ahead")
    both = ["F0 B0 F1 B1", "F2 B2 F3 B3 norm of info"]  # what a pass gives is there at once
    assert found.turns == {"vision": ["F0", "B0 norm of info"], "text": both}
    assert found.returns("vision", "forward_step") == [2, 1]
    assert found.of("text", "forward_step") == [
        (0, 0, "text0:0", "e00:vision0#0", "e00:vision1#0"),
        (1, 0, "text1:0", "e00:vision0#1"),
        *((m, 0, f"text{m}:0") for m in (2, 3)),
    ]
    assert found.of("vision", "backward_step") == [
        (0, 0, True, "g00:text0#0", "g10:text0#0"),
        (0, 0, True, "g00:text0#1"),
    ]


def test_gradients_of_a_pass_go_back_though_its_last_micro_batch_has_none() -> None:
    found = step(make_graph(batch=2), (dense(1, 1), Route(())), "vision_ahead")
    assert found.turns == {"vision": ["F0", "B0 norm of info"], "text": ["F0 B0 F1 B1", "norm of info"]}
    assert found.of("vision", "backward_step") == [(0, 0, True, "g00:text0#0")]


def test_a_call_has_so_many_micro_batches_of_a_pass_at_most() -> None:
    turns = step(make_graph(batch=10), (dense(1, 1),) * 13, "vision_ahead").turns["text"]
    assert [turn.split()[0] for turn in turns] == ["F0", "F8", "F10", "norm"]
    assert [turn.split()[-1] for turn in turns] == ["B7", "B9", "B12", "info"]


def by_hand(recorded_like: StageGraph, routes: Sequence[Route]) -> tuple[list[Call], Batch, dict[str, Stage]]:
    calls: list[Call] = []
    groups = {s.name: FakeGroup(s.name, s.degrees.world, calls) for s in recorded_like.stages}
    shards = {part: recorded_like.of_part(part)[0].degrees.shards for part in recorded_like.parts()}
    counts = {part: -(-len(routes) // recorded_like.batch_of(part)) for part in shards}
    work = {part: [[f"{part}{m}:{k}" for k in range(n)] for m in range(counts[part])] for part, n in shards.items()}
    return calls, Batch("info", work, {"vision": routes}), dict(make_stages(recorded_like, groups))


def test_a_loop_of_ones_own_makes_the_schedules_calls() -> None:
    graph, routes = make_graph(Degrees(ulysses=2), Degrees(tensor=2)), [dense(2, 1)] * 2
    calls, batch, stages = by_hand(graph, routes)
    vision, text = stages["vision"], stages["text"]
    for m in (0, 1):
        features = vision.forward(batch, m)
        assert text.forward(batch, m, features) == {}
        assert vision.backward(batch, m, text.backward(batch, m)) == {}
    vision.flush()  # as an update does
    wanted = [call for call in step(graph, routes).calls if call.method in ("forward_step", "backward_step")]
    assert calls == wanted


def test_a_loop_of_ones_own_with_passes_of_two() -> None:
    graph, routes = make_graph(Degrees(ulysses=2), Degrees(tensor=2), batch=2), [dense(2, 1)] * 4
    calls, batch, stages = by_hand(graph, routes)
    vision, text = stages["vision"], stages["text"]
    for number in (0, 1):
        features, gradients = vision.forward(batch, number), {}
        for m in (2 * number, 2 * number + 1):
            text.forward(batch, m, features)
            gradients |= text.backward(batch, m)
        vision.backward(batch, number, gradients)
    vision.flush()
    wanted = [call for call in step(graph, routes).calls if call.method in ("forward_step", "backward_step")]
    assert calls == wanted


def test_what_a_stage_lacks_is_named_before_it_is_called() -> None:
    calls, batch, stages = by_hand(make_graph(Degrees(ulysses=2), Degrees(tensor=2)), [dense(2, 1)])
    with pytest.raises(ValueError, match="text.forward of micro-batch 0 lacks what vision.forward returned"):
        stages["text"].forward(batch, 0)
    with pytest.raises(ValueError, match="vision.backward of micro-batch 0 lacks what text.backward returned"):
        stages["vision"].backward(batch, 0)
    assert calls == []


ONE = Degrees()
LORA = (("text", AdapterSettings(2, 4.0, dropout=0.4)),)
CASES = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, frozen=("text",)),
    Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, zero_stage=2, text_zero_stage=3, fsdp=True),
    Case(Degrees(data=2), Degrees(data=2), 2, zero_stage=3, text_zero_stage=2, fsdp=True, checkpointing=True),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", zero_stage=1, text_zero_stage=2),
    Case(Degrees(data=2), Degrees(data=2), 1, "float32", zero_stage=3, text_zero_stage=3),
    Case(ONE, Degrees(data=2), 2, stages=2, chunks=2, schedule="interleaved", packing=True),
    Case(ONE, Degrees(tensor=2), 2, lora=LORA, checkpointing=True),
    Case(ONE, Degrees(ring=2, tensor=2), 1, sequence_groups="auto"),
    Case(Degrees(data=2), Degrees(data=2), 2, vision_batch=2),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0]), ids=str)
def test_the_plain_models_loss_and_no_trace_of_it(
    case: Case, four_layers_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    steps = awkward_steps()
    feed = make_reader(four_layers_model, case, [*steps, mixed_step(), step_without_image()])
    others = [feed.step(len(steps)), feed.step(len(steps) + 1)]
    ends = []
    for evaluates in (False, True):
        with Running(four_layers_model, case) as running:
            found = []
            for number in range(len(steps)):
                found += [running.evaluate(data) for data in others] if evaluates else []
                running.step(feed.step(number))
            ends.append(running.weights())
    for mine, theirs in zip(sum(ends[0], []), sum(ends[1], []), strict=True):
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
    oracle = Oracle(four_layers_model, getattr(torch, case.dtype), UPDATE, lora=dict(case.lora))
    exact = 1e-9 if case.dtype == "float64" else 1e-5
    wanted = [oracle.evaluate(mixed_step()), oracle.evaluate(step_without_image())]
    assert [one.loss for one in found[:2]] == pytest.approx([one.loss for one in wanted], rel=exact)
    assert [one.right for one in found[:2]] == [one.right for one in wanted]


def _half_right(oracle: Oracle) -> list[Sample]:
    """Samples of whose targets every other one is what the model finds likeliest."""
    found = []
    for sample in mixed_step():
        labels = sample.labels.copy()
        likeliest = oracle.predict(sample)[0].argmax(-1).numpy()
        chosen = np.flatnonzero(labels[1:] != IGNORED)[::2]
        labels[1 + chosen] = likeliest[chosen]
        found.append(replace(sample, labels=labels))
    return found


@pytest.mark.parametrize(
    "case",
    slow_but(
        [
            Case(ONE, Degrees(data=2), 1, packing=True),
            Case(ONE, Degrees(tensor=2), 1, packing=True),
            Case(ONE, Degrees(ring=2), 1, packing=True),
            Case(ONE, Degrees(ulysses=2, data=2), 1),
            Case(ONE, ONE, 2, stages=2, chunks=2, schedule="interleaved"),
            Case(Degrees(ulysses=2), Degrees(data=2, ring=2), 2, sequence_groups="auto"),
        ],
        Case(ONE, Degrees(data=2), 1, packing=True),
        Case(ONE, Degrees(ring=2), 1, packing=True),
    ),
    ids=str,
)
def test_likeliest_tokens_are_counted_once_and_by_sample(case: Case, four_layers_model: str) -> None:
    oracle = Oracle(four_layers_model, torch.float64, UPDATE)
    samples = [replace(one, position=number) for number, one in enumerate(_half_right(oracle), 1)]
    data = make_reader(four_layers_model, case, [samples]).step(0)
    with Running(four_layers_model, case) as running:
        found, judged = running.evaluate(data), running.judge(data)
    wanted = oracle.evaluate(samples)
    targets = sum(sample.target_tokens for sample in samples)
    assert (found.right, found.targets) == (wanted.right, targets) and targets / 3 < found.right < targets
    alone = [(n, oracle.evaluate([one]).right, one.target_tokens) for n, one in enumerate(samples) if one.target_tokens]
    assert sorted((one.row, one.right, one.targets) for one in judged) == alone


def test_adapters_drop_nothing_out(four_layers_model: str) -> None:
    case = Case(ONE, ONE, 1, lora=LORA)
    feed = make_reader(four_layers_model, case, [mixed_step()])
    with Running(four_layers_model, case) as running:
        first, again = running.evaluate(feed.step(0)), running.evaluate(feed.step(0))
        trained, _ = running.step(feed.step(0))
    assert first == again and first.loss != trained
    plain = replace(case, lora=(("text", AdapterSettings(2, 4.0)),))
    with Running(four_layers_model, plain) as running:
        assert running.evaluate(feed.step(0)) == first


NEW = Sampling(5)
ANSWERED = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True, recompute="light"),
    Case(Degrees(data=2), Degrees(data=2, ring=2), 2, checkpointing=True, mlp_chunks=3),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", zero_stage=1, text_zero_stage=2),
    Case(ONE, Degrees(data=2), 2, "float32", text_zero_stage=1),
    Case(ONE, Degrees(ulysses=2), 2, lora=LORA, recompute="offload"),
    Case(ONE, ONE, 2, frozen=("text",)),
]


@pytest.mark.parametrize("case", slow_but(ANSWERED, ANSWERED[1]), ids=str)
def test_answers_between_steps(case: Case, four_layers_model: str) -> None:
    model, steps = four_layers_model, awkward_steps()[:2]
    samples = [make_prompt([(1, 8, 6)], 9, 1), make_text(20, 2), make_prompt([(1, 4, 4), (1, 4, 8)], 3, 3)]
    samples = samples[: case.text.data + 1]
    feed, dealer = make_reader(model, case, steps), make_sharder(model, case)
    ends, told = [], []
    for answers in (False, True):
        with Running(model, case, Fault(text=RecordingText)) as running:
            for number in range(len(steps)):
                for first in range(0, len(samples) if answers else 0, case.text.data):
                    held = samples[first : first + case.text.data]
                    rows = tuple((one,) for one in held) + ((),) * (case.text.data - len(held))
                    data = dealer.shard_prompts(StepSamples(0, 0, (rows,), ()), replace(NEW, seed=0))
                    batch = Batch(data.info, data.work, data.routes)
                    refs = answer_batch(running.stages, running.graph, batch)
                    told += [of_replica[0].token_ids for of_replica in refs.replicas] if number == 0 else []
                running.step(feed.step(number))
            ends.append(running.weights())
    for mine, theirs in zip(sum(ends[0], []), sum(ends[1], []), strict=True):
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
    if not case.lora:  # whose first values are not zero here
        wanted = [plain_answer(model, sample, NEW) for sample in samples]
        assert told[: len(wanted)] == wanted and not any(told[len(wanted) :])
