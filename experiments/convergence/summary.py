"""What is compared, as overrides of config.yaml, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

RANDOM = "random"
FORMS = (18, 16, 12, 10)  # bytes a parameter


def _form(nbytes: int) -> list[str]:
    keys = (f"{part}.{key}" for part in ("vision", "text") for key in ("dtype=bfloat16", f"state_bytes={nbytes}"))
    return ["data.balance=random", *keys]


METHODS = {
    RANDOM: ["data.balance=random"],
    "isf": ["data.balance=isf"],
    "balanced": ["data.balance=balanced"],
    "sequence": ["data.balance=random", "vision.parallelism=sequence", "vision.ulysses=2"],
    **{f"bytes_{nbytes}": _form(nbytes) for nbytes in FORMS},
}
BASES = {f"bytes_{nbytes}": f"bytes_{FORMS[0]}" for nbytes in FORMS}  # of others it is random batches


def base_of(method: str) -> str:
    """The method whose losses another one's are compared with."""
    return BASES.get(method, RANDOM)


Row = dict[str, Any]


def last_rows(rows: Sequence[Row], method: str) -> list[Row]:
    """The last row of each of a method's runs, by seed."""
    found = {row["seed"]: row for row in sorted(rows, key=lambda row: row["step"]) if row["method"] == method}
    return [found[seed] for seed in sorted(found)]


def methods_of(rows: Sequence[Row]) -> list[str]:
    """In the order in which they appear."""
    return list(dict.fromkeys(row["method"] for row in rows))


def summaries(rows: Sequence[Row]) -> list[Row]:
    """One for each method: held-out loss at the end, mean and standard deviation over seeds, and the difference to the
    base of the same seed, for each and in the mean, the latter also in units of the noise. Null: too few seeds, or no
    base.
    """
    return [_summary(method, rows) for method in methods_of(rows)]


def _noise(of_methods: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of one seed's loss from its method's mean, over several: a method alone has few seeds."""
    freedom = sum(len(losses) - 1 for losses in of_methods)
    squares = sum((loss - mean(losses)) ** 2 for losses in of_methods for loss in losses)
    return sqrt(squares / freedom) if freedom else None


def _summary(method: str, rows: Sequence[Row]) -> Row:
    ends, own = last_rows(rows, method), base_of(method)
    base = {row["seed"]: row["heldout_loss"] for row in last_rows(rows, own)}
    beside = [other for other in methods_of(rows) if base_of(other) == own]
    noise = _noise([[row["heldout_loss"] for row in last_rows(rows, other)] for other in beside])
    losses = [row["heldout_loss"] for row in ends]
    differences = [row["heldout_loss"] - base[row["seed"]] for row in ends if row["seed"] in base]
    difference = mean(differences) if differences else None
    return {
        "summary": method, "seeds": [row["seed"] for row in ends], "steps": [row["step"] for row in ends],
        "samples": [row["samples"] for row in ends], "train_loss": _rounded(mean(row["train_loss"] for row in ends)),
        "heldout_mean": _rounded(mean(losses)), "heldout_sd": _rounded(stdev(losses)) if len(losses) > 1 else None,
        "differences": [_rounded(value) for value in differences], "difference": _rounded(difference),
        "difference_in_sd": _rounded(difference / noise) if differences and noise else None,
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
