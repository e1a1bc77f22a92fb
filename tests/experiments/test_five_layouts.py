"""experiments.five_layouts: what its rows say, and their picture."""

from pathlib import Path

from PIL import Image

from experiments.five_layouts.__main__ import KILLED, PLAIN, draw
from experiments.five_layouts.training import LAYOUTS
from tests.helpers.figures import rows

ROWS = rows("five_layouts")


def test_every_layout_has_the_losses_of_the_plain_loop() -> None:
    assert [row["layout"] for row in ROWS] == [PLAIN, *LAYOUTS, KILLED]
    assert all(row["loss_error"] < 5e-5 and len(row["losses"]) == row["steps"] == 24 for row in ROWS)
    assert ROWS[-1]["killed"] == 8  # the step of the checkpoint that the other layout went on from


def test_the_picture_is_that_of_the_rows(tmp_path: Path) -> None:
    draw(ROWS, tmp_path / "curves.png")
    kept = Path(__file__).parents[2] / "docs" / "curves.png"
    with Image.open(tmp_path / "curves.png") as drawn, Image.open(kept) as shown:
        assert drawn.size == shown.size and drawn.tobytes() == shown.tobytes()
