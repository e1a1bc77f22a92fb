"""A model's directory: configuration, tokenizer, processors, other files."""

import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

from dhp.config.devices import shipped_directory
from dhp.core.errors import ModelError


def config_source(model_name: str) -> str:
    """Where transformers reads the configuration without weights: a directory, a hub id, or a file that dhp ships.

    A directory and a hub id in the local cache are taken as they are. For other hub ids the shipped shape, which holds
    the fields of config.json that say how large the model is, comes before a download.
    Raises ModelError when there is none of these."""
    if Path(model_name).is_dir() or _readable(model_name, local_files_only=True) is None:
        return model_name
    shipped = shapes_directory() / f"{model_name}.json"
    if shipped.is_file():
        return str(shipped)
    failure = _readable(model_name)
    if failure is None:
        return model_name
    folder = shapes_directory()
    known = sorted(str(file.relative_to(folder)).removesuffix(".json") for file in folder.rglob("*.json"))
    raise ModelError(
        f"{model_name}: its configuration cannot be read ({failure}), and dhp ships no shape of it. "
        f"Give a directory with a config.json, or one of {', '.join(known)}"
    )


def read_model_config(model_name: str) -> Any:
    """The configuration in a directory or of a hub id. Raises ModelError where transformers can read none."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        return AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        asked = "" if Path(model_name).is_dir() else " (there is no such directory, so the hub was asked)"
        text = f"{model_name}: no usable model configuration{asked}: {error}"
        kind = _model_type(model_name)
        if kind is not None and kind not in CONFIG_MAPPING:
            text = (
                f"{model_name}: transformers {version('transformers')} has no model_type {kind!r}, and code that comes "
                "with a model is not run. Of a family of your own, name the module that registers it: "
                "plugins=[MODULE] in a configuration, --plugin MODULE of doctor model and export "
                "(examples/new_family/README.md)"
            )
        raise ModelError(text) from error


def _model_type(model_name: str) -> str | None:
    """What a directory's config.json says; None: nothing."""
    try:
        found = json.loads((Path(model_name) / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _readable(model_name: str, local_files_only: bool = False) -> str | None:
    """None when transformers can read the model's configuration, else the first line of its error."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model_name, local_files_only=local_files_only, trust_remote_code=False)
    except (OSError, ValueError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return None


def shapes_directory() -> Path:
    """Shipped shapes, each below it under its hub id."""
    return shipped_directory() / "model" / "shapes"


def name_accelerator() -> None:
    """Set DeepSpeed's accelerator to the CPU where there is no GPU. accelerate, which transformers and peft call to
    save or adapt a model, imports DeepSpeed, whose own search would print a warning."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def weight_files(folder: Path) -> list[Path]:
    """The files of a directory that hold weights, and their indices."""
    return sorted(file for file in folder.iterdir() if file.name.endswith(WEIGHT_ENDINGS) and file.is_file())


def load_tokenizer(model_name: str, chat_template: str | None = None) -> Any:
    """The model's own tokenizer, with its chat template, or with the one given (Jinja text; "": none is needed).

    Raises ModelError when the directory has no tokenizer or no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name}: no usable tokenizer: {error}") from error
    if chat_template:
        tokenizer.chat_template = chat_template
    elif isinstance(tokenizer.chat_template, dict):  # several by name
        tokenizer.chat_template = tokenizer.get_chat_template()
    if chat_template is None and not tokenizer.chat_template:
        raise ModelError(
            f"{model_name}: the tokenizer has no chat template, so conversations cannot be rendered; "
            "put the model's chat_template.jinja (or chat_template.json) into the directory, or name a file that "
            "holds one by data.chat_template"
        )
    return tokenizer


def load_image_processor(model_name: str) -> Any:
    """The model's own image processor, in the flavour that needs no torchvision where there is one.

    Raises ModelError when the directory has none, or one of another flavour where torchvision is not installed."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(model_name, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        what = without_torchvision(model_name, error) or f"no usable image processor: {error}"
        raise ModelError(f"{model_name}: {what}") from error


def without_torchvision(model_name: str, error: Exception) -> str:
    """What to do about an error of the library for which torchvision is missing; "" for any other."""
    named = "torchvision" in str(error).lower() or (isinstance(error, AttributeError) and "NoneType" in str(error))
    if not named or find_spec("torchvision") is not None:  # None: in the place of its video processor
        return ""
    return (
        f"pictures of model_type {_model_type(model_name)!r} are read by torchvision alone, which is not installed "
        f"here. Install the one that goes with torch {version('torch')} on every node (pip install torchvision), or "
        "take a family whose pictures are read without it (python -m dhp doctor model --make names some)"
    )


def find_stop_tokens(model_name: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model's generation_config.json, which may name several, or else of its
    config.json, and the tokenizer's, which ends a turn of its chat template."""
    from transformers import GenerationConfig

    try:
        own = GenerationConfig.from_pretrained(model_name).eos_token_id
    except (OSError, ValueError):
        own = config.get_text_config().eos_token_id
    named = [own] if isinstance(own, int) else [*(own or ())]
    return tuple(dict.fromkeys(token for token in (*named, tokenizer.eos_token_id) if token is not None))


def check_weight_files(folder: Path) -> None:
    """Look at a model's index, and at its pickles where it has no safetensors. Raises ModelError for an index that
    cannot be read, leads outside of the folder or names what is not there, and for a pickle of other things than
    weights: none of its code is run."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is no index of weights ({error!r}). Copy the model again") from error
        for name in sorted(files, key=str):
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index} names {name!r}, which is outside of the model's folder. Take another copy")
            if not (folder / name).is_file():
                raise ModelError(f"{index} names {name}, which is not there. Copy the model again")
    if not any(folder.glob("*.safetensors")):
        for file in sorted(folder.glob("pytorch_model*.bin")):
            _check_pickle(file)


def _check_pickle(file: Path) -> None:
    import torch

    try:
        torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    except (UnpicklingError, OSError, EOFError, ValueError, RuntimeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0][:200]
        raise ModelError(
            f"{file} is no file of weights alone ({reason}). Take the model as safetensors, or convert it where you "
            "trust it"
        ) from error


def auxiliary_files(model_name: str) -> list[Path]:
    """Everything of a model directory or hub id but its weights and hidden files: configuration, tokenizer, processors,
    templates.

    They are copied into checkpoints and exports, which people publish. Raises ModelError for a link that leads to
    another folder, but that of the hub's cache which has the same model."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_name, ignore_patterns=[f"*{end}" for end in WEIGHT_ENDINGS]))
    files = [f for f in folder.iterdir() if f.is_file() and not f.name.endswith(WEIGHT_ENDINGS)]
    own = [folder.resolve()]
    if own[0].parent.name == "snapshots" and own[0].parent.parent.name.startswith("models--"):
        own.append(own[0].parent.parent / "blobs")
    for file in files:
        if not any(file.resolve().is_relative_to(one) for one in own):
            raise ModelError(
                f"{file} leads to {file.resolve()}, and would be copied into checkpoints and exports. Remove the link, "
                "or put a copy in its place"
            )
    return sorted(file for file in files if not file.name.startswith("."))
