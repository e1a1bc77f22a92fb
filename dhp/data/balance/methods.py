"""The methods by name, all of one signature: loads, limits, replicas, seed → packs."""

from __future__ import annotations

from functools import partial

from dhp.data.balance.apart import keep_apart
from dhp.data.balance.balanced_stages import balanced_stages
from dhp.data.balance.fixed_count import device_group, length_group, random_batches
from dhp.data.balance.isf import isf
from dhp.data.balance.packs import Method
from dhp.data.balance.per_modality import per_modality

METHODS: dict[str, Method] = {
    "random": random_batches,
    "length_group": length_group,
    "device_group": device_group,
    "isf": isf,
    "balanced": per_modality,
    "balanced_stages": balanced_stages,
}
PADDED = ("random", "length_group", "device_group")  # as the trainers that use them do


def choose_method(name: str, long: int | None) -> Method:
    """The method of that name. long: tokens from which on samples are kept apart from shorter ones; None: none are."""
    return METHODS[name] if long is None else partial(keep_apart, METHODS[name], long)
