"""The rows: what each is called, and the function that finds it.

Modules are imported where a row runs, so that one that cannot be imported costs its own rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HERE = "experiments.gpu_check"
SHARED, MAPPED = "shared_memory", "cuda_ipc"


@dataclass(frozen=True)
class Row:
    """`function` of `module`, called with the setting and these arguments, answers with fields, "ok" among them."""

    name: str
    module: str
    function: str = "check"
    arguments: tuple[Any, ...] = ()


def _parity(layout: str, dtype: str, recompute: str, carrier: str) -> Row:
    name = f"parity {layout} {dtype}, recompute {recompute}, {carrier}"
    return Row(name, f"{HERE}.parity", "check", (layout, dtype, recompute, carrier))


def _speed(part: str, samples: int, recompute: str) -> Row:
    name = f"speed {part}, {samples} samples, recompute {recompute}"
    return Row(name, f"{HERE}.speed", "check", (part, samples, recompute))


ROWS = (
    Row("environment", f"{HERE}.environment"),
    Row("kernel, head dim 80", f"{HERE}.kernels", "check_block", (80, False)),
    Row("kernel, head dim 128, grouped", f"{HERE}.kernels", "check_block", (128, False)),
    Row("kernel, head dim 128, grouped, causal", f"{HERE}.kernels", "check_block", (128, True)),
    Row("varlen, head dim 80", f"{HERE}.kernels", "check_varlen", (80, False)),
    Row("varlen, head dim 128, grouped, causal", f"{HERE}.kernels", "check_varlen", (128, True)),
    Row("patch embedding", f"{HERE}.patches"),
    _parity("1+1", "float32", "none", SHARED),
    _parity("1+1", "bfloat16", "light", SHARED),
    _parity("2+2", "float32", "none", SHARED),
    _parity("2+2", "bfloat16", "light", SHARED),
    _parity("2+2", "bfloat16", "full", MAPPED),
    _parity("1+1", "float32", "full", MAPPED),
    *(_speed("vision", 1, recompute) for recompute in ("none", "light")),
    *(_speed("text", samples, recompute) for samples in (1, 8) for recompute in ("none", "light")),
    Row("memory of vision", f"{HERE}.memory", "check", ("vision",)),
    Row("memory of text", f"{HERE}.memory", "check", ("text",)),
    Row("waits of the host", f"{HERE}.syncs"),
    _parity("1+1", "bfloat16", "full", SHARED),
    _parity("2+2", "float32", "full", MAPPED),
    _parity("ring+data", "bfloat16", "light", SHARED),
    _parity("data+fsdp", "float32", "none", SHARED),
)
