"""Days of a GPU for OmniBal's rows: steps of a pipeline with micro-batches drawn from a made set; replicas wait for one
another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dhp.data.balance.methods import isf, random_batches
from dhp.data.balance.packs import Limits, Loads
from dhp.models.flops import OPERATIONS
from dhp.plan.count.rates import Channel, Operations, Rates, Transfer, spend
from dhp.plan.cut import simulate
from dhp.plan.cut.partition import pipeline_programs
from dhp.plan.cut.units import Numbers
from experiments.balance.sets import made
from experiments.published.machine import (
    CLASS_TOKEN,
    TILE,
    VALUE,
    Decoder,
    Fitted,
    Row,
    Tower,
    compared,
    decoder_named,
    fit,
    rates_of,
    read_table,
    score,
    tower_named,
)


def pipeline_seconds(forward: Numbers, backward: Numbers, hop: Numbers) -> Numbers:
    """Of 1F1B, by replica. forward, backward: [stages, micro-batches, replicas] seconds; hop: of a hand-over,
    [micro-batches, replicas]."""
    stages, micro_batches, replicas = forward.shape
    free = np.zeros((stages, replicas))
    ends: dict[simulate.Task, Numbers] = {}
    for work in simulate.merged(pipeline_programs("1f1b", stages, 1, micro_batches)):
        run, back, number = work
        before = run + 1 if back else run - 1
        start = free[run]
        if 0 <= before < stages:
            start = np.maximum(start, ends.pop(simulate.Task(before, back, number)) + hop[number])
        free[run] = ends[work] = start + (backward if back else forward)[run, number]
    return np.asarray(free.max(axis=0))


def stage_layers(cut: Sequence[int], tower: int) -> list[tuple[int, int]]:
    """Of each stage, its layers of the tower and of the decoder."""
    found, left = [], tower
    for layers in cut:
        own = min(layers, left)
        found.append((own, layers - own))
        left -= own
    return found


def least_slowest(seconds: Sequence[float], stages: int) -> list[int]:
    """Layers a stage of the cut whose slowest stage is the fastest, by the seconds of each layer."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    count = len(seconds)
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    first = np.zeros((stages + 1, count + 1), dtype=int)
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            slowest = np.maximum(best[stage - 1, :end], ends[end] - ends[:end])
            first[stage, end] = int(slowest.argmin())
            best[stage, end] = slowest.min()
    cut, end = [], count
    for stage in range(stages, 0, -1):
        cut.append(int(end - first[stage, end]))
        end = int(first[stage, end])
    return cut[::-1]


SHARE = 8  # of the samples one in so many is drawn
DAY = 86_400.0
LAYER_SUMS = 2  # over tensor ranks, of a layer's forward
LOSS_FORWARD = 14  # bytes moved a logit
LINK, LINK_GBIT = "ib100", 100  # of which a row's network is a multiple
TABLE = read_table("omnibal")
PROFILES = read_table("profiles")
MICRO_BATCHES: int = TABLE["micro_batches"]


@dataclass(frozen=True)
class MicroBatches:
    """Of each: tiles, tokens with padding, and squared lengths of its samples together."""

    tiles: Numbers
    tokens: Numbers
    squares: Numbers

    def __len__(self) -> int:
        return len(self.tiles)

    def drawn(self, at: np.ndarray) -> MicroBatches:
        """Those, in that shape."""
        return MicroBatches(self.tiles[at], self.tokens[at], self.squares[at])


