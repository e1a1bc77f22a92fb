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
    if row.get("zero3"):
        return _zero3_days(row, tower, decoder, rates, steps)
    seconds = layer_seconds(tower, decoder, row["tensor"], rates)
    cut = _cut(row, seconds, packs, tower, decoder)
    recomputed = tuple(cut if row["recomputed"] == "all" else row["recomputed"])
    chain = Chain(tower, decoder, row["tensor"], row["data"], cut, recomputed)
    number = TABLE["micro_batches"]
    number = max(4, number * 4 // row["data"]) if row["group"] == "other models" else number
    at = np.random.default_rng(0).integers(0, len(packs), (number, steps * row["data"]))
    drawn = packs.drawn(at)
    hop = VALUE * drawn.tokens * decoder.hidden / row["tensor"] / rates.outer.bytes_s
    ends = pipeline_seconds(*chain.passes(seconds, drawn), hop).reshape(steps, row["data"]).max(axis=1)
    step = ends.mean() + chain.gradients().seconds(rates) + TABLE["fixed_s"]
    taken = SHARE * len(packs) / (row["data"] * number)
    return float(taken * step * row["tensor"] * len(cut) * row["data"] / DAY)


def _zero3_days(row: Row, tower: Tower, decoder: Decoder, rates: Rates, steps: int) -> float:
    """Of replicas that hold a share of all states each, gather weights twice and sum gradients once a micro-batch, and
    recompute everything."""
    seconds, packs, devices = layer_seconds(tower, decoder, 1, rates), micro_batches(row["packs"]), _devices()
    drawn = packs.drawn(np.random.default_rng(0).integers(0, len(packs), (steps, devices)))
    layers = tower.layers * seconds.tower_layer(drawn) + decoder.layers * seconds.text_layer(drawn)
    passes = 4 * layers + 3 * seconds.head * drawn.tokens
    sent = Transfer("all-gather", VALUE * (tower.parameters + decoder.parameters), devices, times=3).seconds(rates)
    step = np.maximum(passes.max(axis=1), sent).mean() + TABLE["fixed_s"]
    return float(SHARE * len(packs) / devices * step * devices / DAY)


def _devices() -> int:
    return int(TABLE["zero3"]["devices"])


def _cut(row: Row, seconds: Seconds, packs: MicroBatches, tower: Tower, decoder: Decoder) -> tuple[int, ...]:
    cut = TABLE["baseline"] if row["cut"] == "baseline" else row["cut"]
    stages = row.get("stages", 4)
    if isinstance(cut, Sequence) and not isinstance(cut, str) and (len(cut) == stages or row["cut"] != "baseline"):
        return tuple(cut)
    if cut != "least slowest":
        own, text, head = tower.work.token / tower.layers, decoder.work.token / decoder.layers, 0.0
    else:
        own, text = float(seconds.tower_layer(packs).mean()), float(seconds.text_layer(packs).mean())
        head = float(seconds.head * packs.tokens.mean())
    layers = [own] * tower.layers + [text] * decoder.layers
    layers[-1] += head
    return tuple(least_slowest(layers, stages))


def ratio_rows(row: Row, fitted: Fitted, steps: int) -> list[Row]:
    """The baseline's days by those of the balanced row, and both of them."""
    baseline = {**row, "packs": "random", "cut": "baseline", "stages": len(row["cut"]), "recomputed": "all"}
    published = row["before"]["published"], row["published"]
    predicted = days(baseline, fitted, steps), days(row, fitted, steps)
    found = [compared(TABLE, {**row, "published": round(published[0] / published[1], 3)}, predicted[0] / predicted[1])]
    for name, of_paper, own in zip(("baseline", "balanced"), published, predicted, strict=True):
        named = {"row": f"{name}, {row['row'].partition(', ')[2]}", "group": "days of ratios", "published": of_paper}
        found.append(compared(TABLE, {**row, **named}, own))
    return found


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
            rows.extend(ratio_rows(row, fitted, max(10, steps // row["data"])))
        else:
            rows.append(compared(TABLE, row, days(row, fitted, steps)))
    main = score(TABLE, rows, "chain of rows", TABLE["goal"], factors={"device": round(fitted.device, 3)})
    others = ("ratios", "days of ratios", "other models", "hardware", "ZeRO-3")
    return rows, [main, *(score(TABLE, rows, group, None) for group in others)]
