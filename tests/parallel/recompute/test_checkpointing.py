"""What layers keep, recompute, offload and cut."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dhp.config.layout import CHOICES
from dhp.core.errors import ModelError
from dhp.parallel.recompute import meter as meter_module
from dhp.parallel.recompute.meter import ActivationMeter
from dhp.parallel.recompute.recomputed_layers import ATTENTION, Away, Host, RecomputedLayers, tile_mlps
from dhp.parallel.recompute.saved_tensors import SavedTensors, noting, save_output, top_hooks

ROWS, WIDTH, INNER = 24, 16, 40


@dataclass(frozen=True)
class Parts:
    path: str = "layers"
    projections: tuple[str, ...] = ("qkv", "proj")
    mlp: tuple[str, ...] = ("gate", "up")
    kinds: tuple[str, ...] = ("only",) * 3


class Counted(nn.Linear):
    """Counts how often it runs."""

    runs = 0

    def forward(self, states: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(states)


class Layer(nn.Module):
    """What a transformer layer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = Counted(WIDTH, 3 * WIDTH), Counted(WIDTH, WIDTH)
        self.gate, self.up, self.down = Counted(WIDTH, INNER), Counted(WIDTH, INNER), Counted(INNER, WIDTH)
        self.attentions = 0
        self.attend = save_output(ATTENTION, self._attend)

    def forward(self, states: Tensor, *, turn: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(states)).split(WIDTH, dim=-1)
        states = states + self.proj(self.attend(query * turn, key * turn, value))
        inner = self.norm2(states)
        return states + self.down(F.silu(self.gate(inner)) * self.up(inner))

    def _attend(self, *qkv: Tensor) -> Tensor:
        self.attentions += 1
        heads = (states.view(1, len(states), 2, -1).transpose(1, 2) for states in qkv)  # [1, heads, rows, dim]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, WIDTH)


def test_a_layer_without_any_of_the_named_modules_is_refused() -> None:
    """Dense layers and those with experts have some of them each."""
    RecomputedLayers([Layer()], Parts(mlp=("gate", "up", "experts")), ("light",))
    with pytest.raises(ValueError, match="a Layer has none of the modules experts, gates; correct the LayerParts"):
        RecomputedLayers([Layer()], Parts(mlp=("experts", "gates")), ("light",))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, states: Tensor) -> Tensor:
        turn = torch.linspace(0.5, 1.5, WIDTH)
        for layer in self.layers:
            states = layer(states, turn=turn)
        return states


def run(model: Model) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    states = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = model(states).square().sum()
    loss.backward()
    return (loss.detach(), states.grad, *(parameter.grad for parameter in model.parameters()))


def recomputed(*choices: str) -> Model:
    model = Model()
    RecomputedLayers(model.layers, Parts(), choices)
    return model


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_the_same_to_the_bit(choice: str) -> None:
    for ours, plain in zip(run(recomputed(choice, choice, choice)), run(Model()), strict=True):
        assert torch.equal(ours, plain)


def test_every_layer_has_a_choice_of_its_own_which_may_change() -> None:
    model = Model()
    layers = RecomputedLayers(model.layers, Parts(), ("all", "none", "mlp"))
    wanted = run(Model())
    for choices in (("all", "none", "mlp"), ("none", "light", "all")):
        layers.choose(choices)
        assert layers.choices == choices
        model.zero_grad()
        assert all(torch.equal(o, w) for o, w in zip(run(model), wanted, strict=True))


@pytest.mark.parametrize(
    ("choice", "again"),
    [
        # In the order qkv, attention, proj, gate, up, down. Nobody needs the last product's result a second time.
        ("none", (0, 0, 0, 0, 0, 0)),
        ("light", (0, 0, 0, 0, 0, 1)),
        ("mlp", (0, 0, 0, 1, 1, 1)),
        ("linear", (1, 0, 1, 1, 1, 1)),
        ("all", (1, 1, 1, 1, 1, 1)),
        ("offload", (1, 1, 1, 1, 1, 1)),
    ],
)
def test_what_runs_again(choice: str, again: tuple[int, ...]) -> None:
    model = recomputed("none", choice, "none")
    run(model)
    layer = model.layers[1]
    runs = (layer.qkv.runs, layer.attentions, layer.proj.runs, layer.gate.runs, layer.up.runs, layer.down.runs)
    assert runs == tuple(1 + more for more in again)


