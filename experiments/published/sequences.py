"""Steps of sequences: the Ray system's cells of Qwen2.5-VL-32B on 8 GPUs, and LongVILA's decoder on 32 and 64."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from dhp.config.devices import GIB, find_device
from dhp.models.flops import OPERATIONS
from dhp.plan.count.rates import Operations, Rates, Transfer, soft_maximum, spend
from experiments.published.machine import (
    FIT,
    HELD_OUT,
    MERGED,
    PASSES,
    VALUE,
    Fitted,
    Row,
    compared,
    decoder_named,
    errors,
    fit,
    head_of,
    rates_of,
    read_table,
    score,
    tower_named,
    trained,
)

WINDOW = 64  # patches, of which pictures of these sizes have whole ones only
BATCHES = (8, 4, 2, 1)
NETWORK = "ib400"  # unused on one node
GROUP = "18 cells"

TABLE = read_table("ray_cells")
PROFILES = read_table("profiles")
DECODER, TOWER = decoder_named(TABLE["model"]), tower_named(TABLE["model"])
DEVICES: int = TABLE["devices"]


@dataclass(frozen=True)
class Batch:
    """What a rank's layers see: pictures of so many patches each, a sample a picture."""

    samples: int
    patches: int

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.patches // MERGED + int(TABLE["text_tokens"])

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def all_patches(self) -> int:
        return self.samples * self.patches


