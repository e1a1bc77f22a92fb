"""Models of the tiny configuration of each declared family."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

from dhp.tiny.tiny_families import BEGIN, END, FAMILIES, IMAGE, PINPOINTS, SIDE, SLIDING, VIDEO, VOCABULARY
from tests.helpers.undeclared_families import UNDECLARED

__all__ = [
    "BEGIN",
    "END",
    "FAMILIES",
    "IMAGE",
    "PINPOINTS",
    "SIDE",
    "SLIDING",
    "VIDEO",
    "VOCABULARY",
    "make_config",
    "save_family",
]


def make_config(name: str) -> PreTrainedConfig:
    """The tiny configuration of a case, declared or not."""
    model_type, arguments = FAMILIES.get(name) or UNDECLARED[name]
    return CONFIG_MAPPING[model_type](**arguments)


def save_family(name: str, folder: Path) -> Path:
    """A model of the case with random weights, as an ordinary directory."""
    return save_weights(make_config(name), folder)


def save_weights(config: PreTrainedConfig, folder: Path) -> Path:
    """A model of the configuration with random weights."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
            elif not parameter.any():
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder
