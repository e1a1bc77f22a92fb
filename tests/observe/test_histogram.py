"""Histograms as pictures: a panel a title, bars where the numbers are, round numbers on labelled axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp.observe.plots import COLOURS, HEIGHT, INK, LEFT, RIGHT, TOP, WIDTH, draw_histograms, ticks

BAR, OUTLINE = COLOURS


def drawn(path: Path, **panels: dict) -> np.ndarray:
    """uint8 [height, width, 3]"""
    draw_histograms({name: series for name, series in panels.items()}, "tokens a sample", "samples", path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def where(picture: np.ndarray, colour: tuple[int, int, int], panel: int = 0) -> np.ndarray:
    """Columns of the panel's plot that have the colour."""
    inside = picture[panel * HEIGHT + TOP : (panel + 1) * HEIGHT]
    return np.flatnonzero((inside == colour).all(axis=2).any(axis=0))


@pytest.mark.parametrize(
    ("most", "wanted", "expected"),
    [
        (134.0, 8, [0, 20, 40, 60, 80, 100, 120]),
        (1.0, 8, [0, 1]),
        (7.0, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (30_000.0, 8, [0, 5000, 10000, 15000, 20000, 25000, 30000]),
        (44.0, 5, [0, 10, 20, 30, 40]),
        (0.0, 5, [0]),
    ],
)
def test_ticks_are_round_numbers(most: float, wanted: int, expected: list[float]) -> None:
    assert ticks(most, wanted) == expected


def test_bars_stand_where_the_numbers_are(tmp_path: Path) -> None:
    """Half of the numbers are near 0 and half near 100: the middle is empty."""
    picture = drawn(tmp_path / "a.png", one={"all": np.repeat([1, 100], 50)})
    assert picture.shape == (HEIGHT, WIDTH, 3)
    columns = where(picture, BAR)
    third = (WIDTH - LEFT - RIGHT) / 3
    assert columns.min() == LEFT and columns.max() >= WIDTH - RIGHT - 2
    assert not ((columns > LEFT + third) & (columns < LEFT + 2 * third)).any()
    assert len(where(picture, OUTLINE)) == 0


def test_a_panel_a_dataset_and_an_outline_for_the_second_series(tmp_path: Path) -> None:
    both = {"all": np.full(9, 100), "of images": np.full(9, 20)}
    picture = drawn(tmp_path / "a.png", one=both, two={"all": np.arange(50)})
    assert picture.shape == (2 * HEIGHT, WIDTH, 3)
    outline = where(picture, OUTLINE)
    assert LEFT <= outline.min() and outline.max() < LEFT + 0.3 * (WIDTH - LEFT - RIGHT)  # ends after its last bin
    assert len(where(picture, OUTLINE, panel=1)) == 0 and len(where(picture, BAR, panel=1))


def test_both_axes_say_what_they_are(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "a.png", one={"all": np.arange(50)})
    dark = (picture < 128).all(axis=2)
    assert dark[HEIGHT - 24 : HEIGHT - 8, WIDTH // 3 : -WIDTH // 3].any()  # below the numbers
    assert dark[TOP:-80, 8:30].any()  # left of the numbers, upright
    assert (picture == INK).all(axis=2)[:, LEFT].any()


def test_one_long_sample_does_not_press_the_others_together(tmp_path: Path) -> None:
    many = np.append(np.random.default_rng(0).integers(1, 100, 5000), 10**6)
    columns = where(drawn(tmp_path / "a.png", one={"all": many}), BAR)
    assert len(columns) > 0.8 * (WIDTH - LEFT - RIGHT)


def test_lengths_that_are_all_alike_or_zero(tmp_path: Path) -> None:
    for number in (0, 1, 7):
        assert len(where(drawn(tmp_path / "a.png", one={"all": np.full(3, number)}), BAR))
