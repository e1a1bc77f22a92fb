"""A hex digest of all that turns patches into features: equal digests mean equal towers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers.utils import logging

from dhp.base.errors import ConfigError
from dhp.models.family import VISION
from dhp.models.registry import load_family
from dhp.models.split import load_part

# Keys of config.json that do not concern the tower; unknown keys are hashed.
_ELSEWHERE = ("text_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def digest_tower(model_name: str, dtype: str, parts: Iterable[str]) -> str:
    """Digest of the tower and projector of a run with these parts: names, shapes, formats and bytes of the weights as
    they are loaded, the number format of the part, and the configuration.

    Raises ModelError where they cannot be read, ConfigError for a tower with dropout.
    """
    family = load_family(model_name).having(parts)
    logging.disable_progress_bar()  # of a part; every rank loads one with a progress bar later
    loaded = torch.float64 if dtype == "float64" else torch.float32
    model = load_part(model_name, (*family.outside(VISION), *family.idle), loaded)
    _refuse_dropout(model)
    config = {key: value for key, value in family.config.to_dict().items() if key not in _ELSEWHERE}
    hashed = [type(model).__name__, transformers.__version__, dtype, config]
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode())
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        whole = tensor.detach().contiguous()
        digest.update(json.dumps([name, str(whole.dtype), list(whole.shape)]).encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _refuse_dropout(model: Any) -> None:
    for name, module in model.named_modules():
        chance = getattr(module, "p", None) or getattr(module, "drop_prob", None)
        if "drop" in type(module).__name__.lower() and chance:
            raise ConfigError(
                f"data.cache_features with {name} of the tower, which drops each value with a chance of {chance}: its "
                "features are others each time. Set that to 0 in the model's config.json, or leave data.cache_features "
                "out"
            )
