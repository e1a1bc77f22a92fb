"""What an epoch is made of: shares of datasets, and of what samples hold."""

from __future__ import annotations

import numpy as np

from dhp.cli.inspect_data import content_table
from dhp.data.sample.lengths import LENGTH_COLUMNS


def lengths(*samples: tuple[int, int, int]) -> np.ndarray:
    """Of samples of so many tokens, pictures and tokens of sound."""
    columns = np.zeros(len(samples), LENGTH_COLUMNS)
    for at, (text, pictures, sound) in enumerate(samples):
        columns[at]["text"], columns[at]["pictures"], columns[at]["sound"] = text, pictures, sound
    return columns


def test_shares_are_of_usable_samples_and_their_tokens() -> None:
    photos = lengths((10, 1, 0), (20, 1, 0), (0, 0, 0), (30, 2, 0), (15, 7, 5))
    chat = lengths((925, 0, 0))
    table = content_table({"photos": photos, "chat": chat, "broken": lengths((0, 0, 0))})
    shown = {line.split()[0]: line.split()[1:] for line in table[2:5]}
    assert shown["photos"] == ["4", "80.0%", "75", "7.5%", "0.0%", "50.0%", "25.0%", "25.0%", "25.0%"]
    assert shown["chat"] == ["1", "20.0%", "925", "92.5%", "100.0%", "0.0%", "0.0%", "0.0%", "0.0%"]
    assert shown["all"] == ["5", "100.0%", "1,000", "100.0%", "20.0%", "40.0%", "20.0%", "20.0%", "20.0%"]
    assert not any("broken" in line for line in table)


def test_one_dataset_needs_no_sum() -> None:
    assert not any(line.startswith("all") for line in content_table({"chat": lengths((5, 0, 0))}))


def test_a_dataset_may_be_named_all() -> None:
    table = content_table({"all": lengths((5, 1, 0)), "chat": lengths((15, 0, 0))})
    assert [line.split()[:5] for line in table[2:5]] == [
        ["all", "1", "50.0%", "5", "25.0%"],
        ["chat", "1", "50.0%", "15", "75.0%"],
        ["all", "2", "100.0%", "20", "100.0%"],
    ]
