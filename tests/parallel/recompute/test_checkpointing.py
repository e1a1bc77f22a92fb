"""Layers that recompute: the same gradients; what is meant to run again does, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.config.layout import CHOICES
from dhp.parallel.recompute import meter as meter_module
from dhp.parallel.recompute.meter import ActivationMeter
from dhp.parallel.recompute.recomputed_layers import ATTENTION, RecomputedLayers
from dhp.parallel.recompute.saved_calls import save_output
from dhp.parallel.recompute.saved_tensors import SavedTensors

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


def measured(choice: str, gradient_bytes: int = 0, micro_batches: Sequence[int] = (ROWS,)):
    model = Model()
    meter = ActivationMeter(model, torch.device("cpu"), Parts.kinds)
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