ROW = ROWS * 4  # bytes of a number a row
INPUT, ATTENDED = WIDTH * ROW, WIDTH * ROW + 2 * ROW  # of attention, also two heads' log-sum-exp
HELD = {
    "offload": 0,
    "all": INPUT,
    "linear": INPUT + ATTENDED,
    "mlp": INPUT + 3 * WIDTH * ROW + ATTENDED + WIDTH * ROW,  # qkv and proj
    "light": INPUT + 3 * WIDTH * ROW + ATTENDED + WIDTH * ROW + 2 * INNER * ROW,  # gate and up
}


@pytest.mark.parametrize("choice", HELD)
def test_what_stays(choice: str) -> None:
    model = recomputed(choice, choice, choice)
    saved = SavedTensors(model)
    with saved.counting():
        states = model(torch.randn(ROWS, WIDTH))
    assert saved.bytes == 3 * HELD[choice] + WIDTH * 4  # and the vector that all layers are given
    del states
    assert saved.bytes == 0


def test_a_deeper_choice_holds_less_and_recomputes_more() -> None:
    held, added = [], []
    for choice in CHOICES:
        usage = measured(choice)
        held.append(usage.layers[1].held_bytes)
        added.append(usage.layers[1].replay_bytes)
    assert held == sorted(held, reverse=True) and len(set(held)) == len(CHOICES)
    assert added == sorted(added) and added[0] == 0


def measured(choice: str, gradient_bytes: int = 0, micro_batches: Sequence[int] = (ROWS,), times_layers: bool = True):
    model = Model()
    meter = ActivationMeter(model, torch.device("cpu"), Parts.kinds, times_layers)
    layers = RecomputedLayers(model.layers, Parts(), (choice,) * 3, meter)
    for number, rows in enumerate(micro_batches):
        with meter.forward(rows, number):
            loss = model(torch.randn(rows, WIDTH, requires_grad=True)).square().sum()
        with meter.backward():
            loss.backward()
    return meter.take(layers.choices, gradient_bytes)


def test_the_meter_tells_bytes_and_seconds_of_each_layer() -> None:
    usage = measured("all")
    assert usage.choices == ("all",) * 3 and usage.rows == usage.all_rows == ROWS
    assert [layer.held_bytes for layer in usage.layers] == [INPUT + WIDTH * 4, INPUT, INPUT]
    assert usage.after_bytes == INPUT and usage.before_bytes == 0  # the square saves what it squares
    assert all(layer.replay_s > 0 for layer in usage.layers)
    last = usage.layers[-1]
    # At its highest when the last layer has been run again.
    assert usage.peak_bytes == sum(layer.held_bytes for layer in usage.layers) + last.replay_bytes


def test_a_forward_is_what_its_layers_take_and_what_lies_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of whole ticks: layers of two micro-batches, each of which is begun and ended by one."""
    ticks = iter(range(1000))
    monkeypatch.setattr(meter_module.time, "thread_time", lambda: next(ticks))
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        usage = measured("none", micro_batches=(ROWS, ROWS // 2))
    finally:
        torch.set_num_threads(threads)
    assert [layer.forward_s for layer in usage.layers] == [2, 2, 2]
    assert (usage.forward_s, usage.backward_s) == (2 * (1 + 3 * 2), 2)  # three layers, each between two marks
    assert [layer.forward_s for layer in measured("none", times_layers=False).layers] == [0, 0, 0]


def test_a_peak_is_never_less_than_what_the_fullest_micro_batch_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU gradients are taken off the peak; they are not there yet when forward ends."""
    monkeypatch.setattr(meter_module._Saved, "take_peak", lambda self, gradient_bytes: 10**9 - gradient_bytes)
    usage = measured("none", gradient_bytes=10**8)
    assert usage.peak_bytes == 9 * 10**8
    usage = measured("none", gradient_bytes=10**9)
    kept = usage.before_bytes + sum(layer.held_bytes for layer in usage.layers) + usage.after_bytes
    assert usage.peak_bytes == kept > 0


