"""Unbalanced data, for commands that read them without training."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.data import DataConfig, LimitsConfig


def unbalanced(data: DataConfig) -> DataConfig:
    """The data settings with equally many samples in each row, and without keys of balanced rows."""
    balancing = ("balance", "balance_window", "long_tokens", "isf_passes", "group_window")
    return replace(data, limits=LimitsConfig(), **{key: getattr(DataConfig, key) for key in balancing})
