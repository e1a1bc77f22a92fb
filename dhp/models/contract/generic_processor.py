"""Processor of a family without code, by transformers' contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from dhp.core.batch import Grid, ProcessorOutput
from dhp.core.errors import ModelError
from dhp.models.contract.clips import ClipProcessor, as_asked
from dhp.models.contract.random_pictures import arrays_of, frame_patches, pack, patch_shape
from dhp.models.contract.random_rows import kinds_for, moving_placeholder, placeholder
from dhp.models.contract.videos import WholeVideos, frame_maker
from dhp.models.pretrained import load_image_processor, load_tokenizer, without_torchvision
from dhp.models.processor import Processor
from dhp.models.processor_files import FILE, KIND, WHOLE, read_video_settings
from dhp.models.tower import put_together

if TYPE_CHECKING:
    from dhp.models.contract.contract import Contract

_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "chat_template")


class ContractProcessor(Processor):
    """The encoder's arguments determine which outputs of the image processor it takes. The library's processor is made
    from the model's directory, without its video processor, which needs torchvision: frames are made as that one makes
    them, by Pillow."""

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
        self.video_token_id = moving_placeholder(config) if contract.videos else None
        if contract.clip is not None:
            self.hearing = ClipProcessor(config, model_name, contract.clip.pixels[0][1][1], lambda: self._library)

    def model(self) -> type[nn.Module]:
        return self._contract.base

    def load(self) -> None:
        """Raises ModelError where transformers has no processor for the family, or where it cannot be made."""
        _ = self._library

    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ProcessorOutput]:
        try:
            written = self._library.replace_image_token(dict(output), 0)
        except Exception as error:  # it may fail anyhow for a directory that lacks what it needs
            raise ModelError(
                f"{self._model_name}: {type(self._library).__name__} cannot say what a prompt has in an image's "
                f"place ({type(error).__name__}: {error}). Is its processor_config.json complete?"
            ) from error
        token = self._library.tokenizer.convert_ids_to_tokens(self.image_token_id)
        taken = {name: np.asarray(output[name]) for name in self._contract.arguments if name in output}
        return pack(taken, written.count(token), self._contract.values, written)

    @property
    def sees_videos(self) -> bool:
        return bool(self._contract.videos) or self._shows_frames

    @cached_property
    def no_videos(self) -> str:
        if not self.sees_videos:
            return "this model sees images only, as far as its videos are read here"
        if not self._frame_settings:
            return (
                f"{self._model_name} has no {FILE}, which says how frames are scaled. Copy the model's own file of "
                "that name, or the section video_processor of its processor_config.json, into it"
            )
        if self.video_kind not in WHOLE:
            return f"its video processor {self.video_kind} is not known here. Those that are: {', '.join(WHOLE)}"
        return ""

    @cached_property
    def videos(self) -> WholeVideos | None:
        if self.no_videos:
            return None
        library, name = self._library, self._library.tokenizer.convert_ids_to_tokens
        numbers = (self.image_token_id, self.video_token_id)
        asked = self._contract.videos or self._contract.arguments
        return WholeVideos(
            mark=library.video_token,
            tokens=tuple(name(number) for number in numbers if number is not None),
            frame=frame_maker(library, self._frame_settings, asked, self.image_arguments),
            write=lambda shown: library.replace_video_token(shown, 0),
            asked=asked,
            values=self._contract.values,
            rule=WHOLE[self.video_kind],
            settings=self._frame_settings,
        )

    @property
    def _shows_frames(self) -> bool:
        """Whether the library's processor writes a video as so many images, and the model has no other function."""
        if hasattr(self._contract.base, "get_video_features"):
            return False
        try:
            return self._kind().replace_video_token is not ProcessorMixin.replace_video_token
        except (ModelError, ImportError):  # the library's stand-in for a class that needs torchvision raises the latter
            return False

    @cached_property
    def _frame_settings(self) -> dict[str, Any]:
        return read_video_settings(self._model_name) if self._model_name else {}

    @property
    def video_kind(self) -> str:
        kind = self._frame_settings.get(KIND)
        return str(kind or f"{self._kind().__name__.removesuffix('Processor')}VideoProcessor")

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
        channels, side, merge = self._patch_shape
        frames, rest = divmod(pixels.size // prod(whole), channels * side**2)
        if rest or whole[1] % merge or whole[2] % merge:
            return None
        return put_together(pixels, tuple(whole), merge, channels, frames, side)[:1]

    def from_patches(self, grid: Grid | ProcessorOutput) -> bool:
        return isinstance(grid, ProcessorOutput) and any(name == "image_grid_thw" for name, *_ in grid.arrays)

    def image_tokens(self, grid: Grid | ProcessorOutput) -> int:
        if not isinstance(grid, ProcessorOutput):
            raise TypeError(f"a picture of {self.config.model_type} is described by its form, not by a grid {grid}")
        return grid.tokens

    def frame_patches(self, grid: Grid | ProcessorOutput) -> tuple[int, ...]:
        if not isinstance(grid, ProcessorOutput):
            return super().frame_patches(grid)
        channels, side, _ = self._patch_shape
        return frame_patches(grid, channels, side)

    def written(self, grid: Grid | ProcessorOutput) -> str:
        assert isinstance(grid, ProcessorOutput)
        return grid.written

    @property
    def placeholder(self) -> str:
        return self._library.image_token

    @cached_property
    def image_arguments(self) -> Mapping[str, Any]:
        merged = self._library._merge_kwargs(tokenizer_init_kwargs={})
        return {name: value for name, value in merged["images_kwargs"].items() if name != "return_tensors"}

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        sounds = as_asked(self._contract.base, named)
        kept = {name: tensor for name, tensor in sounds.items() if name != "mm_token_type_ids"}
        if "mm_token_type_ids" not in named:
            return kept
        return kept | kinds_for(self._contract.base.forward, named["mm_token_type_ids"])

    def about(self) -> list[Any]:
        kept = {name: repr(value) for name, value in sorted(vars(self._library).items()) if name not in _PARTS}
        return [self.image_token_id, {"class": type(self._library).__name__} | kept]

    @cached_property
    def _patch_shape(self) -> tuple[int, int, int]:
        return patch_shape(self.config)

    @cached_property
    def _library(self) -> Any:
        kind = self._kind()
        own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        parts = {
            "image_processor": load_image_processor(self._model_name),
            "tokenizer": load_tokenizer(self._model_name, chat_template=""),  # none is needed here
        }
        try:
            missing = {name: None for name in kind.get_attributes() if name not in parts}
            return own(**parts, **missing, **self._settings(kind))
        except Exception as error:
            advice = without_torchvision(self._model_name, error)
            raise ModelError(
                f"{self._model_name}: {kind.__name__} cannot be made from this directory: "
                f"{type(error).__name__}: {str(error).strip()}{advice and f'. So {advice}'}"
            ) from error

    def _kind(self) -> type[ProcessorMixin]:
        whole = self.config.model_type.removesuffix("_thinker")  # of a model that talks, the half that reads
        try:
            return PROCESSOR_MAPPING[CONFIG_MAPPING[whole]]
        except (KeyError, ImportError) as error:
            raise ModelError(
                f"{self._model_name}: transformers has no processor for {self.config.model_type} that can be used "
                f"here ({str(error).strip().splitlines()[0] if str(error) else type(error).__name__})"
            ) from error

    def _settings(self, kind: type[ProcessorMixin]) -> dict[str, Any]:
        """Arguments of its constructor from the directory's processor_config.json, or else from the model's
        configuration under the same name."""
        file = Path(self._model_name) / "processor_config.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        asked = [name for name in signature(kind.__init__).parameters if name not in ("self", "kwargs", *_PARTS)]
        vision = getattr(self.config, "vision_config", None)
        for section in (vision, self.config):
            found = {n: getattr(section, n) for n in asked if getattr(section, n, None) is not None} | found
        return {name: found[name] for name in asked if name in found}
