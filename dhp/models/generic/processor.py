"""A family's own processor: its inputs for a picture, and the text in the prompt for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.base.errors import ModelError
from dhp.base.geometry import Grid, ProcessorOutput
from dhp.models.generic.contract import Contract
from dhp.models.generic.forms import arrays_of, pack
from dhp.models.generic.library import LibraryProcessor
from dhp.models.generic.pictures import patch_shape
from dhp.models.generic.rows import kinds_for, placeholder, positions
from dhp.models.grid.processor import put_together
from dhp.models.processor import Processor


class ContractProcessor(Processor):
    """Images only. The encoder's arguments determine which outputs of the image processor it takes."""

    def __init__(self, config: Any, contract: Contract, model_name: str):
        token = placeholder(config)
        if token is None:
            raise ModelError(
                f"model_type {config.model_type!r}: its configuration names no image_token_id, so that nobody knows "
                "where pictures go. Add image_token_id to the model's config.json"
            )
        self.config, self.image_token_id = config, token
        self._contract, self._model_name = contract, model_name
        self.patch_dim = contract.values

    @cached_property
    def _library(self) -> LibraryProcessor:
        return LibraryProcessor(self._model_name, self.config)

    def load(self) -> None:
        """See `Processor`. Raises ModelError where the family's processor cannot be used."""
        self._library.load()

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ProcessorOutput]:
        written = self._library.written(output)
        taken = {name: np.asarray(output[name]) for name in self._contract.arguments if name in output}
        return pack(taken, written.count(self._library.token), self._contract.values, written)

    def frames(self, pixels: np.ndarray, grid: Grid | ProcessorOutput, moving: bool = False) -> np.ndarray | None:
        """See `Processor`: whole tiles, or patches as most families order them."""
        if not isinstance(grid, ProcessorOutput):
            return None
        name, shape = grid.pixels[0]
        if self.from_patches(grid):
            return self._put_together(pixels.reshape(-1)[: int(np.prod(shape))], grid)
        if len(shape) < 4 or shape[-3] not in (1, 3):
            return None
        tiles = pixels.reshape(-1)[: int(np.prod(shape))].reshape(-1, *shape[-3:])
        return tiles.transpose(0, 2, 3, 1)

    def _put_together(self, pixels: np.ndarray, form: ProcessorOutput) -> np.ndarray | None:
        (whole,) = arrays_of(form)["image_grid_thw"].tolist()
        channels, side, merge = patch_shape(self.config)
        frames, rest = divmod(pixels.size // prod(whole), channels * side**2)
        if rest or whole[1] % merge or whole[2] % merge:
            return None
        return put_together(pixels, tuple(whole), merge, channels, frames, side)[:1]

    def from_patches(self, grid: Grid | ProcessorOutput) -> bool:
        """See `Processor`."""
        return isinstance(grid, ProcessorOutput) and any(name == "image_grid_thw" for name, *_ in grid.arrays)

    def image_tokens(self, grid: Grid | ProcessorOutput) -> int:
        if not isinstance(grid, ProcessorOutput):
            raise TypeError(f"a picture of {self.config.model_type} is described by its form, not by a grid {grid}")
        return grid.tokens

    def written(self, grid: Grid | ProcessorOutput) -> str | None:
        assert isinstance(grid, ProcessorOutput)
        return grid.written

    @property
    def placeholder(self) -> str:
        """See `Processor`."""
        return self._library.placeholder

    @property
    def image_arguments(self) -> Mapping[str, Any]:
        """See `Processor`."""
        return self._library.image_arguments

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Processor`."""
        kept = {name: tensor for name, tensor in named.items() if name != "mm_token_type_ids"}
        if "mm_token_type_ids" not in named:
            return kept
        return kept | kinds_for(self._contract.base.forward, named["mm_token_type_ids"])

    def about(self) -> list[Any]:
        """See `Processor`."""
        return [self.image_token_id, self._library.about()]

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
        forms: Sequence[ProcessorOutput] = (),
        **more: Tensor,
    ) -> Tensor:
        inside = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [rows, tokens]
        index = getattr(self._contract.base, "get_rope_index", None)
        asked = () if index is None else signature(index).parameters
        each = [{n: array for n, array in arrays_of(form).items() if n in asked} for form in forms]
        sizes = {name: torch.from_numpy(np.concatenate([one[name] for one in each])) for name in (each or [{}])[0]}
        return positions(self._contract.base, self.config, input_ids, mm_token_type_ids, inside, sizes | more)
