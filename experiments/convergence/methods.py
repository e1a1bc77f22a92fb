"""What is compared, as overrides of config.yaml, and with what."""

from __future__ import annotations

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
