"""Published tables, and what a device does in a second, by dhp's tables and by factors that a fit changes.

Operations are those that dhp counts; a matrix has as many parameters as a token takes multiply-adds of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from transformers import LlamaConfig, Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from dhp.config.devices import find_device, find_link
from dhp.models.families.grid import grid_work
from dhp.models.flops import OPERATIONS, TextWork, VisionWork, text_work
from dhp.plan.count import rates
from dhp.plan.count.rates import Operations, Rates

FOLDER = Path(__file__).parent / "data"
FIT, HELD_OUT = ROLES = ("fit", "held_out")
Row = dict[str, Any]


@cache
def read_table(name: str) -> dict[str, Any]:
    """data/NAME.json."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def compared(table: Row, row: Row, predicted: float | None, **more: Any) -> Row:
    """A published row beside what the simulator has. error: by the published figure; None: out of memory, either."""
    published = row["published"]
    error = None if published is None or predicted is None else predicted / published - 1
    return {
        "source": table["source"], "group": row["group"], "row": row["row"],
        "published": "OOM" if published is None else published,
        "predicted": "OOM" if predicted is None else float(f"{predicted:.5g}"),
        "error": None if error is None else round(error, 4) + 0.0, "role": row["role"], "unit": table["unit"], **more,
    }  # fmt: skip


def errors(rows: Sequence[Row], group: str | None = None) -> list[float]:
    """Absolute errors of what is held out, of one group or of all."""
    own = [row for row in rows if row["role"] == HELD_OUT and group in (None, row["group"])]
    return [abs(row["error"]) for row in own if row["error"] is not None]


def score(table: Row, rows: Sequence[Row], group: str, goal: Row | None, **more: Any) -> Row:
    """The errors of a group's rows that are held out, beside the goal where there is one. fitted: numbers that rows
    set; chosen: constants that were chosen with the table in sight, which count as much."""
    found = errors(rows, group)
    reached = {"median": round(median(found), 4), "max": round(max(found), 4)}
    met = None if goal is None else all(reached[key] <= goal[key] for key in reached)
    fitted = sum(row["role"] == FIT and row["group"] == group for row in rows)
    chosen = [one["constant"] for one in table["chosen"]]
    counts = {"fitted": fitted, "chosen": len(chosen), "held_out": len(found)}
    line = {"source": table["source"], "score": group, **counts, **reached, "goal": goal, "met": met}
    return {**line, **more, "constants": chosen}


VALUE = 2  # bytes of a bf16 number
MERGED = 4  # patches that become one token
TILE, CLASS_TOKEN, TILE_PATCH = 1024, 1, 14  # patches of a tile, tokens beside them, a patch's side in pixels


@dataclass(frozen=True)
class Decoder:
    """layers; hidden, keys, inner: widths; words: of the vocabulary; work: multiply-adds as dhp counts them."""

    layers: int
    hidden: int
    keys: int
    inner: int
    words: int
    head_width: int
    work: TextWork

    @property
    def parameters(self) -> int:
        """Of layers, embedding and head."""
        return self.work.token + 2 * self.work.target

    def forward(self, tokens: float, squares: float) -> Operations:
        """Operations of all layers for so many tokens, whose samples' squared lengths sum up to `squares`."""
        return Operations(OPERATIONS * self.work.token * tokens, OPERATIONS * self.work.pair * squares / 2)

    def moved(self, per_token: tuple[float, float, float], tokens: float, ranks: int, norms_cut: bool) -> Operations:
        """Elementwise bytes of all layers on one of so many tensor ranks. norms_cut: norms are divided as well."""
        norms, rotary, gate = per_token
        cut = (rotary * (self.hidden + self.keys) + gate * self.inner) / ranks
        return Operations(elementwise=self.layers * tokens * (norms * self.hidden / (ranks if norms_cut else 1) + cut))


@dataclass(frozen=True)
class Tower:
    """layers, of which `full` attend to whole pictures; hidden, inner: widths; out: the decoder's; work: multiply-adds
    as dhp counts them."""

    layers: int
    full: int
    hidden: int
    inner: int
    out: int
    work: VisionWork

    @property
    def parameters(self) -> int:
        """Of patch embedding, layers and merger."""
        return self.work.patch + self.work.token + self.work.embedding

    def forward(self, patches: float, windows: float, pictures: float) -> Operations:
        """Operations of all layers. windows, pictures: sums of their squared lengths."""
        seen = self.work.window_pair * windows + self.work.segment_pair * pictures
        return Operations(OPERATIONS * self.work.token * patches, OPERATIONS * seen)

    def moved(self, per_token: tuple[float, float, float], patches: float, ranks: int) -> Operations:
        """Elementwise bytes of all layers on one of so many tensor ranks."""
        norms, rotary, gate = per_token
        cut = (rotary * self.hidden + gate * self.inner) / ranks
        return Operations(elementwise=self.layers * patches * (norms * self.hidden + cut))


