"""Bytes that the ranks of a part send in one step, verb by verb, against what each layout should cost.

Letters as in docs/operations.md. The model: 2 of 4 vision blocks have full attention (4 heads of 8), 2 decoder layers
of width 64; one image of 16 × 16 patches (256), which makes 64 rows, unless a test says otherwise."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.config.schema import PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import Batch
from dhp.core.tracing import take_sent
from dhp.data.sample.sample import Sample
from dhp.models.registry import load_family
from dhp.parallel.attention.segment_plan import GATHER_TOKENS
from dhp.plan.count.rank_traffic import DividedAttention, DividedMatrices, DividedState, DividedWeights
from dhp.plan.count.rates import Operations
from dhp.plan.count.rates import Transfer as Collective
from dhp.plan.count.unit_work import TextLoad, _exchanges, _sends, recomputed
from dhp.step.schedule import Forward, last_backwards
from dhp.step.stages import InFlight
from dhp.trainer.step_reports import expert_loads
from tests.engine.test_families import equal_pictures
from tests.helpers.families import Maker
from tests.helpers.layouts import Case, Fault, InspectedText, InspectedVision, Running, make_reader
from tests.helpers.norms import ROUTERS
from tests.helpers.rows import slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample
from tests.helpers.tiny_families import save_family

VISION, TEXT = "vision", "text"
ONE = Degrees()
PATCHES, FULL_LAYERS, VISION_WIDTH, BLOCKS = 256, 2, 32, 4
LAYERS, WIDTH, TARGETS = 2, 64, 10
TOKENS = 64 + 23  # the image's rows and the text around them
VISION_PARAMETERS, TEXT_PARAMETERS = 98528, 127552
NORM = 8  # bytes, float64

Sent = dict[str, int]


class _Counted:
    def sent(self) -> Sent:
        return take_sent()

    def parameters(self) -> int:
        return sum(math.prod(p.shape) for p in self.model.parameters())


class _Vision(_Counted, InspectedVision):
    pass


class _Text(_Counted, InspectedText):
    pass


@dataclass(frozen=True)
class Traffic:
    """By stage, what each rank sent."""

    forward: dict[str, list[Sent]]
    backward: dict[str, list[Sent]]
    update: dict[str, list[Sent]]
    parameters: dict[str, int]


def large_image(patches: int = PATCHES) -> Sample:
    return make_sample([(1, 16, patches // 16)], 20, TARGETS, 1, IMAGE_TOKEN)


def traffic(model: str, case: Case, samples: list[Sample], text: type = _Text) -> Traffic:
    """What one step sends: forward and backward of the only micro-batch, and what follows."""
    found: dict[str, dict[str, list[Sent]]] = {"forward": {}, "backward": {}}
    with Running(model, case, Fault(_Vision, text)) as running:
        data = make_reader(model, case, [samples]).step(0)
        batch = Batch(data.info, data.work, data.routes)
        in_flight, last = InFlight(batch), last_backwards(running.schedule)
        for group in running.groups.values():
            group.execute_all("sent")  # while loading
        for at, action in enumerate(running.schedule):
            stage = action.node.stage
            running.stages[stage].run(action, at in last, in_flight)
            running.stages[stage].flush()  # nothing waits for the next action
            direction = "forward" if isinstance(action, Forward) else "backward"
            found[direction][stage] = running.groups[stage].execute_all("sent")
        _, reports = running.update(batch)
        update: Any = {stage: [report.sent_bytes for report in of_ranks] for stage, of_ranks in reports.items()}
        parameters = {stage: group.execute_all("parameters")[0] for stage, group in running.groups.items()}
    return Traffic(found["forward"], found["backward"], update, parameters)


def _by_kind(*sent: dict[str, float]) -> Counter[str]:
    return +sum(map(Counter, sent), Counter())  # those of which something was sent


def all_reduced(ranks: int, nbytes: int) -> int:
    return 2 * (ranks - 1) * nbytes // ranks


@pytest.mark.parametrize(
    ("ring", "ulysses", "patches"), [slow(1, 4, PATCHES), (2, 2, PATCHES), (4, 1, PATCHES), slow(2, 2, 3 * PATCHES)]
)
def test_a_divided_image_is_sent_in_full_attention_layers_only(
    made_model: str, ring: int, ulysses: int, patches: int
) -> None:
    """Around the ring, or gathered by an all-to-all, as the image is large or small."""
    found = traffic(made_model, Case(Degrees(ring=ring, ulysses=ulysses), ONE, 1), [large_image(patches)])
    gather = patches <= GATHER_TOKENS
    shape = DividedAttention(patches, 4, 4, 8, ring, ulysses, 8, exact_bytes=8, gather=gather)
    around = "all_to_all" if gather else "ring"
    exchanged = {"all_to_all": FULL_LAYERS * shape.exchange()}
    for back, ring_bytes in ((False, shape.ring_forward()), (True, shape.ring_backward())):
        assert sum(map(Collective.sent_bytes, shape.sends(back))) == pytest.approx(shape.exchange() + ring_bytes)
    there = _by_kind(exchanged, {around: FULL_LAYERS * shape.ring_forward()})
    back = _by_kind(exchanged, {around: FULL_LAYERS * shape.ring_backward()})
    assert found.parameters[VISION] == VISION_PARAMETERS
    gradients = {"all_reduce": all_reduced(4, VISION_PARAMETERS * 8)}
    assert found.forward[VISION] == [there] * 4
    assert found.backward[VISION] == [back | gradients] * 4
    assert found.update[VISION] == [{}] * 4  # every rank knows the norm of gradients that all have
    assert found.forward[TEXT] == found.backward[TEXT] == found.update[TEXT] == [{}]


def test_layers_that_carry_state_exchange_their_own_values(tmp_path: Path) -> None:
    """Three of four layers; the fourth attends, in the ranks' ring or by Ulysses. A plan has the mean of all."""
    folder = str(save_family("qwen3_5", tmp_path / "model"))
    family, sample = load_family(folder), Maker(folder).sample([0], 7, 1)
    share, mixer = family.decoder.mixing
    text, tokens = family.config.get_text_config(), len(sample.input_ids)
    found = traffic(folder, Case(ONE, Degrees(ulysses=2), 1, packing=True), [sample])
    attention = DividedAttention(1, text.num_attention_heads, text.num_key_value_heads, text.head_dim, 1, 2, 8)
    for rank, own in enumerate((tokens // 2, tokens - tokens // 2)):
        of_layers = 3 * 8 * own * mixer.values / 2 + 2 * own * attention.exchange()
        assert found.forward[TEXT][rank]["all_to_all"] == pytest.approx(of_layers, rel=0.02)  # ranks differ by a token
    sent = _sends(PartConfig(dtype="float64"), Degrees(ulysses=2), family, TextLoad(tokens, 0.0, 7), False)
    each, counted = sum(map(Collective.sent_bytes, sent)), sum(one["all_to_all"] for one in found.forward[TEXT])
    assert share == 0.75 and 4 * each == pytest.approx(counted / 2, rel=0.03)
    of_tensor = traffic(folder, Case(ONE, Degrees(tensor=2), 1, packing=True), [sample])
    part = -(-tokens // 2)  # of the tokens, of which each has the same
    assert [one["all_to_all"] for one in of_tensor.forward[TEXT]] == [3 * 8 * part * mixer.values // 2] * 2


def test_state_that_ranks_pass_on_is_counted(tmp_path: Path) -> None:
    """Three ranks, two heads: of both pieces of each what they do to the state, and the state before them; of the last
    tokens before a piece its convolution's inputs."""
    folder = str(save_family("qwen3_5", tmp_path / "model"))
    family, sample = load_family(folder), Maker(folder).sample([0], 40, 1)
    mixer, tokens = family.decoder.mixing[1], len(sample.input_ids)
    found = traffic(folder, Case(ONE, Degrees(ring=3), 1, packing=True), [sample])
    (sent,) = DividedState(tokens, mixer.values, mixer.heads, mixer.state, 3, 1, 8, exact_bytes=8).sends()
    text = family.config.get_text_config()
    heads = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    attention = 3 * DividedAttention(tokens, *heads, 3, 1, 8, gather=True).ring_forward()  # of the fourth layer
    counted = (sum(one["all_to_all"] for one in found.forward[TEXT]) - attention) / 3
    columns = mixer.values - text.linear_num_value_heads * text.linear_value_head_dim  # what comes back is no border
    borders = 4 * mixer.border * columns * 8  # of the pieces on ranks 0, 1, 2, 1, 0 four follow another rank's
    assert counted - borders == pytest.approx(3 * sent.sent_bytes(), rel=0.06)  # heads of ranks differ by one
    planned = _sends(PartConfig(dtype="float64"), Degrees(ring=3), family, TextLoad(tokens, 0.0, 7), False)
    (of_state,) = (one for one in planned if one.operation == "all-to-all")
    assert (of_state.nbytes, of_state.ranks, of_state.times) == (sent.nbytes / 2, 3, 0.75)  # states are in float32


def test_whole_images_are_not_sent_at_all(made_model: str) -> None:
    small = make_sample([(1, 8, 8)] * 4, 20, TARGETS, 1, IMAGE_TOKEN)
    found = traffic(made_model, Case(Degrees(ulysses=4), ONE, 1), [small])
    assert found.forward[VISION] == [{}] * 4
    assert found.backward[VISION] == [{"all_reduce": all_reduced(4, VISION_PARAMETERS * 8)}] * 4


def test_data_replicas_sum_their_gradients_once(made_model: str) -> None:
    found = traffic(made_model, Case(Degrees(data=2), Degrees(data=2), 1), [large_image()] * 2)
    for part, parameters in ((VISION, VISION_PARAMETERS), (TEXT, TEXT_PARAMETERS)):
        assert found.forward[part] == [{}] * 2
        assert found.backward[part] == [{"all_reduce": all_reduced(2, parameters * 8)}] * 2


@pytest.mark.parametrize("autotp", [False, True], ids=["tensor", "autotp"])
def test_the_tensor_plan_of_the_decoder(made_model: str, autotp: bool) -> None:
    """Forward, a layer sums two outputs [tokens, hidden] over the ranks; backward, the gradients of two inputs, that of
    query, key and value and that of gate and up. DeepSpeed's layers sum for each of the five by itself. The embedding
    sums its output; the head, for each target, a maximum, a sum and a logit, and backward the gradient of its rows."""
    case = Case(ONE, Degrees(tensor=4), 1, autotp=autotp)
    found = traffic(made_model, case, [large_image()])
    states, rows = TOKENS * WIDTH * 8, TARGETS * 8
    layer = DividedMatrices(4, TOKENS, WIDTH, 8).sends(back=False)
    assert sum(map(Collective.sent_bytes, layer)) == all_reduced(4, 2 * states)
    forward = all_reduced(4, (2 * LAYERS + 1) * states + 3 * rows)
    backward = all_reduced(4, (5 if autotp else 2) * LAYERS * states + rows * WIDTH)
    assert found.forward[TEXT] == [{"all_reduce": forward}] * 4
    assert found.backward[TEXT] == [{"all_reduce": backward}] * 4
    assert found.update[TEXT] == [{"all_reduce": all_reduced(4, NORM)}] * 4


def test_sharded_norms_gather_and_scatter_where_states_were_summed(made_model: str) -> None:
    """Forward, a sum becomes a scatter of it and a gather; backward too, and each block gathers its input again. Whole
    states leave the last layer, and enter the first one's gradient."""
    case = Case(ONE, Degrees(tensor=4), 1, sharded_norms=True)
    found = traffic(made_model, case, [large_image()])
    states, rows = -(-TOKENS // 4) * 4 * WIDTH * 8, TARGETS * 8
    once = states * 3 // 4
    layer = DividedMatrices(4, TOKENS, WIDTH, 8, sharded_norms=True)
    assert [[one.sent_bytes() / once for one in layer.sends(back)] for back in (False, True)] == [[2, 2], [4, 2]]
    embedded = all_reduced(4, TOKENS * WIDTH * 8 + 3 * rows)
    assert (
        found.forward[TEXT]
        == [{"all_reduce": embedded, "all_gather": (2 * LAYERS + 1) * once, "reduce_scatter": 2 * LAYERS * once}] * 4
    )
    back = {"all_gather": (4 * LAYERS + 1) * once, "reduce_scatter": 2 * LAYERS * once}
    assert found.backward[TEXT] == [{"all_reduce": all_reduced(4, rows * WIDTH), **back}] * 4
    norms = (2 * LAYERS + 1) * WIDTH * 8
    assert found.update[TEXT] == [{"all_reduce": all_reduced(4, norms + NORM)}] * 4


def test_the_tensor_plan_of_the_tower(made_model: str) -> None:
    """Two sums a block in each direction; the merger adds one of its output forward, and of its input backward."""
    found = traffic(made_model, Case(Degrees(tensor=2), ONE, 1), [large_image()])
    states, merged = PATCHES * VISION_WIDTH * 8, PATCHES // 4 * WIDTH * 8
    assert found.forward[VISION] == [{"all_reduce": all_reduced(2, 2 * BLOCKS * states + merged)}] * 2
    assert found.backward[VISION] == [{"all_reduce": all_reduced(2, 2 * BLOCKS * states + states)}] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_sums_gradients_and_gathers_weights(made_model: str, stage: int) -> None:
    """DeepSpeed sums whole buckets on all ranks where scattering them would do: twice the bytes of the formula."""
    case = Case(Degrees(data=2), Degrees(data=2), 1, "float32", stage, text_zero_stage=stage)
    found = traffic(made_model, case, [large_image()] * 2)
    for part, parameters in ((VISION, VISION_PARAMETERS), (TEXT, TEXT_PARAMETERS)):
        assert found.forward[part] == [{}] * 2
        assert found.backward[part] == [{"all_reduce": all_reduced(2, parameters * 4)}] * 2
        assert [sent["all_gather"] for sent in found.update[part]] == [parameters * 4 // 2] * 2


@pytest.mark.slow
def test_zero_3_gathers_weights_twice_and_scatters_gradients(made_model: str) -> None:
    case = Case(Degrees(data=2), Degrees(data=2), 1, "float32", 3, text_zero_stage=3)
    found = traffic(made_model, case, [large_image()] * 2)
    for part, parameters in ((VISION, VISION_PARAMETERS), (TEXT, TEXT_PARAMETERS)):
        half = parameters * 4 // 2
        assert [sent["all_gather"] for sent in found.forward[part]] == [half] * 2
        assert found.backward[part] == [{"all_gather": half, "reduce_scatter": half}] * 2
        assert all("all_gather" not in sent for sent in found.update[part])


def test_stages_of_a_pipeline_sum_only_what_they_hold(made_model: str) -> None:
    """Hidden states and their gradients go from hand to hand, not through the ranks' links."""
    found = traffic(made_model, Case(ONE, Degrees(tensor=2), 1, stages=2), [large_image()])
    states, rows = TOKENS * WIDTH * 8, TARGETS * 8
    assert found.forward["text.0"] == [{"all_reduce": all_reduced(2, (LAYERS + 1) * states)}] * 2
    assert found.forward["text.1"] == [{"all_reduce": all_reduced(2, LAYERS * states + 3 * rows)}] * 2
    assert found.backward["text.0"] == [{"all_reduce": all_reduced(2, LAYERS * states)}] * 2
    assert sum(found.parameters[stage] for stage in ("text.0", "text.1")) < TEXT_PARAMETERS


class _EvenVisits(_Text):
    """Each token visits one expert of either half: of four those of its place and of the place after next."""

    def load_slice(self) -> Any:
        model = super().load_slice()
        for module in model.modules():
            if isinstance(module, ROUTERS):
                module.forward = partial(_visit_evenly, module, module.forward)
        return model


def _visit_evenly(router: Any, forward: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, _ = forward(states)
    first = torch.arange(len(states)) % router.num_experts
    return logits, weights, torch.stack([first, (first + 2) % router.num_experts], 1)


SHARED_OUT = [
    Degrees(data=2, expert=2),
    slow(Degrees(data=2, expert=2, ulysses=2)),
    slow(Degrees(data=2, expert=2, tensor=2)),
]


@pytest.mark.parametrize("text", SHARED_OUT, ids=str)
def test_rows_go_to_their_experts_and_come_back(text: Degrees, experts_model: str) -> None:
    """Where ranks share a row, each exchanges its own tokens; tensor ranks exchange the same ones each."""
    family, samples = load_family(experts_model), [sample for sample in equal_pictures()[0][:2]]
    case = Case(ONE, text, 1, packing=True)
    found = traffic(experts_model, case, samples, _EvenVisits)
    forwards, backwards = ([sent["all_to_all"] for sent in way[TEXT]] for way in (found.forward, found.backward))
    tokens = sum(len(sample.input_ids) for sample in samples)
    experts, config = family.decoder.experts, family.config.get_text_config()
    layers = sum(experts.sparse)
    rows = (
        tokens * experts.visits // 2 * config.hidden_size * 8 * text.tensor
    )  # in all, of which a half goes to the other rank
    load = TextLoad(tokens / 2, 0.0, 7)  # in the mean of the replicas
    there, back = (_exchanges(PartConfig(dtype="float64"), text, family, load, way) for way in (False, True))
    numbers = 8 * experts.count // 2
    attention = 0.0
    if text.ulysses > 1:
        shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attention = config.num_hidden_layers * DividedAttention(tokens, *shape, 1, 2, 8).exchange() * 2
    ranks = text.world
    assert sum(forwards) == pytest.approx(layers * (2 * rows + ranks * numbers) + attention, rel=1e-9)
    assert sum(backwards) == pytest.approx(layers * 2 * rows + attention, rel=1e-9)
    for way, sent in ((there, forwards), (back, backwards)):
        assert layers * sum(map(Collective.sent_bytes, way)) == pytest.approx((sum(sent) - attention) / ranks, rel=0.03)


@pytest.mark.parametrize("text", [_Text, _EvenVisits])
def test_ranks_report_the_rows_of_each_expert(text: type[_Text], experts_model: str) -> None:
    """Which are even where routers are, and not where they choose."""
    experts, samples = load_family(experts_model).decoder.experts, [sample for sample in equal_pictures()[0][:2]]
    with Running(experts_model, Case(ONE, Degrees(data=2, expert=2), 1, packing=True), Fault(_Vision, text)) as running:
        _, reports = running.step(make_reader(experts_model, running.case, [samples]).step(0))
        loads = expert_loads(reports, running.stages)
    rows = [report.expert_rows for report in reports[TEXT]]
    assert experts is not None and [*rows[0]] == [str(at) for at, sparse in enumerate(experts.sparse) if sparse]
    tokens = sum(len(sample.input_ids) for sample in samples)
    assert {sum(map(sum, of)) for of in zip(*(own.values() for own in rows))} == {tokens * experts.visits}
    even = max(loads["hottest"].values()) < 1.03 and loads["busiest"] == pytest.approx(dict.fromkeys(rows[0], 1.0))
    assert even is (text is _EvenVisits)


WEIGHTS = [
    slow(0, False, 4),
    (1, False, 4),
    slow(2, False, 4),
    slow(2, True, 4),
    (3, True, 4),
    slow(0, False, 2),
    slow(3, True, 2),
]


@pytest.mark.parametrize(("stage", "fsdp", "weight_bytes"), WEIGHTS)
def test_divided_weights_are_sent_as_the_planner_has_it(
    made_model: str, stage: int, fsdp: bool, weight_bytes: int
) -> None:
    """Action by action of two micro-batches. Gradients are sent in float32, weights as they compute; torch leaves
    what is outside of the layers gathered from forward to backward, and the norm of shares is a number."""
    dtype = "float32" if weight_bytes == 4 else "bfloat16"
    case = Case(Degrees(data=2), Degrees(data=2), 2, dtype, stage, text_zero_stage=stage, fsdp=fsdp)
    with Running(made_model, case, Fault(_Vision, _Text)) as running:
        data = make_reader(made_model, case, [[large_image()] * 4]).step(0)
        in_flight, last = InFlight(Batch(data.info, data.work, data.routes)), last_backwards(running.schedule)
        found = []
        for at, action in enumerate(running.schedule):
            running.stages[action.node.stage].run(action, at in last, in_flight)
            running.stages[action.node.stage].flush()
            sent = running.groups[action.node.stage].execute_all("sent")[0]
            found += [sum(sent.values())] if action.node.stage == TEXT else []
        _, reports = running.update(in_flight.batch)
        gathered = reports[TEXT][0].sent_bytes.get("all_gather", 0)
    outside = (2 * 512 + 1) * WIDTH  # the embedding and the head of 512 tokens, and the last norm
    again = TEXT_PARAMETERS - outside
    weights = DividedWeights(2, TEXT_PARAMETERS, weight_bytes, 4, stage, fsdp, again)
    expected = [weights.forward(True), weights.backward(False), weights.forward(False), weights.backward(True)]
    assert found == [sum(map(Collective.sent_bytes, of)) for of in expected]
    assert gathered == sum(map(Collective.sent_bytes, weights.update()))


@pytest.mark.parametrize("text", [Degrees(data=4, expert=2), slow(Degrees(data=2, expert=2, ulysses=2))], ids=str)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_are_summed_and_cut_over_fewer_ranks(stage: int, text: Degrees, experts_model: str) -> None:
    """All else over all four; of one micro-batch."""
    case = Case(ONE, text, 1, text_zero_stage=stage, fsdp=True, packing=True)
    found = traffic(experts_model, case, equal_pictures()[0])
    family = load_family(experts_model)
    config, experts = family.config.get_text_config(), family.decoder.experts
    of_experts = config.num_hidden_layers * 3 * config.hidden_size * experts.width * experts.count // text.expert
    again = found.parameters[TEXT] - (2 * config.vocab_size + 1) * config.hidden_size  # but what is outside of layers
    weights = DividedWeights(4, found.parameters[TEXT], 8, 8, stage, stage > 0, again, 1, of_experts, text.copies)
    for way, sent in ((found.forward, weights.forward(True)), (found.backward, weights.backward(True))):
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        counted = [sum(of_rank.get(kind, 0) for kind in kinds) for of_rank in way[TEXT]]
        assert counted == [round(sum(map(Collective.sent_bytes, sent)))] * 4


@pytest.mark.parametrize(("choice", "runs"), [("mlp", 1), slow("light", 0), slow("linear", 1), slow("all", 1)])
def test_recomputed_layers_exchange_rows_of_experts_again(choice: str, runs: int, experts_model: str) -> None:
    """But not how many rows come: the routing is kept."""
    family, samples = load_family(experts_model), [sample for sample in equal_pictures()[0][:2]]
    text = Degrees(data=2, expert=2)
    found = traffic(experts_model, Case(ONE, text, 1, packing=True, recompute=choice), samples, _EvenVisits)
    load = TextLoad(sum(len(sample.input_ids) for sample in samples) / 2, 0.0, 7)
    there, back = (_exchanges(PartConfig(dtype="float64"), text, family, load, way) for way in (False, True))
    again = recomputed(Operations(1.0, 1.0, 1.0, 1.0, there), choice, 0.5).sent
    assert family.decoder.experts is not None and len(again) == runs
    layers = sum(family.decoder.experts.sparse)
    counted = layers * sum(map(Collective.sent_bytes, (*back, *again)))
    assert counted == pytest.approx(sum(sent["all_to_all"] for sent in found.backward[TEXT]) / 2, rel=0.03)


@pytest.mark.parametrize(("choice", "again"), [("mlp", 0), slow("linear", 1), ("all", 1)])
def test_recomputed_layers_sum_behind_attention_again(made_model: str, choice: str, again: int) -> None:
    """What is behind the MLP is no input of its backward."""
    case = Case(ONE, Degrees(tensor=2), 1)
    chosen = lambda stage: (choice,) * len(stage.layers)
    with Running(made_model, case, Fault(_Vision, _Text), recompute=chosen) as running:
        data = make_reader(made_model, case, [[large_image()]]).step(0)
        in_flight, last = InFlight(Batch(data.info, data.work, data.routes)), last_backwards(running.schedule)
        for at, action in enumerate(running.schedule):
            running.stages[action.node.stage].run(action, at in last, in_flight)
            running.stages[action.node.stage].flush()
            sent = running.groups[action.node.stage].execute_all("sent")[0]
            if action.node.stage == TEXT:
                found = sent
        running.update(in_flight.batch)
    states, rows = TOKENS * WIDTH * 8, TARGETS * 8
    assert found == {"all_reduce": all_reduced(2, (2 + again) * LAYERS * states + rows * WIDTH)}
