"""What ends a balanced row: the limits of tokens and of image tokens, of which one may never be reached."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from dhp.config.rules import FILLING
from dhp.config.schema import Config
from dhp.data.balance.packs import Loads
from dhp.data.sampling.sampler import BalanceSettings

LOOKED_AT, LOOKING_S = 256, 2.0  # samples, and seconds, by which rows are judged where not all lengths are known
_MORE = 1.05  # times as many rows by one limit as by the other: less is no matter


def balance_settings(config: Config) -> BalanceSettings:
    """How samples are put into rows."""
    data = config.data
    return BalanceSettings(
        data.balance,
        window=data.balance_window,
        long=data.long_tokens,
        isf_passes=data.isf_passes,
        fullest_first=bool(data.fullest_first),
        **asdict(data.limits),
    )


def samples_a_row(config: Config, tokens: int, pictures: int) -> int:
    """Of samples that are all alike. tokens, pictures: of each, all tokens and those of pictures. config: resolved."""
    usual = config.training.micro_batch_size
    if config.data.balance not in FILLING:
        return usual
    limits = balance_settings(config).limits(Loads(np.array([pictures]), np.array([tokens])), usual)
    return max(1, min(limits.text // tokens, limits.vision // pictures if pictures else limits.text))


def may_be_unreached(config: Config) -> bool:
    """Whether one limit of rows is set and the other is not."""
    limits = config.data.limits
    return config.data.balance in FILLING and (limits.text is None) != (limits.vision is None)


def unreached(config: Config, loads: Loads) -> list[str]:
    """A line for the limit that the configuration sets and rows of such samples never reach, because the other one is
    null and ends them first; nothing where there is none. config: resolved."""
    data, asked = config.data, balance_settings(config)
    if not may_be_unreached(config):
        return []
    set_, null = ("text", "vision") if data.limits.vision is None else ("vision", "text")
    limits = asked.limits(loads, config.training.micro_batch_size)
    totals = {name: float(getattr(loads, name).sum()) for name in (set_, null)}
    rows = {name: totals[name] / getattr(limits, name) for name in totals}
    if rows[null] <= _MORE * rows[set_]:
        return []
    most, kind = getattr(data.limits, set_), {"text": "tokens", "vision": "image tokens"}
    remedy = f"data.limits.{null}" + (f"={most}" if null == "vision" else "")
    return [
        f"rows hold {totals[set_] / rows[null]:,.0f} {kind[set_]} in the mean, not data.limits.{set_}={most}: "
        f"data.limits.{null} is null, which means {getattr(limits, null):,} {kind[null]} here, and ends them first. "
        f"Set {remedy}"
    ]