def test_bytes_are_those_of_the_fullest_micro_batch_and_rows_those_of_all() -> None:
    usage, alone = measured("all", micro_batches=(ROWS, ROWS // 2)), measured("all")
    assert (usage.rows, usage.all_rows) == (ROWS, ROWS + ROWS // 2)
    for name in ("held_bytes", "replay_bytes"):
        assert [getattr(layer, name) for layer in usage.layers] == [getattr(layer, name) for layer in alone.layers]


@pytest.mark.parametrize("choice", ["all", "none"])
def test_what_backward_takes_is_known_where_it_is_the_fullest_moment(choice: str) -> None:
    model = Model()
    meter = ActivationMeter(model, torch.device("cpu"), Parts.kinds)
    layers = RecomputedLayers(model.layers, Parts(), (choice,) * 3, meter)
    assert meter.backward_bytes(ROWS, 0) == 0  # before any
    for number, rows in enumerate((ROWS, ROWS // 2)):
        with meter.forward(rows, number):
            loss = model(torch.randn(rows, WIDTH, requires_grad=True)).square().sum()
        with meter.backward(number):
            loss.backward()
    again = meter.take(layers.choices).layers[-1].replay_bytes
    taken = again - INPUT if again else 0  # what the square saved is free by then
    assert meter.backward_bytes(ROWS // 2, 0) == taken // 2 and (taken > 0) == (choice == "all")
    assert meter.backward_bytes(2 * ROWS, 0) == taken  # no more than what was measured


class Counts:
    """Of a GPU: bytes of activations and gradients, as they are set."""

    has_gradients = True

    def __init__(self) -> None:
        self.bytes = self.most = self.gradients = 0

    def begin(self) -> None:
        self.most = self.bytes

    def now(self) -> int:
        return self.bytes

    def peak(self) -> int:
        return self.most

    def take_peak(self, gradient_bytes: int) -> int:
        return self.most - gradient_bytes

    def counting(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_gradients_do_not_grow_with_rows_and_are_looked_for_where_they_are_not_there_yet() -> None:
    """The first backward of a step makes room for gradients, which later ones find."""
    meter, counts = ActivationMeter(Model(), torch.device("cpu"), Parts.kinds), Counts()
    meter._bytes = counts

    def step(rows: int, kept: int, passing: int, gradients: int) -> None:
        with meter.forward(rows):
            counts.bytes += kept
            counts.most = max(counts.most, counts.bytes)
        with meter.backward(0, lambda: counts.gradients):
            counts.most = max(counts.most, counts.bytes + gradients + passing)
            counts.gradients += gradients
            counts.bytes += gradients - kept

    step(1_000, 500, 30, 2_400)
    assert [meter.backward_bytes(rows, 0) for rows in (1_000, 16_000, 500)] == [2_430, 2_430, 2_415]
    assert meter.backward_bytes(16_000, 2_400) == 30  # a later micro-batch
    meter.take(("none",) * 3)
    counts.gradients = counts.bytes = 0
    step(16_000, 500, 90, 2_400)
    assert meter.backward_bytes(16_000, 0) == 2_490
    meter.plan_anew()
    assert meter.backward_bytes(16_000, 0) == 2_490  # until a backward was measured under the new plan
    meter.take(("none",) * 3)
    counts.gradients = counts.bytes = 0
    step(16_000, 3_000, -2_300, 2_400)  # layers' own memory becomes free as gradients come
    assert meter.backward_bytes(16_000, 0) == 100


def test_a_step_without_work_has_no_usage() -> None:
    meter = ActivationMeter(Model(), torch.device("cpu"), Parts.kinds)
    assert meter.take(("none",) * 3) is None


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="2 choices for 3 layers"):
        recomputed("all", "all")
    with pytest.raises(ValueError, match="most"):
        recomputed("all", "all", "most")


def test_without_gradients_nothing_is_checkpointed() -> None:
    model = recomputed("all", "all", "all")
    with torch.no_grad():
        states = model(torch.randn(ROWS, WIDTH))
    assert not states.requires_grad


def saved(host: Host, states: Tensor, other: Tensor, index: int) -> Tensor:
    with host.keeping(states, index):
        return states * other  # saves both


def test_the_states_are_a_copy_and_all_else_stays() -> None:
    host, states, other = Host(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    inner = states * 1.0
    product = saved(host, inner, other, 0)
    kept = host._last()
    assert isinstance(kept, Away) and kept._host.data_ptr() != inner.data_ptr()
    assert torch.equal(kept._host, inner)
    wanted = inner.detach().clone()
    inner.data.zero_()  # the copy is what backward sees
    product.sum().backward()
    assert torch.equal(other.grad, wanted) and torch.equal(states.grad, other)


def test_hooks_around_are_asked_for_all_else() -> None:
    host, states, other = Host(), torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    inner, seen = states * 1.0, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (seen.append(tensor), tensor)[1], lambda t: t):
        saved(host, inner, other, 0)
    assert [tensor.data_ptr() for tensor in seen] == [other.data_ptr()]


def test_a_layer_brings_back_the_one_before_it_and_no_other() -> None:
    states, found = torch.randn(2, 2), [None]
    for index in (0, 1, 3, 0):  # 3: of another micro-batch's last; 0: a new pass
        found.append(Away(states, index, found[-1]))
    assert [one._before for one in found[1:]] == [None, found[1], None, None]


def test_nothing_stays_after_backward() -> None:
    host, states, made = Host(), torch.randn(2, 2, requires_grad=True), []
    product = states * 1.0
    for index in range(3):
        product = saved(host, product * 1.0, states, index)
        made.append(host._last)
    assert all(one() is not None for one in made)
    product.sum().backward()
    assert [one() for one in made] == [None] * 3


def test_what_is_copied_goes_with_its_last_user() -> None:
    """Autograd keeps the hooks, so that these must not keep the states on the device."""
    host, other = Host(), torch.randn(3, 4, requires_grad=True)
    inner = torch.randn(3, 4, requires_grad=True) * 1.0
    gone = weakref.ref(inner.untyped_storage())
    product = saved(host, inner, other, 0)
    del inner
    assert gone() is None
    product.sum().backward()
    assert other.grad is not None


SAVED_ROWS = 10


class Squares(nn.Module):
    """Two layers of 8 × 8 and an activation between them: saves its input, what ReLU gives, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        return self.second(self.first(states).relu())  # ReLU saves its result, which the second layer saves too


class Noted(Squares):
    def forward(self, states: Tensor) -> Tensor:
        with noting():
            return super().forward(states)


EACH = SAVED_ROWS * 8 * 4  # bytes of one tensor between two layers


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    model = Squares()
    saved = SavedTensors(model)
    with saved.counting():
        output = model(torch.randn(SAVED_ROWS, 8))
    assert saved.bytes == saved.peak == 2 * EACH
    del output
    assert saved.bytes == 0 and saved.peak == 2 * EACH


def test_what_takes_the_place_of_a_parameters_old_memory_counts() -> None:
    """ZeRO's stage 3 gives parameters other memory inside of a forward pass."""
    model = Squares()
    whole = [p.data for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    saved = SavedTensors(model)
    with saved.counting():
        for parameter, data in zip(model.parameters(), whole, strict=True):
            parameter.data = data
        states = torch.randn(SAVED_ROWS, 8)
        several = [model(states) for _ in range(4)]
    assert saved.bytes == EACH + 4 * EACH
    del several, states
    assert saved.bytes == 0


def test_views_keep_their_whole_storage_once() -> None:
    saved = SavedTensors(nn.Module())
    fused = torch.randn(SAVED_ROWS, 3 * 8, requires_grad=True)
    with saved.counting():
        states = fused * 2.0  # saves nothing: the factor is a number
        query, key, value = states.split(8, dim=1)
        product = (query * key).sum() + value.square().sum()
    assert saved.bytes == 3 * EACH
    del states, query, key, value
    assert saved.bytes == 3 * EACH
    del product
    assert saved.bytes == 0


def test_buffers_do_not_count_and_integers_do() -> None:
    model = nn.Embedding(5, 8)
    model.register_buffer("scale", torch.randn(8))
    saved = SavedTensors(model)
    indices = torch.tensor([1, 2, 3])
    with saved.counting():
        output = model(indices) * model.scale
    assert saved.bytes == 3 * 8  # the indices, 8 bytes each
    del output, indices
    assert saved.bytes == 0


def test_backward_frees_what_it_has_used() -> None:
    model = Squares()
    saved = SavedTensors(model)
    with saved.counting():
        loss = model(torch.randn(SAVED_ROWS, 8)).square().sum()
        assert saved.bytes == 3 * EACH
        loss.backward()
    assert saved.bytes == 0
    assert saved.take_peak() == 3 * EACH
    assert saved.take_peak() == 0


def test_a_peak_is_no_sum() -> None:
    model = Squares()
    saved = SavedTensors(model)
    for _ in range(3):
        with saved.counting():
            model(torch.randn(SAVED_ROWS, 8)).sum().backward()
    assert saved.peak == 2 * EACH


def test_checkpointed_layers_keep_inputs_and_what_is_recomputed_counts_while_it_lives() -> None:
    layers = nn.Sequential(*(Noted() for _ in range(3)))
    saved = SavedTensors(layers)
    states = torch.randn(SAVED_ROWS, 8)
    with saved.counting():
        for layer in layers:
            states = checkpoint(layer, states, use_reentrant=False)
        loss = states.sum()
        del states
        assert saved.bytes == 3 * EACH  # the three inputs
        loss.backward()
    assert saved.peak == 4 * EACH  # beside the input of the last layer, which is there, its ReLU
    assert saved.bytes == 0


def test_without_noting_what_is_recomputed_would_be_missed() -> None:
    layer = Squares()
    saved = SavedTensors(layer)
    with saved.counting():
        checkpoint(layer, torch.randn(SAVED_ROWS, 8), use_reentrant=False).sum().backward()
    assert saved.peak == EACH


def test_gradients_are_the_same_with_counting() -> None:
    model, states = Squares(), torch.randn(SAVED_ROWS, 8)
    model(states).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with SavedTensors(model).counting():
        model(states).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


def test_an_output_that_its_own_function_saves_does_not_stay_forever() -> None:
    saved = SavedTensors(nn.Module())
    gc.disable()
    try:
        for _ in range(3):
            with saved.counting():
                F.softmax(torch.randn(SAVED_ROWS, 8, requires_grad=True), dim=-1).sum()
            assert saved.bytes == 0
    finally:
        gc.enable()


def test_attention_keeps_its_inputs_its_output_and_a_number_a_row() -> None:
    saved = SavedTensors(nn.Module())
    query, key, value = (torch.randn(1, 2, SAVED_ROWS, 8, requires_grad=True) for _ in range(3))
    with saved.counting():
        output = F.scaled_dot_product_attention(query, key, value)
    assert saved.bytes == 4 * 2 * EACH + 2 * SAVED_ROWS * 4
    del output


def test_torch_still_tells_the_hooks_in_force() -> None:
    assert top_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda t: t[0]):
        pack, unpack = top_hooks()
        assert unpack(pack(torch.ones(1))) == 1


TILED_WIDTH, INSIDE, TOKENS = 8, 64, 37


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(TILED_WIDTH, INSIDE), nn.Linear(INSIDE, TILED_WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.view(-1, TILED_WIDTH)  # as MLPs with experts take them, which a cut of padded rows must allow
        return self.down(torch.tanh(self.gate(tokens))).view(states.shape)


class LayerTiling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(states)


def make(chunks: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(LayerTiling(), LayerTiling()).double()
    if chunks > 1:
        tile_mlps(list(model), ["mlp.gate"], chunks)
    return model


def step(model: nn.Module, states: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, int, int]:
    """Output, gradients, gradient of the states, bytes kept between forward and backward, and the peak."""
    states, count = states.clone().requires_grad_(), SavedTensors(model)
    with count.counting():
        output = model(states)
        kept = count.bytes
        output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output.detach(), gradients, states.grad, kept, count.take_peak()


@pytest.mark.parametrize("chunks", [2, 5, TOKENS, TOKENS + 3])
def test_chunks_change_no_number(chunks: int) -> None:
    states = torch.randn(1, TOKENS, TILED_WIDTH, dtype=torch.float64)
    whole, tiled = step(make(1), states), step(make(chunks), states)
    torch.testing.assert_close(tiled[0], whole[0])
    torch.testing.assert_close(tiled[1], whole[1])
    torch.testing.assert_close(tiled[2], whole[2])
    with torch.no_grad():
        torch.testing.assert_close(make(chunks)(states), whole[0])


def test_memory_holds_the_inside_of_one_chunk() -> None:
    """Kept: each layer's input. At the peak also the inside of one chunk, which is as long as it comes."""
    states = torch.randn(1, 1000, TILED_WIDTH, dtype=torch.float64)
    of_states, of_inside = states.nbytes, states.nbytes * INSIDE // TILED_WIDTH
    _, _, _, kept, peak = step(make(1), states)
    assert kept >= 2 * (of_states + of_inside)
    _, _, _, kept, peak = step(make(10), states)
    assert kept == 2 * of_states
    assert kept + of_states < peak <= kept + of_states + 2 * of_inside // 10  # the loss squares as many


def test_padded_rows_are_cut_by_tokens() -> None:
    states = torch.randn(3, TOKENS, TILED_WIDTH, dtype=torch.float64)
    torch.testing.assert_close(step(make(4), states)[:3], step(make(1), states)[:3])


def test_a_layer_without_an_mlp_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="mlp_chunks=2: in a Mlp gate lie in no MLP of their own"):
        tile_mlps([Mlp()], ["gate"], 2)
