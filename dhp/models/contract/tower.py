"""A tower that takes pictures whole, by the model's own `get_image_features`; ranks of a sequence divide pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.config.part import PartConfig
from dhp.config.parts import resolved
from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.draws import current_keys, drawing
from dhp.core.errors import ConfigError, ModelError
from dhp.models.contract.contract import Contract
from dhp.models.contract.pictures import joined, unpack
from dhp.models.flops import VisionWork
from dhp.models.patches import project_as_products
from dhp.models.tower import EMBEDDINGS, Tower, TowerInputs
from dhp.models.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WholeTower(Tower):
    """Each picture is encoded by one rank. The family's properties are in its contract."""

    position_columns = 0
    takes_attention = False
    tile = 1  # a picture has one key, and its layers see what they make of it

    def __init__(self, config: Any, contract: Contract):
        super().__init__(config)
        structure = contract.structure
        self._contract = contract
        self.modules, self.tensors = structure.vision, contract.handover.names
        self.projector = tuple(name for name in structure.vision if not _holds(name, structure.vision_layers))
        self.heads = 1
        self.patch_dim, self.dummy_patches = contract.values, contract.dummy.rows
        self.work: VisionWork = contract.vision_work
        self.layers = contract.vision_layers

    @property
    def dummy_form(self) -> ProcessorOutput:
        return self._contract.dummy

    def check(self, asked: PartConfig) -> None:
        self.check_stages("vision", asked)
        self.check_cut(resolved(asked.tensor))
        ring = resolved(asked.ring)
        if ring > 1:
            raise ConfigError(
                f"vision.ring={ring} with a {self.config.model_type} model: its tower takes images whole, so that "
                f"no sequence is divided. Set vision.ring=1 and vision.ulysses={ring * resolved(asked.ulysses)}, whose "
                "actors share the images"
            )
        self.check_backend("vision", asked)

    def calls(
        self, forms: Sequence[ProcessorOutput], even: bool = False, alone: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """Pictures of one shape together, or each by itself."""
        if alone or not self._contract.batches or (even and self._contract.loops):
            return tuple((number,) for number in range(len(forms)))
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, form in enumerate(forms):
            groups[form.pixels, tuple(shape for _, _, shape, _ in form.arrays)].append(number)
        return tuple(map(tuple, groups.values()))

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        if not isinstance(grid, ProcessorOutput):
            raise TypeError(f"a picture of {self.config.model_type} is described by its form, not by a grid {grid}")
        rows, tokens = grid.rows, grid.tokens
        nowhere = torch.zeros(rows, 0, dtype=torch.long)
        return ImageLayout(torch.arange(tokens), 1, (rows,), (rows,), nowhere, (tokens,), grid)

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        forms = inputs.forms
        split_pixels = inputs.pixels.split([form.rows for form in forms])
        pictures = [unpack(form, rows, model.dtype) for form, rows in zip(forms, split_pixels, strict=True)]
        found: list[Mapping[str, Tensor]] = [{}] * len(forms)
        keys = current_keys()
        for numbers in inputs.calls:
            own, of_own = [pictures[n] for n in numbers], [forms[n] for n in numbers]
            if not numbers:
                own = [unpack(self.dummy_form, self.dummy_pixels(inputs.pixels), model.dtype)]
                of_own = [self.dummy_form]
            with drawing(keys and keys.of_call(numbers)):
                encoded = self._encode_together(model, own, of_own)
            if not numbers:
                found += encoded
                continue
            for n, rows in zip(numbers, encoded, strict=True):
                found[n] = rows
        return {name: torch.cat([one[name] for one in found]) for name in self.tensors}

    def _encode_together(
        self, model: PreTrainedModel, pictures: Sequence[dict[str, Tensor]], forms: Sequence[ProcessorOutput]
    ) -> list[Mapping[str, Tensor]]:
        """Each picture's rows by name, of pictures that one call takes."""
        base, tokens = model.get_submodule(self._contract.structure.base), [form.tokens for form in forms]
        output = base.get_image_features(**joined(pictures), return_dict=True)
        rows = self._contract.handover.take(output, tokens)
        _check_rows(self.config.model_type, len(rows[EMBEDDINGS]), tokens)
        split = [tensor.split(tokens) for tensor in rows.values()]
        return [dict(zip(rows, of_picture, strict=True)) for of_picture in zip(*split, strict=True)]

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # Attention stays the library's: a tower that takes images whole needs no other.
        project_as_products(model)

    def freeze_unused(self, model: PreTrainedModel) -> None:
        unused = set(self._contract.unused)
        for name, parameter in model.named_parameters():
            if name in unused:
                parameter.requires_grad_(False)


def _holds(name: str, path: str | None) -> bool:
    return path is not None and (path == name or path.startswith(f"{name}."))


def _check_rows(model_type: str, found: int, tokens: Sequence[int]) -> None:
    if found != sum(tokens):
        raise ModelError(
            f"{model_type}: the encoder made {found} rows of {len(tokens)} images that have {sum(tokens)} placeholders "
            "in the prompt. The processor and the model of this directory do not belong together"
        )
