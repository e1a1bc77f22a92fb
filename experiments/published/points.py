"""Rates that others published of single models, beside those that rates of a device give."""

from dataclasses import replace

from transformers import Qwen3Config, Qwen3MoeConfig

from dhp.models.flops import OPERATIONS, find_experts, text_work
from dhp.plan.count.rates import Operations, Transfer, spend
from experiments.published.machine import (
    VALUE,
    Decoder,
    Fitted,
    Row,
    compared,
    head_of,
    rates_of,
    read_table,
    score,
    trained,
)

TABLE = read_table("points")
PROFILE = read_table("profiles")["elementwise"]["fused"]["text"]
NODE, NETWORK = 8, "ib400"
MOVES = 4  # times that a visit's state is read and written on its way to an expert and back


def point_rows() -> tuple[list[Row], list[Row]]:
    """Rows, and their score."""
    rows = [compared(TABLE, row, tflops(row)) for row in TABLE["rows"]]
    return rows, [score(TABLE, rows, "points", None)]


def tflops(row: Row) -> float:
    """Of one device, by the operations of a forward and a backward of a row."""
    given, tokens = row["text"], TABLE["tokens"]
    config = (Qwen3MoeConfig if "num_experts" in given else Qwen3Config)(**given)
    experts, keys = find_experts(config), config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size if experts is None else experts.visits * experts.width
    layers, hidden = config.num_hidden_layers, config.hidden_size
    work = text_work(config)
    decoder = Decoder(layers, hidden, keys, inner, config.vocab_size, config.head_dim, work)
    forward = decoder.forward(tokens, row["share"] * tokens**2) + decoder.moved(tuple(PROFILE), tokens, 1, False)
    if experts is not None:
        visits = layers * experts.visits * tokens * hidden * VALUE
        sent = (Transfer("all-to-all", visits, NODE, times=2),)
        forward += Operations(elementwise=2 * MOVES * visits, sent=sent)
    done = replace(trained(forward, 0.0), sent=forward.sent * 2) + head_of(decoder, tokens, 1)
    counted = 3 * (forward.products + forward.attention + OPERATIONS * work.target * tokens)
    return counted / spend(done, rates_of(row["device"], NETWORK, Fitted())).total / 1e12