@cache
def micro_batches(kind: str) -> MicroBatches:
    """random: samples a batch, padded to its longest; isf: as OmniBal packs them."""
    loads, limits = made(0), Limits(**TABLE["limits"])
    pick = np.random.default_rng(1).permutation(len(loads))[: len(loads) // SHARE]
    loads = Loads(loads.vision[pick], loads.text[pick])
    packs = (isf if kind == "isf" else random_batches)(loads, limits, 1, 0)
    tiles = np.maximum(packs.sums(loads.vision), 1).astype(float)
    if kind == "isf":
        return MicroBatches(tiles, packs.sums(loads.text).astype(float), packs.sums(loads.text**2).astype(float))
    longest = packs.maxima(loads.text).astype(float)
    return MicroBatches(tiles, longest * packs.counts, longest**2 * packs.counts)


@dataclass(frozen=True)
class Seconds:
    """Of forwards on one tensor rank. launch: of a layer, whatever it has; tile, token, square: of a layer, for each;
    head: for each token."""

    launch: float
    tile: float
    token: float
    square: float
    head: float

    def tower_layer(self, drawn: MicroBatches) -> Numbers:
        """Of each micro-batch."""
        return self.launch + self.tile * drawn.tiles

    def text_layer(self, drawn: MicroBatches) -> Numbers:
        """Of each micro-batch."""
        return self.launch + self.token * drawn.tokens + self.square * drawn.squares


def layer_seconds(tower: Tower, decoder: Decoder, ranks: int, rates: Rates) -> Seconds:
    """Of each kind of layer."""
    rows, (of_tower, of_text) = TILE + CLASS_TOKEN, (PROFILES["elementwise"]["fused"][k] for k in ("vision", "text"))
    tile = tower.forward(rows, 0, rows**2) * (1 / ranks) + tower.moved((of_tower[0], 0, of_tower[2]), rows, ranks)
    tile += _sums(tower.layers, rows * tower.hidden, ranks)
    token = decoder.forward(1, 0) * (1 / ranks) + decoder.moved(tuple(of_text), 1, ranks, norms_cut=False)
    token += _sums(decoder.layers, decoder.hidden, ranks)
    head = Operations(OPERATIONS * decoder.work.target / ranks, elementwise=LOSS_FORWARD * decoder.words / ranks)
    return Seconds(
        TABLE["launch_us"] / 1e6, spend(tile, rates).total / tower.layers, spend(token, rates).total / decoder.layers,
        spend(decoder.forward(0, 1) * (1 / ranks), rates).total / decoder.layers, spend(head, rates).total,
    )  # fmt: skip


def _sums(layers: int, values: float, ranks: int) -> Operations:
    return Operations(sent=(Transfer("all-reduce", VALUE * values, ranks, times=layers * LAYER_SUMS),))


@dataclass(frozen=True)
class Chain:
    """A row's model and layout. cut: layers a stage; recomputed: of them, the tower's first."""

    tower: Tower
    decoder: Decoder
    tensor: int
    replicas: int
    cut: tuple[int, ...]
    recomputed: tuple[int, ...]

    def passes(self, seconds: Seconds, drawn: MicroBatches) -> tuple[Numbers, Numbers]:
        """Forward and backward of each stage: [stages, …] seconds."""
        own, text = seconds.tower_layer(drawn), seconds.text_layer(drawn)
        forward, backward = [], []
        for (towers, texts), again in zip(stage_layers(self.cut, self.tower.layers), self.recomputed, strict=True):
            first = min(towers, again)
            forward.append(towers * own + texts * text)
            backward.append(2 * forward[-1] + first * own + (again - first) * text)
        head = seconds.head * drawn.tokens
        forward[-1], backward[-1] = forward[-1] + head, backward[-1] + 2 * head
        return np.stack(forward), np.stack(backward)

    def gradients(self) -> Transfer:
        """Summed over replicas after each step, on the stage with the most."""
        layer = (self.tower.work.token / self.tower.layers, self.decoder.work.token / self.decoder.layers)
        most = max(a * layer[0] + b * layer[1] for a, b in stage_layers(self.cut, self.tower.layers))
        return Transfer("all-reduce", VALUE * most / self.tensor, self.replicas, stride=8)


def row_rates(row: Row, fitted: Fitted) -> Rates:
    """Of a row's device and network. Latency inside a node is in the launches."""
    rates = rates_of(row["device"], LINK, replace(fitted, host=0.0))
    gbit = row.get("network", TABLE["networks"][row["device"]])
    outer = replace(rates.outer, bytes_s=rates.outer.bytes_s * gbit / LINK_GBIT)
    return replace(rates, inner=Channel(rates.inner.bytes_s), outer=outer)


def days(row: Row, fitted: Fitted, steps: int) -> float:
    """Of a GPU, for all samples. steps: that are drawn."""
    rates = row_rates(row, fitted)
    packs = micro_batches(row["packs"])
    tower_name, decoder_name = row["model"].split(" + ")
    decoder = decoder_named(decoder_name)
    tower = tower_named(tower_name, decoder.hidden)
    seconds = layer_seconds(tower, decoder, row["tensor"], rates)
    cut = _cut(row, seconds, packs, tower.layers, decoder.layers)
    recomputed = tuple(cut if row["recomputed"] == "all" else row["recomputed"])
    chain = Chain(tower, decoder, row["tensor"], row["data"], cut, recomputed)
    number = max(4, MICRO_BATCHES * 4 // row["data"]) if row["group"] == "other models" else MICRO_BATCHES
    at = np.random.default_rng(0).integers(0, len(packs), (number, steps * row["data"]))
    drawn = packs.drawn(at)
    hop = VALUE * drawn.tokens * decoder.hidden / row["tensor"] / rates.outer.bytes_s
    ends = pipeline_seconds(*chain.passes(seconds, drawn), hop).reshape(steps, row["data"]).max(axis=1)
    step = ends.mean() + chain.gradients().seconds(rates) + TABLE["fixed_s"]
    taken = SHARE * len(packs) / (row["data"] * number)
    return float(taken * step * row["tensor"] * len(cut) * row["data"] / DAY)


def _cut(row: Row, seconds: Seconds, packs: MicroBatches, tower: int, decoder: int) -> tuple[int, ...]:
    if isinstance(row["cut"], Sequence) and not isinstance(row["cut"], str):
        return tuple(row["cut"])
    own, text = float(seconds.tower_layer(packs).mean()), float(seconds.text_layer(packs).mean())
    layers = [own] * tower + [text] * decoder
    layers[-1] += float(seconds.head * packs.tokens.mean())
    return tuple(least_slowest(layers, 4))


def ratio(row: Row, fitted: Fitted, steps: int) -> tuple[float, float]:
    """Days of the baseline by those of the balanced row: published and predicted."""
    before = row["before"]
    baseline = {**row, "packs": "random", "cut": before["cut"], "recomputed": "all"}
    return before["published"] / row["published"], days(baseline, fitted, steps) / days(row, fitted, steps)


def omnibal_rows(steps: int = 100) -> tuple[list[Row], list[Row]]:
    """Rows and scores. steps: that are drawn for a row; for ratios one by so many replicas of them."""
    factors = TABLE["fitted"]
    wanted = {
        factors[row["row"]]: (row["published"], partial(days, row, steps=steps))
        for row in TABLE["rows"]
        if row["row"] in factors
    }
    fitted, rows = fit(Fitted(), wanted, rounds=8), []
    for row in TABLE["rows"]:
        if "before" in row:
            published, predicted = ratio(row, fitted, max(10, steps // row["data"]))
            rows.append(compared(TABLE, {**row, "published": round(published, 3)}, predicted))
        else:
            rows.append(compared(TABLE, row, days(row, fitted, steps)))
    main = score(TABLE, rows, "chain of rows", TABLE["goal"], factors={"device": round(fitted.device, 3)})
    return rows, [main, *(score(TABLE, rows, group, None) for group in ("ratios", "other models", "hardware"))]