def seen_by_a_rank(layout: str, samples: int, patches: int) -> Batch:
    """Tensor and sequence ranks see all samples together, ranks of ZeRO-3 their own."""
    return Batch(samples if PROFILES["implementations"][layout]["tensor"] > 1 else samples // DEVICES, patches)


def text_pass(profile: Row, batch: Batch) -> Operations:
    """Decoder and head on one rank, everything recomputed."""
    ranks = profile["tensor"]
    forward = DECODER.forward(batch.tokens, batch.samples * batch.length**2) * (1 / ranks)
    forward += DECODER.moved(_bytes("text"), batch.tokens, ranks, norms_cut=False)
    sums = Transfer("all-reduce", VALUE * batch.tokens * DECODER.hidden, ranks)
    sent = (sums,) if profile["all_reduces"] else ()
    sums_of_layers = Operations(sent=sent) * (DECODER.layers * profile["all_reduces"])
    return trained(forward) + sums_of_layers + head_of(DECODER, batch.tokens, ranks)


def vision_pass(profile: Row, batch: Batch) -> Operations:
    """The tower on one rank, everything recomputed: cut by tensors, by sequence, or whole."""
    patches, how = batch.all_patches, profile["tower"]
    ranks = 1 if how == "whole" else DEVICES
    forward = TOWER.forward(patches, patches * WINDOW, patches * batch.patches) * (1 / ranks)
    moved = patches / ranks if how == "sequence" else patches
    forward += TOWER.moved(_bytes("vision"), moved, ranks if how == "tensor" else 1)
    merged_by = ranks if how == "tensor" else 1  # each sequence rank merges the whole picture
    merger = Operations(3 * OPERATIONS * TOWER.work.embedding * patches / MERGED / merged_by)
    embedding = Operations(2 * OPERATIONS * TOWER.work.patch * patches / ranks)
    return trained(forward) + merger + embedding + Operations(sent=tuple(_vision_sent(profile, patches)))


def _vision_sent(profile: Row, patches: int) -> Iterator[Transfer]:
    states = VALUE * patches * TOWER.hidden
    if profile["tower"] == "tensor":
        yield Transfer("all-reduce", states, DEVICES, times=TOWER.layers * profile["all_reduces"])
    if profile["tower"] == "sequence":
        # Queries, keys, values and outputs: forward, recomputed and backward.
        yield Transfer("all-to-all", states / DEVICES, DEVICES, times=TOWER.full * 4 * 3)
        yield Transfer("all-gather", VALUE * patches / MERGED * TOWER.out, DEVICES, times=2)
        yield Transfer("all-gather", states, DEVICES)
        yield Transfer("all-reduce", VALUE * TOWER.parameters, DEVICES)


def _bytes(part: str) -> tuple[float, float, float]:
    norms, rotary, gate = PROFILES["elementwise"]["eager"][part]
    return norms, rotary, gate


def step_seconds(layout: str, samples: int, patches: int, fitted: Fitted) -> float:
    """Of a whole step."""
    profile, rates = PROFILES["implementations"][layout], _rates(fitted)
    batch = seen_by_a_rank(layout, samples, patches)
    work = text_pass(profile, batch) + vision_pass(profile, batch)
    launched = PASSES * (DECODER.layers * profile["text_host"] + TOWER.layers * profile["vision_host"])
    parameters = DECODER.parameters + TOWER.parameters
    if profile["tensor"] == 1:  # weights for forward and for backward, and sums of gradients
        launched *= fitted.gathered
        work += Operations(hidden=(Transfer("all-gather", VALUE * parameters, DEVICES, times=3),))
    work, update = (
        work + Operations(launched=launched),
        Operations(elementwise=profile["update"] * parameters / DEVICES),
    )
    if profile["update_waits"]:
        return spend(work, rates).total + spend(update, rates).total + float(TABLE["fixed_s"])
    return spend(work + update, rates).total + float(TABLE["fixed_s"])


def part_seconds(layout: str, samples: int, patches: int, fitted: Fitted) -> dict[str, float]:
    """Of the tower and of the decoder alone, without sums of gradients and the update."""
    profile, batch = PROFILES["implementations"][layout], seen_by_a_rank(layout, samples, patches)
    tower = Operations(launched=PASSES * TOWER.layers * profile["vision_host"]) + vision_pass(profile, batch)
    decoder = Operations(launched=PASSES * DECODER.layers * profile["text_host"]) + text_pass(profile, batch)
    parts = {"tower_s": tower, "decoder_s": decoder}
    return {name: round(spend(work, _rates(fitted)).total, 2) for name, work in parts.items()}


def _rates(fitted: Fitted) -> Rates:
    return rates_of(TABLE["device"], NETWORK, fitted)


def memory_bytes(layout: str, samples: int, patches: int) -> float:
    """Of the fullest device, at its peak: states, inputs of recomputed layers, and the largest of what is short-lived:
    logits, or one layer's own activations."""
    profile, room = PROFILES["implementations"][layout], PROFILES["memory"]
    batch, tensor, how = seen_by_a_rank(layout, samples, patches), profile["tensor"], profile["tower"]
    cut = DEVICES if how == "sequence" else 1
    states = profile["bytes"] * DECODER.parameters / DEVICES
    states += TOWER.parameters * (profile["kept"] + (12 if profile["kept"] else profile["bytes"]) / DEVICES)
    inputs: float = VALUE * (DECODER.layers * batch.tokens * DECODER.hidden)
    inputs += VALUE * TOWER.layers * batch.all_patches / cut * TOWER.hidden
    (text_hidden, text_inner), (own_hidden, own_inner) = room["text_work"], room["vision_work"]
    short = [
        PROFILES["logits"] * batch.tokens * DECODER.words / tensor,
        batch.tokens * (text_hidden * DECODER.hidden + text_inner * DECODER.inner / tensor),
    ]
    if how != "sequence":  # there the tower's process and the decoder's take turns
        short.append(batch.all_patches * (own_hidden * TOWER.hidden + own_inner * TOWER.inner / tensor))
    handed = 4 * VALUE * batch.all_patches / MERGED * DECODER.hidden if how == "sequence" else 0.0
    held = states + profile["gathered"] + inputs + max(short) + handed
    return float(room["fragments"] * held + room["process_gb"] * 1e9 * profile["processes"])


def largest_batch(layout: str, patches: int) -> int | None:
    """That fits; None: none does. ZeRO-3 takes a sample a rank at least."""
    memory = find_device(TABLE["device"]).memory.value
    sizes = BATCHES if PROFILES["implementations"][layout]["tensor"] > 1 else (DEVICES,)
    return next((size for size in sizes if memory_bytes(layout, size, patches) <= memory), None)


def calibrated(factors: Mapping[str, str]) -> Fitted:
    """By published cells. factors: by a row's name, the factor that it fits."""
    wanted = {}
    for row in TABLE["rows"]:
        if row["row"] in factors:
            published = row["batch"] * row["patches"] / row["published"]
            wanted[factors[row["row"]]] = (published, lambda fitted, row=row: _seconds(row, fitted))
    return fit(Fitted(), wanted)


def _seconds(row: Row, fitted: Fitted) -> float:
    return step_seconds(row["layout"], row["batch"], row["patches"], fitted)


def cell_rows(fitted: Fitted, factors: Mapping[str, str]) -> list[Row]:
    """All 18 beside what is predicted, at the published batch; rows of `factors` have the role fit."""
    rows = []
    for row in TABLE["rows"]:
        batch = largest_batch(row["layout"], row["patches"])
        both = batch is not None and row["batch"] is not None
        predicted = row["batch"] * row["patches"] / _seconds(row, fitted) if both else None
        named = {**row, "group": GROUP, "role": FIT if row["row"] in factors else HELD_OUT}
        free = find_device(TABLE["device"]).memory.value - memory_bytes(row["layout"], batch or DEVICES, row["patches"])
        sizes = {key: row[key] for key in ("patches", "batch")}
        more = {"predicted_batch": batch, "free_gib": round(free / 2**30, 1)}
        if row["layout"] == "SP+TP":
            more |= part_seconds(row["layout"], row["batch"], row["patches"], fitted)
        rows.append(compared(TABLE, named, predicted, **sizes, **more))
    return rows


def choices() -> list[dict[str, Any]]:
    """Errors with each choice of the three cells that fit."""
    found, by_factor = [], TABLE["choices"]
    for cells in product(*by_factor.values()):
        factors = dict(zip(cells, by_factor, strict=True))
        off = errors(cell_rows(calibrated(factors), factors))
        found.append({"cells": list(cells), "median": median(off), "max": max(off)})
    return found


def ray_rows() -> tuple[list[Row], Row, Fitted]:
    """Rows, the score, and what was fitted."""
    fitted = calibrated(TABLE["fitted"])
    rows, all_choices = cell_rows(fitted, TABLE["fitted"]), choices()
    medians, maxima = ([one[key] for one in all_choices] for key in ("median", "max"))
    more = {
        "batches_right": sum(row["batch"] == row["predicted_batch"] for row in rows), "cells": len(rows),
        "choices": len(all_choices), "median_over_choices": round(median(medians), 4),
        "medians_of_choices": [round(min(medians), 4), round(max(medians), 4)],
        "max_of_choices": [round(min(maxima), 4), round(max(maxima), 4)],
        "factors": {key: round(getattr(fitted, key), 3) for key in ("device", "host", "gathered")},
    }  # fmt: skip
    return rows, score(TABLE, rows, GROUP, TABLE["goal"], **more), fitted


LONGVILA = read_table("longvila")
LLAMA = decoder_named(LONGVILA["model"])
NODE: int = LONGVILA["node"]
THOUSAND = 1024  # tokens
TWO_RANKS = 2  # neighbours of a ring, on two nodes


def degrees(row: Row) -> tuple[int, int, int]:
    """Ranks of Ulysses, of a ring, and of tensors."""
    devices, tensor = row["devices"], LONGVILA["tensor"]
    ways = {
        "ulysses": (devices, 1, 1), "ring": (1, devices, 1), "2d": (NODE, devices // NODE, 1),
        "tensor": (1, devices // tensor, tensor),
    }  # fmt: skip
    return ways[row["way"]]


def layers_work(row: Row, length: int) -> Operations:
    """Of one rank in all layers but attention's operations."""
    ulysses, ring, tensor = degrees(row)
    tokens, recompute = length / (ulysses * ring), float(tensor > 1)
    norms, rotary, gate = PROFILES["elementwise"]["fused" if tensor > 1 else "eager"]["text"]
    forward = LLAMA.forward(tokens, 0.0) * (1 / tensor)
    forward += LLAMA.moved((norms, rotary, gate), tokens, tensor, norms_cut=tensor > 1)
    sent = tuple(_layer_sent(ulysses, tensor, tokens))
    return trained(forward, recompute) + Operations(sent=sent) * LLAMA.layers


def _layer_sent(ulysses: int, tensor: int, tokens: float) -> Iterator[Transfer]:
    """Of a layer's forward and backward: queries, outputs, keys and values, of which each rank gets a head at least."""
    if ulysses > 1:
        keys = max(LLAMA.keys, ulysses * LLAMA.head_width)
        for width in (LLAMA.hidden, LLAMA.hidden, keys, keys):
            yield Transfer("all-to-all", VALUE * tokens * width, ulysses, times=2)
    if tensor > 1:
        yield Transfer("all-reduce", VALUE * tokens * LLAMA.hidden, tensor, times=4)


def attention_work(row: Row, length: int) -> Operations:
    """Of one rank in all layers; a ring sends keys and values beside it, and their gradients with them."""
    ulysses, ring, tensor = degrees(row)
    forward = LLAMA.forward(0.0, float(length) ** 2) * (1 / row["devices"])
    width = max(LLAMA.head_width, LLAMA.keys / max(ulysses, tensor))
    nbytes = 2 * VALUE * length / ring * width
    hops = (
        Transfer("send", nbytes, TWO_RANKS, NODE, times=LLAMA.layers * (ring - 1)),
        Transfer("send", 3 * nbytes, TWO_RANKS, NODE, times=LLAMA.layers * ring),
    )
    return replace(trained(forward, float(tensor > 1)), hidden=hops if ring > 1 else ())


def weights_sent(row: Row) -> Transfer:
    """What goes on beside the passes: weights and gradients of FSDP, or sums of gradients."""
    devices, tensor = row["devices"], degrees(row)[2]
    if row["fsdp"]:
        return Transfer("all-gather", VALUE * LLAMA.parameters, devices, times=3)
    return Transfer("all-reduce", VALUE * LLAMA.parameters / tensor, devices // tensor, tensor)


def sequence_seconds(row: Row, fitted: Fitted) -> float:
    """Of a step with one sequence."""
    length = row["thousands"] * THOUSAND
    rates = rates_of(row.get("device", LONGVILA["device"]), row.get("network", LONGVILA["network"]), fitted)
    ulysses, ring, tensor = degrees(row)
    rows = length / (ulysses * ring)
    work = layers_work(row, length) + head_of(LLAMA, rows, tensor)
    around = replace(rates, outer=replace(rates.outer, bytes_s=rates.outer.bytes_s / fitted.hops))
    device = spend(work, rates).total + spend(attention_work(row, length), around).total
    launched = LLAMA.layers * (PASSES - 1 + float(tensor > 1)) * (1 + 0.05 * ring)
    host = spend(Operations(launched=launched), rates).total
    beside = weights_sent(row).seconds(rates)
    return soft_maximum((device, beside, host)) + fitted.fixed


def longvila_rows(start: Fitted) -> tuple[list[Row], list[Row], Fitted]:
    """Rows, scores, and what was fitted. start: of the Ray system's cells."""
    start = replace(start, fixed=float(LONGVILA["fixed_s"]))
    factors = LONGVILA["fitted"]
    fitting = [row for row in LONGVILA["rows"] if row["row"] in factors]
    steps = {factors[row["row"]]: row for row in fitting if factors[row["row"]] != "hops"}
    fitted = fit(start, {name: _wanted(row) for name, row in steps.items()})
    of_rings = {_ring(row): fit(fitted, {"hops": _wanted(row)}) for row in fitting if factors[row["row"]] == "hops"}
    rows = []
    for row in LONGVILA["rows"]:
        of_row = of_rings.get(_ring(row), fitted)
        hop = {"hop_gb_s": round(_hop_gb_s(row, of_row), 1)} if row["way"] == "ring" else {}
        rows.append(compared(LONGVILA, row, sequence_seconds(row, of_row), **hop))
    names = {"attention": round(fitted.attention, 3), "fixed_s": round(fitted.fixed, 3)}
    main = score(LONGVILA, rows, "sequence parallel", LONGVILA["goal"], factors=names)
    others = [score(LONGVILA, rows, group, None) for group in ("Megatron CP+TP", "with ZeRO-3", "Megatron CP", "ring")]
    return rows, [main, *others], fitted


def _wanted(row: Row) -> tuple[float, Callable[[Fitted], float]]:
    return row["published"], partial(sequence_seconds, row)


def _ring(row: Row) -> tuple[str, int | None]:
    """Whose hops take alike: Megatron's in all rows, LongVILA's own by the number of devices."""
    return row["group"], row["devices"] if row["group"] == "ring" else None


def _hop_gb_s(row: Row, fitted: Fitted) -> float:
    return rates_of(LONGVILA["device"], LONGVILA["network"], fitted).outer.bytes_s / fitted.hops / 1e9


LONGEST = LONGVILA["longest"]
FITS, OVER = "fits", "OOM"


def sequence_bytes(row: Row) -> float:
    """Of a rank at its peak, the end of forward: states, two layers that are gathered, with gradients, and the head's
    weights, what layers keep of its tokens, and their logits."""
    room, counted, tokens = PROFILES["memory"], LONGVILA["memory"], row["thousands"] * THOUSAND / row["devices"]
    layer = LLAMA.work.token / LLAMA.layers
    states = counted["bytes"] * LLAMA.parameters / row["devices"]
    whole = VALUE * (2 * counted["whole_layers"] * layer + LLAMA.work.target)
    of_hidden, of_keys, of_inner = counted["kept"]
    kept = LLAMA.layers * (of_hidden * LLAMA.hidden + of_keys * LLAMA.keys + of_inner * LLAMA.inner)
    held = states + whole + tokens * (kept + counted["logits"] * LLAMA.words)
    return float(room["fragments"] * held + room["process_gb"] * 1e9)


def longest_rows(fitted: Fitted) -> list[Row]:
    """Of each published length, the bytes beside a device's, and seconds. fitted: of LongVILA's steps."""
    found = []
    for row in LONGEST["rows"]:
        free = find_device(row["device"]).memory.value - sequence_bytes(row)
        sizes = {
            "memory_gib": round(sequence_bytes(row) / GIB, 1), "free_gib": round(free / GIB, 1),
            "step_s": round(sequence_seconds(row, fitted), 2), "published_step_s": row["step_s"],
        }  # fmt: skip
        found.append(_longest_row(row, free >= 0) | sizes)
    return found


def _longest_row(row: Row, fits: bool) -> Row:
    return {
        "source": LONGEST["source"], "group": "longest", "row": row["row"], "published": row.get("published", FITS),
        "predicted": FITS if fits else OVER, "error": None, "role": HELD_OUT, "unit": LONGEST["unit"],
        "device": row["device"], "devices": row["devices"],
        "tokens_a_device": row["thousands"] * THOUSAND // row["devices"],
    }  # fmt: skip
