"""The grid of a picture from its width and height, without its pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dhp.base.geometry import Grid

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

Size = tuple[int, int]  # (width, height) in pixels

_KEPT_SIZES = 1 << 16  # sizes whose grids stay in memory
_PROBES = ((50, 70), (640, 480), (3001, 1203))  # one is enlarged, one shrunk, by most bounds


class Grids:
    """Grids of pictures by their size, for one image processor.

    They come from the processor's own formula (`get_number_of_image_patches`) where it has one that holds; else the
    processor runs on a blank picture, once a size.
    """

    def __init__(
        self, processor: BaseImageProcessor, scaling: Mapping[str, Any], tokens: Callable[[Grid], int]
    ) -> None:
        """scaling: further arguments of the processor. tokens: how many tokens a picture of a grid has."""
        self._processor, self._tokens = processor, tokens
        bounds = scaling.get("size", {})  # the formula knows the two bounds by other names than the processor
        names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        self._bounds = {names[edge]: pixels for edge, pixels in bounds.items()}
        self._by_formula: bool | None = None  # None: not tried yet
        self._known: dict[Size, Grid] = {}

    def __call__(self, size: Size, run: Callable[[Size], Grid]) -> Grid:
        """A grid with as many tokens as the true one. run: the processor's own answer, by a blank picture of a size.

        Raises what `run` raises for a size that the processor does not take.
        """
        if self._by_formula is None:
            self._by_formula = self._formula_holds(run)
        if self._by_formula:
            try:
                return self._formula(size)
            except ValueError:
                return run(size)  # which raises it in the words of the true one
        grid = self._known.get(size)
        if grid is None:
            if len(self._known) >= _KEPT_SIZES:
                self._known.clear()
            grid = self._known[size] = run(size)
        return grid

    def _formula(self, size: Size) -> Grid:
        width, height = size
        return 1, 1, self._processor.get_number_of_image_patches(height, width, self._bounds)

    def _formula_holds(self, run: Callable[[Size], Grid]) -> bool:
        # Some processors count tiles under this name, some are set not to scale, and a family may count tokens by
        # the sides of a grid: wherever the formula is not the whole truth, it is not used.
        if not hasattr(self._processor, "get_number_of_image_patches"):
            return False
        try:
            return all(self._tokens(self._formula(size)) == self._tokens(run(size)) for size in _PROBES)
        except Exception:  # a formula of another kind may raise anything
            return False
