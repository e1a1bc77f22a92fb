"""transformers' processor of a family: the text that it writes for a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from dhp.base.errors import ModelError

_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "chat_template")


class LibraryProcessor:
    """Made from a model's directory, without its video processor, which needs torchvision."""

    def __init__(self, model_name: str, config: Any):
        self._model_name, self._config = model_name, config

    def load(self) -> None:
        """Raises ModelError where transformers has none for the family, or where it cannot be made."""
        _ = self._processor

    @property
    def placeholder(self) -> str:
        """The text of a picture in a prompt from the chat template."""
        return self._processor.image_token

    @cached_property
    def image_arguments(self) -> dict[str, Any]:
        """Arguments that it gives its image processor, besides the images."""
        merged = self._processor._merge_kwargs(tokenizer_init_kwargs={})
        return {name: value for name, value in merged["images_kwargs"].items() if name != "return_tensors"}

    @cached_property
    def token(self) -> str:
        """The text of the token that the encoder's rows replace."""
        from dhp.models.generic.rows import placeholder

        return self._processor.tokenizer.convert_ids_to_tokens(placeholder(self._config))

    def written(self, output: Mapping[str, np.ndarray]) -> str:
        """The prompt's text for the one image of which the image processor gave `output`."""
        try:
            return self._processor.replace_image_token(dict(output), 0)
        except Exception as error:  # it may fail anyhow for a directory that lacks what it needs
            raise ModelError(
                f"{self._model_name}: {type(self._processor).__name__} cannot say what a prompt has in an image's "
                f"place ({type(error).__name__}: {error}). Is its processor_config.json complete?"
            ) from error

    def about(self) -> dict[str, str]:
        """All of it that may decide how long a picture is in a prompt."""
        kept = {name: value for name, value in vars(self._processor).items() if name not in _PARTS}
        return {"class": type(self._processor).__name__} | {name: repr(value) for name, value in sorted(kept.items())}

    @cached_property
    def _processor(self) -> Any:
        from dhp.models.registry import load_image_processor, load_tokenizer

        kind = self._kind()
        own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        parts = {
            "image_processor": load_image_processor(self._model_name),
            "tokenizer": load_tokenizer(self._model_name, chat_template=""),  # none is needed here
        }
        missing = {name: None for name in kind.get_attributes() if name not in parts}
        try:
            return own(**parts, **missing, **self._settings(kind))
        except Exception as error:
            raise ModelError(
                f"{self._model_name}: {kind.__name__} cannot be made from this directory: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _kind(self) -> type[ProcessorMixin]:
        whole = self._config.model_type.removesuffix("_thinker")  # of a model that talks, the half that reads
        try:
            return PROCESSOR_MAPPING[CONFIG_MAPPING[whole]]
        except (KeyError, ImportError) as error:
            raise ModelError(
                f"{self._model_name}: transformers has no processor for {self._config.model_type} that can be used "
                f"here ({str(error).strip().splitlines()[0] if str(error) else type(error).__name__})"
            ) from error

    def _settings(self, kind: type[ProcessorMixin]) -> dict[str, Any]:
        """Arguments of its constructor from the directory's processor_config.json, or else from the model's
        configuration under the same name."""
        file = Path(self._model_name) / "processor_config.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        asked = [name for name in signature(kind.__init__).parameters if name not in ("self", "kwargs", *_PARTS)]
        vision = getattr(self._config, "vision_config", None)
        for section in (vision, self._config):
            found = {n: getattr(section, n) for n in asked if getattr(section, n, None) is not None} | found
        return {name: found[name] for name in asked if name in found}
