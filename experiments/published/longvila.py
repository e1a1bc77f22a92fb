"""A step of LongVILA's decoder on sequences that 32 and 64 devices divide: by Ulysses, a ring, both, or Megatron; and
whether its longest sequences fit, by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dhp.config.devices import GIB, find_device
from dhp.planner.rates import Sent, Work, soft_maximum, spend
from experiments.published.machine import (
    HELD_OUT,
    PASSES,
    UNEXPLAINED,
    VALUE,
    Fitted,
    Row,
    compared,
    decoder_named,
    fit,
    head_of,
    rates_of,
    read_table,
    score,
    trained,
)

TABLE = read_table("longvila")
PROFILES = read_table("profiles")
DECODER = decoder_named(TABLE["model"])
NODE: int = TABLE["node"]
THOUSAND = 1024  # tokens
TWO_RANKS = 2  # neighbours of a ring, on two nodes


def degrees(row: Row) -> tuple[int, int, int]:
    """Ranks of Ulysses, of a ring, and of tensors."""
    devices, tensor = row["devices"], TABLE["tensor"]
    ways = {
        "ulysses": (devices, 1, 1), "ring": (1, devices, 1), "2d": (NODE, devices // NODE, 1),
        "tensor": (1, devices // tensor, tensor),
    }  # fmt: skip
    return ways[row["way"]]


def layers_work(row: Row, length: int) -> Work:
    """Of one rank in all layers but attention's operations."""
    ulysses, ring, tensor = degrees(row)
    tokens, recompute = length / (ulysses * ring), float(tensor > 1)
    norms, rotary, gate = PROFILES["elementwise"]["fused" if tensor > 1 else "eager"]["text"]
    forward = DECODER.forward(tokens, 0.0) * (1 / tensor)
    forward += DECODER.moved((norms, rotary, gate), tokens, tensor, norms_cut=tensor > 1)
    sent = tuple(_layer_sent(ulysses, tensor, tokens))
    return trained(forward, recompute) + Work(sent=sent) * DECODER.layers


def _layer_sent(ulysses: int, tensor: int, tokens: float) -> Iterator[Sent]:
    """Of a layer's forward and backward: queries, outputs, keys and values, of which each rank gets a head at least."""
    if ulysses > 1:
        keys = max(DECODER.keys, ulysses * DECODER.head_width)
        for width in (DECODER.hidden, DECODER.hidden, keys, keys):
            yield Sent("all-to-all", VALUE * tokens * width, ulysses, times=2)
    if tensor > 1:
        yield Sent("all-reduce", VALUE * tokens * DECODER.hidden, tensor, times=4)


def attention_work(row: Row, length: int) -> Work:
    """Of one rank in all layers; a ring sends keys and values beside it, and their gradients with them."""
    ulysses, ring, tensor = degrees(row)
    forward = DECODER.forward(0.0, float(length) ** 2) * (1 / row["devices"])
    width = max(DECODER.head_width, DECODER.keys / max(ulysses, tensor))
    nbytes = 2 * VALUE * length / ring * width
    hops = (
        Sent("send", nbytes, TWO_RANKS, NODE, times=DECODER.layers * (ring - 1)),
        Sent("send", 3 * nbytes, TWO_RANKS, NODE, times=DECODER.layers * ring),
    )
    return replace(trained(forward, float(tensor > 1)), hidden=hops if ring > 1 else ())


def weights_sent(row: Row) -> Sent:
    """What goes on beside the passes: weights and gradients of FSDP, or sums of gradients."""
    devices, tensor = row["devices"], degrees(row)[2]
    if row["fsdp"]:
        return Sent("all-gather", VALUE * DECODER.parameters, devices, times=3)
    return Sent("all-reduce", VALUE * DECODER.parameters / tensor, devices // tensor, tensor)


def step_seconds(row: Row, fitted: Fitted) -> float:
    """Of a step with one sequence."""
    length = row["thousands"] * THOUSAND
    rates = rates_of(row.get("device", TABLE["device"]), row.get("network", TABLE["network"]), fitted)
    ulysses, ring, tensor = degrees(row)
    rows = length / (ulysses * ring)
    work = layers_work(row, length) + head_of(DECODER, rows, tensor)
    device = spend(work, rates).total + spend(attention_work(row, length), rates).total
    launched = DECODER.layers * (PASSES - 1 + float(tensor > 1)) * (1 + 0.05 * ring)
    host = spend(Work(launched=launched), rates).total
    beside = weights_sent(row).seconds(rates)
    return soft_maximum((device, beside, host)) + fitted.fixed


def longvila_rows(start: Fitted) -> tuple[list[Row], list[Row], Fitted]:
    """Rows, scores, and what was fitted. start: of the Ray system's cells."""
    start = replace(start, fixed=float(TABLE["fixed_s"]))
    factors = TABLE["fitted"]
    wanted = {
        factors[row["row"]]: (row["published"], partial(step_seconds, row))
        for row in TABLE["rows"]
        if row["row"] in factors
    }
    fitted, rows = fit(start, wanted), []
    for row in TABLE["rows"]:
        why = {"why": TABLE["why_unexplained"][row["group"]]} if row["role"] == UNEXPLAINED else {}
        rows.append(compared(TABLE, row, step_seconds(row, fitted), **why))
    names = {"attention": round(fitted.attention, 3), "fixed_s": round(fitted.fixed, 3)}
    main = score(TABLE, rows, "sequence parallel", TABLE["goal"], factors=names)
    others = [score(TABLE, rows, group, None) for group in ("Megatron CP+TP", "with ZeRO-3")]
    return rows, [main, *others], fitted


LONGEST = TABLE["longest"]
FITS, OVER = "fits", "OOM"


def memory_bytes(row: Row) -> float:
    """Of a rank at its peak, the end of forward: states, two layers that are gathered, with gradients, and the head's
    weights, what layers keep of its tokens, and their logits."""
    room, counted, tokens = PROFILES["memory"], TABLE["memory"], row["thousands"] * THOUSAND / row["devices"]
    layer = DECODER.work.token / DECODER.layers
    states = counted["bytes"] * DECODER.parameters / row["devices"]
    whole = VALUE * (2 * counted["whole_layers"] * layer + DECODER.work.target)
    of_hidden, of_keys, of_inner = counted["kept"]
    kept = DECODER.layers * (of_hidden * DECODER.hidden + of_keys * DECODER.keys + of_inner * DECODER.inner)
    held = states + whole + tokens * (kept + counted["logits"] * DECODER.words)
    return float(room["fragments"] * held + room["process_gb"] * 1e9)


def longest_rows(fitted: Fitted) -> list[Row]:
    """Of each published length, the bytes beside a device's, and seconds. fitted: of LongVILA's steps."""
    found = []
    for row in LONGEST["rows"]:
        free = find_device(row["device"]).memory.value - memory_bytes(row)
        sizes = {
            "memory_gib": round(memory_bytes(row) / GIB, 1), "free_gib": round(free / GIB, 1),
            "step_s": round(step_seconds(row, fitted), 2), "published_step_s": row["step_s"],
        }  # fmt: skip
        found.append(_longest_row(row, free >= 0) | sizes)
    return found


def _longest_row(row: Row, fits: bool) -> Row:
    return {
        "source": LONGEST["source"], "group": "longest", "row": row["row"], "published": FITS,
        "predicted": FITS if fits else OVER, "error": None, "role": HELD_OUT, "unit": LONGEST["unit"],
        "device": row["device"], "devices": row["devices"],
        "tokens_a_device": row["thousands"] * THOUSAND // row["devices"],
    }  # fmt: skip
