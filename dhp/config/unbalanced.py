"""Data as they come, for what reads them without training."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.data import DataConfig, LimitsConfig


def unbalanced(data: DataConfig) -> DataConfig:
    """The same data with as many samples in each row, and without what only balanced rows have."""
    balancing = ("balance", "balance_window", "long_tokens", "isf_passes", "group_window")
    return replace(data, limits=LimitsConfig(), **{key: getattr(DataConfig, key) for key in balancing})
