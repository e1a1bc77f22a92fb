"""Histograms, tables of shares and points as pictures: what is where."""

from pathlib import Path

import numpy as np
from PIL import Image

from dhp.report.charts import BOTTOM, HEIGHT, INK, LEFT, PALETTE, RIGHT, TOP, WIDTH, Label
from dhp.report.plots import CELL, MAP_LEFT, Point, histograms, points_on_axes, share_table

SCALE = 2  # a PNG is twice as large
ROUND = 2  # pixels that a line may be off


def drawn(folder: Path, **panels: dict) -> np.ndarray:
    """uint8 [height, width, 3]"""
    path = histograms("lengths", panels, "tokens a sample", "samples").write_png(folder)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def where(picture: np.ndarray, colour: int, panel: int = 0) -> np.ndarray:
    """Columns of the panel's plot that have the colour of the palette."""
    value = tuple(int(PALETTE[colour][at : at + 2], 16) for at in (1, 3, 5))
    inside = picture[(panel * HEIGHT + TOP + 20) * SCALE : ((panel + 1) * HEIGHT - BOTTOM) * SCALE]
    return np.flatnonzero((inside == value).all(axis=2).any(axis=0)) / SCALE


def test_bars_stand_where_the_numbers_are(tmp_path: Path) -> None:
    """Half of the numbers are near 0 and half near 100: the middle is empty."""
    picture = drawn(tmp_path, one={"all": np.repeat([1, 100], 50)})
    assert picture.shape == (SCALE * HEIGHT, SCALE * WIDTH, 3)
    columns = where(picture, 0)
    third = (WIDTH - LEFT - RIGHT) / 3
    assert abs(columns.min() - LEFT) <= ROUND and columns.max() >= WIDTH - RIGHT - ROUND
    assert not ((columns > LEFT + third) & (columns < LEFT + 2 * third)).any()
    assert len(where(picture, 1)) == 0


def test_a_panel_a_dataset_and_an_outline_for_the_second_series(tmp_path: Path) -> None:
    both = {"all": np.full(9, 100), "of images": np.full(9, 20)}
    picture = drawn(tmp_path, one=both, two={"all": np.arange(50)})
    assert picture.shape == (2 * SCALE * HEIGHT, SCALE * WIDTH, 3)
    outline = where(picture, 1)
    assert outline.min() >= LEFT - ROUND and outline.max() < LEFT + 0.3 * (WIDTH - LEFT - RIGHT)  # ends behind its bin
    assert len(where(picture, 1, panel=1)) == 0 and len(where(picture, 0, panel=1))


def test_axes_say_what_they_are_and_series_their_means() -> None:
    shapes = histograms("x", {"one": {"all": np.arange(50)}}, "tokens a sample", "samples").shapes
    texts = [one.text for one in shapes if isinstance(one, Label)]
    assert {"one", "samples", "all: mean 24, longest 49"} <= set(texts)
    assert any(one.startswith("tokens a sample") for one in texts)
    assert {"0", "10", "20", "30", "40"} <= set(texts)


def test_one_long_sample_does_not_press_the_others_together(tmp_path: Path) -> None:
    many = np.append(np.random.default_rng(0).integers(1, 100, 5000), 10**6)
    columns = where(drawn(tmp_path, one={"all": many}), 0)
    assert len(columns) / SCALE > 0.8 * (WIDTH - LEFT - RIGHT)
    shapes = histograms("x", {"one": {"all": many}}, "tokens", "samples").shapes
    assert any(isinstance(one, Label) and "the last bin holds all from" in one.text for one in shapes)


def test_lengths_that_are_all_alike_or_zero(tmp_path: Path) -> None:
    for number in (0, 1, 7):
        assert len(where(drawn(tmp_path, one={"all": np.full(3, number)}), 0))


def test_cells_have_the_colours_of_their_shares(tmp_path: Path) -> None:
    table = share_table("m", "found", [[0.0, 1.0], [0.5, 0.75]], ["8", "16"], ["0", "1"], "frames, depth")
    with Image.open(table.write_png(tmp_path)) as opened:
        image = opened.convert("RGB")
    corner = lambda row, column: image.getpixel(
        (SCALE * (MAP_LEFT + CELL[0] * column + 6), SCALE * (TOP + CELL[1] * row + 6))
    )
    red, green = corner(0, 0), corner(0, 1)
    assert red[0] > red[1] + 60 and green[1] > green[0] + 60
    assert corner(1, 0) == (255, 255, 255)
    assert green[0] < corner(1, 1)[0] < 255


def test_points_and_the_limit_are_drawn(tmp_path: Path) -> None:
    points = [Point(40, 0.03, "1"), Point(90, 0.01, filled=False)]
    path = points_on_axes("points", "title", points, "GiB", "s", (75, "limit")).write_png(tmp_path)
    with Image.open(path) as picture:
        assert picture.size == (SCALE * WIDTH, 2 * SCALE * HEIGHT)
        colours = {f"#{bytes(one[1][:3]).hex()}" for one in picture.convert("RGB").getcolors(1 << 20) or []}
    assert {PALETTE[0], PALETTE[5], PALETTE[6], PALETTE[INK]} <= colours