@cache
def decoder_named(name: str) -> Decoder:
    """Of data/models.json."""
    models = read_table("models")
    if name in models["qwen2_5_vl"]:
        config = Qwen2_5_VLTextConfig(**models["qwen2_5_vl"][name]["text"])
    else:
        config = LlamaConfig(**models["decoders"][name])
    width = config.hidden_size // config.num_attention_heads
    return Decoder(
        config.num_hidden_layers, config.hidden_size, config.num_key_value_heads * width, config.intermediate_size,
        config.vocab_size, width, text_work(config),
    )  # fmt: skip


@cache
def tower_named(name: str, out: int = 0) -> Tower:
    """Of data/models.json. out: the decoder's width, where the tower's configuration does not have it."""
    models = read_table("models")
    if name in models["qwen2_5_vl"]:
        vision = Qwen2_5_VLVisionConfig(**models["qwen2_5_vl"][name]["vision"])
        full = len(vision.fullatt_block_indexes)
        work = grid_work(vision, gated=True, full=full)
        return Tower(vision.depth, full, vision.hidden_size, vision.intermediate_size, vision.out_hidden_size, work)
    layers, hidden, inner = (models["towers"][name][key] for key in ("layers", "hidden", "inner"))
    matrices = 4 * hidden * hidden + 2 * hidden * inner
    embedding = MERGED * hidden * out + out * out
    own = VisionWork(3 * TILE_PATCH**2 * hidden, layers * matrices, 0, layers * 2 * hidden, embedding, CLASS_TOKEN)
    return Tower(layers, layers, hidden, inner, out, own)


FORMAT, NODE = "bfloat16", 8
PASSES = 4  # forwards that a recomputed layer's launches are like: forward, again, and a backward of two
ROUNDS, STEP = 80, 0.8  # of a fit


@dataclass(frozen=True)
class Fitted:
    """Factors of time, 1 where nothing is fitted. device: all that it computes; attention: that alone, beside the
    former; host: launches; gathered: launches of layers whose weights are gathered (ZeRO-3), beside the former. hops:
    messages between nodes, of which a ring waits for one after another. fixed: seconds of a step."""

    device: float = 1.0
    attention: float = 1.0
    host: float = 1.0
    gathered: float = 1.0
    hops: float = 1.0
    fixed: float = 0.0


def rates_of(name: str, network: str, fitted: Fitted) -> Rates:
    """Of one device, with network cards of that link; host_s is a plain layer's."""
    host_s = fitted.host * read_table("profiles")["host_ms"] / 1e3 / PASSES
    plain = rates.rates_of(find_device(name), FORMAT, host_s, NODE, find_link(network))
    return replace(
        plain, products=plain.products / fitted.device, attention=plain.attention / fitted.device / fitted.attention,
        elementwise=plain.elementwise / fitted.device,
    )  # fmt: skip


def trained(forward: Operations, recompute: float = 1.0) -> Operations:
    """A forward, the recomputed share of it, and a backward, whose attention makes its weights once more."""
    again = 1 + recompute
    return replace(
        forward,
        products=(again + 2) * forward.products,
        attention=(again + read_table("profiles")["flash_backward"]) * forward.attention,
        elementwise=(again + 2) * forward.elementwise,
    )


def head_of(decoder: Decoder, rows: float, ranks: int) -> Operations:
    """The head's forward and backward with its loss, for so many tokens."""
    moved = read_table("profiles")["loss"] * rows * decoder.words / ranks
    return Operations(3 * OPERATIONS * decoder.work.target * rows / ranks, elementwise=moved)


def fit(start: Fitted, wanted: Mapping[str, tuple[float, Callable[[Fitted], float]]], rounds: int = ROUNDS) -> Fitted:
    """The factors with which each of these has its published seconds. wanted: by the factor that it fits."""
    for _ in range(rounds):
        for name, (published, seconds) in wanted.items():
            factor = getattr(start, name) * (published / seconds(start)) ** STEP
            start = replace(start, **{name: factor})
    return start
