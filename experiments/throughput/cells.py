"""The cells of a published figure: layouts, lengths of pictures, and batches."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.config.layout import DEGREES

CELLS = Path(__file__).parents[1] / "published" / "data" / "ray_cells.json"
TEXT_TOKENS = 512  # of a sample, as published
BATCHES = (8, 4, 2, 1)  # samples of a step over all devices, the largest first
SIDES = {"1k": 32, "4k": 64, "9k": 96, "16k": 128, "25k": 160, "65k": 256}  # patches of a square picture's side
PATCH = 14  # pixels
SOURCE = "Ray sequence/tensor system, figure 2: Qwen2.5-VL-32B on 8 H100"
# Of vision and text: the degree that all devices are, and the ZeRO stage.
LAYOUTS = {
    "SP+TP": (("ulysses", 1), ("tensor", 0)),
    "TP": (("tensor", 0), ("tensor", 0)),
    "ZeRO-3": (("data", 3), ("data", 3)),
}
STATE_BYTES = 10  # a parameter of the decoder, the fewest that dhp has; the published code has 8, all in 16 bits
NAMES = {"ulysses": "sequence"}  # of parallelism, where it is not the degree's
ROWS = ["data.balance=random", "data.limits.text=null", "data.limits.vision=null"]  # of whole samples


@dataclass(frozen=True)
class Cell:
    """layout: one of LAYOUTS. size: one of SIDES. devices: of both parts together, which share them."""

    layout: str
    size: str
    devices: int

    @property
    def patches(self) -> int:
        """Of a picture, before they are merged."""
        return SIDES[self.size] ** 2

    def batches(self) -> tuple[int, ...]:
        """That may be tried. ZeRO-3 has a sample a rank, so that fewer are none."""
        return tuple(one for one in BATCHES if self.layout != "ZeRO-3" or one % self.devices == 0)

    def settings(self, batch: int) -> list[str]:
        """Of a run, beside model and data: layers are recomputed whole, as published; each picture as it is."""
        pixels, rows = (SIDES[self.size] * PATCH) ** 2, batch // self.devices if self.layout == "ZeRO-3" else batch
        found = [*ROWS, f"training.batch_size={batch}", f"training.micro_batch_size={rows}"]
        found += ["text.zero_engine=fsdp", f"text.state_bytes={STATE_BYTES}"]
        for part, (degree, stage) in zip(("vision", "text"), LAYOUTS[self.layout], strict=True):
            degrees = {one: self.devices if one == degree else 1 for one in DEGREES}
            own = {"parallelism": NAMES.get(degree, degree), "num_actors": self.devices, **degrees, "zero_stage": stage}
            found += [f"{part}.{key}={value}" for key, value in own.items()] + [f"{part}.recompute=full"]
        return [*found, f"data.min_pixels={pixels}", f"data.max_pixels={pixels}"]


def published(cell: Cell) -> dict[str, Any]:
    """What the figure has of it: patches a second, and the largest batch; None where it was out of memory."""
    rows = json.loads(CELLS.read_text(encoding="utf-8"))["rows"]
    (own,) = [row for row in rows if row["row"] == f"{cell.layout} {cell.size}"]
    return {"published": own["published"], "published_batch": own["batch"]}
