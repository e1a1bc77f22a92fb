"""Data as they come, for what reads them without training."""

from __future__ import annotations

from dataclasses import replace

from dhp.config.data import DataConfig, LimitsConfig


def unbalanced(data: DataConfig) -> DataConfig:
    """The same data with as many samples in each row, and without what only balanced rows have."""
    return replace(data, balance="random", balance_window=None, long_tokens=None, limits=LimitsConfig())
