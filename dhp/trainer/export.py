"""A checkpoint as the directory of an ordinary model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dhp.checkpoint.manifest import MODEL, read_about
from dhp.checkpoint.source import mapped_shards
from dhp.core.errors import CheckpointError, ModelError
from dhp.core.parameters import AdapterSettings
from dhp.models.export import save_whole


def export_whole(checkpoint: Path, out_dir: Path, base: str | None = None) -> str:
    """Put the parts together, with adapters added to their matrices, and write them where plain transformers can load
    them; what was written, in words.

    base: the model that adapters were trained with, if it is elsewhere now. Raises CheckpointError, ModelError.
    """
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as beside:
        about, weights = read_parts(checkpoint, Path(beside))
        adapters = adapters_in(about)
        source = f"of step {about['step']}, from {checkpoint}"
        if adapters:
            from dhp.models.lora_export import merge  # which imports peft

            weights = merge(base or str(about.get("model_name")), weights, adapters)
            source = f"with the adapters of step {about['step']} in them, from {checkpoint}"
        save_whole(checkpoint / MODEL, weights, out_dir)
        return f"{out_dir}: {len(weights)} weights {source}{_write_stops(out_dir)}"


def _write_stops(out_dir: Path) -> str:
    """Let generation by others stop where the answers that were learned end; what was changed, in words."""
    from dhp.data.sample.template_check import find_answer_end
    from dhp.models.pretrained import load_tokenizer, read_model_config

    try:
        tokenizer = load_tokenizer(str(out_dir), "")
    except ModelError:  # a model without one, whose user brings another
        return ""
    end = find_answer_end(tokenizer) if tokenizer.chat_template else None
    file = out_dir / "generation_config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = known.get("eos_token_id") or read_model_config(str(out_dir)).get_text_config().eos_token_id
    stops = [named] if isinstance(named, int) else [*(named or ())]
    if end is None or end in stops:
        return ""
    file.write_text(json.dumps(known | {"eos_token_id": [*stops, end]}, indent=2) + "\n", encoding="utf-8")
    return f"; generation_config.json has {tokenizer.decode([end])} among the tokens that stop: its answers end with it"


def read_parts(checkpoint: Path, beside: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint's description, and its weights by name, mapped from its files or from new ones in `beside`."""
    about = read_about(checkpoint, ("step", "parts", "settings"))
    folders = [checkpoint / part for part in about["parts"]]
    return about, {name: tensor for folder in folders for name, tensor in mapped_shards(folder, beside).items()}


def adapters_in(about: Mapping[str, Any]) -> dict[str, AdapterSettings]:
    """Adapters of the run that wrote a checkpoint, by part. Raises CheckpointError for what is none."""
    found = about["settings"].get("lora") or {}
    try:
        return {part: AdapterSettings(**(own | {"targets": tuple(own["targets"])})) for part, own in found.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's lora is not what a run writes: {error!r}") from error
