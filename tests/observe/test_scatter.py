"""Points as a picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from dhp.observe.scatter import HEIGHT, WIDTH, Point, draw_points


def test_points_and_the_limit_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "points.png"
    draw_points([Point(40, 0.03, "1"), Point(90, 0.01, filled=False)], "title", "GiB", "s", (75, "limit"), path)
    with Image.open(path) as picture:
        assert picture.size == (WIDTH, HEIGHT)
        assert len(picture.getcolors(1 << 20) or []) > 4
