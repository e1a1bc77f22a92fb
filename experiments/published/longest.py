"""The longest sequences that LongVILA trained: whether their steps fit, by bytes; dhp's own plan for the longest."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.devices import GIB, find_device, find_link
from dhp.config.parts import DECODER
from dhp.models.family import VISION
from dhp.trainer.forecast.machine import machine_of
from dhp.trainer.forecast.samples import EqualSamples
from dhp.trainer.forecast.search import search
from experiments.published.longvila import DECODER as WHOLE
from experiments.published.longvila import PROFILES, TABLE, THOUSAND, step_seconds
from experiments.published.machine import FORMAT, NODE, VALUE, Fitted
from experiments.published.planned import Model, described
from experiments.published.tables import HELD_OUT, PLANNED, Row

LONGEST = TABLE["longest"]
GROUP = "longest"
FITS, OVER = "fits", "OOM"


def memory_bytes(row: Row) -> float:
    """Of a rank at its peak, the end of forward: states, two layers that are gathered, with gradients, and the head's
    weights, what layers keep of its tokens, and their logits."""
    room, counted, tokens = PROFILES["memory"], TABLE["memory"], row["thousands"] * THOUSAND / row["devices"]
    layer = WHOLE.work.token / WHOLE.layers
    states = counted["bytes"] * WHOLE.parameters / row["devices"]
    whole = VALUE * (2 * counted["whole_layers"] * layer + WHOLE.work.target)
    of_hidden, of_keys, of_inner = counted["kept"]
    kept = WHOLE.layers * (of_hidden * WHOLE.hidden + of_keys * WHOLE.keys + of_inner * WHOLE.inner)
    held = states + whole + tokens * (kept + counted["logits"] * WHOLE.words)
    return float(room["fragments"] * held + room["process_gb"] * 1e9)


def longest_rows(fitted: Fitted) -> list[Row]:
    """Of each published length, the bytes beside a device's, and seconds. fitted: of LongVILA's steps."""
    found = []
    for row in LONGEST["rows"]:
        free = find_device(row["device"]).memory.value - memory_bytes(row)
        sizes = {
            "memory_gib": round(memory_bytes(row) / GIB, 1),
            "free_gib": round(free / GIB, 1),
            "step_s": round(step_seconds(row, fitted), 2),
            "published_step_s": row["step_s"],
        }
        found.append(_compared(row, free >= 0, HELD_OUT) | sizes)
    return found


def longest_plan() -> Row:
    """The best layout of dhp's planner for the longest, by the data sheets' rates: text alone, everything learned."""
    asked = LONGEST["planned"]
    device, link = find_device(asked["device"]), find_link(asked["network"])
    machine = replace(machine_of(device, asked["devices"], NODE, link, (FORMAT,)), reserve=0.0)
    tokens = asked["thousands"] * THOUSAND
    forms = [f"{part}.state_bytes={asked['state_bytes']}" for part in (DECODER, VISION)]
    model = Model.of_data(asked["model"])
    space = model.space(machine, EqualSamples(tokens, 0, tokens), ["training.batch_size=1", *forms])
    found = search(space)
    best = next(iter(found.candidates), found.tight)
    row = _compared(asked, best is not None and best.fits, PLANNED)
    return row if best is None else row | described(best) | {"vision": "no pictures"}


def _compared(row: Row, fits: bool, role: str) -> Row:
    return {
        "source": LONGEST["source"],
        "group": GROUP,
        "row": row["row"],
        "published": FITS,
        "predicted": FITS if fits else OVER,
        "error": None,
        "role": role,
        "unit": LONGEST["unit"],
        "device": row["device"],
        "devices": row["devices"],
        "tokens_a_device": row["thousands"] * THOUSAND // row["devices"],
    }
