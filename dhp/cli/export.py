"""`python -m dhp export RUN_OR_CHECKPOINT OUT_DIR [--adapter] [--base DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp.base.adapters import AdapterSettings
from dhp.base.errors import ConfigError
from dhp.checkpoint.folder import MODEL, find_checkpoint, read_about
from dhp.checkpoint.shards import read_shards
from dhp.models.whole import save_whole


def main(arguments: Sequence[str]) -> int:
    """Put the parts of a checkpoint together and write them where plain transformers, or peft, can load them."""
    parser = argparse.ArgumentParser(prog="python -m dhp export", description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run directory: its newest one")
    parser.add_argument("out_dir", type=Path, help="a new or empty directory")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, as peft loads them; else they are merged"
    )
    parser.add_argument("--base", help="the model that adapters were trained beside, if it lies elsewhere now")
    given = parser.parse_args(arguments)
    checkpoint = find_checkpoint(given.checkpoint)
    about = read_about(checkpoint, ("step", "parts", "settings"))
    adapters = _adapters(about["settings"])
    weights = {name: tensor for part in about["parts"] for name, tensor in read_shards(checkpoint / part).items()}
    if not adapters:
        if given.adapter or given.base is not None:
            raise ConfigError(
                f"{checkpoint} has no adapters: its run trained whole weights. Leave out --adapter and --base"
            )
        save_whole(checkpoint / MODEL, weights, given.out_dir)
        print(f"{given.out_dir}: {len(weights)} weights of step {about['step']}, from {checkpoint}")
        return 0
    return _export_adapters(given, checkpoint, about, weights, adapters)


def _export_adapters(
    given: argparse.Namespace, checkpoint: Path, about: Mapping[str, Any], weights: dict, adapters: Mapping
) -> int:
    from dhp.models.adapted import merge, save_adapter

    base = given.base or about["model_name"]
    if given.adapter:
        count = save_adapter(base, weights, adapters, given.out_dir)
        print(f"{given.out_dir}: an adapter of {count} tensors of step {about['step']}, beside {base}")
        return 0
    whole = merge(base, weights, adapters)
    save_whole(checkpoint / MODEL, whole, given.out_dir)
    print(f"{given.out_dir}: {len(whole)} weights with the adapters of step {about['step']} in them, from {checkpoint}")
    return 0


def _adapters(settings: Mapping[str, Any]) -> dict[str, AdapterSettings]:
    found = settings.get("lora") or {}
    return {part: AdapterSettings(**(own | {"targets": tuple(own["targets"])})) for part, own in found.items()}
