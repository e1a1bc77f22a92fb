"""Exports a run's checkpoint as a directory that others read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dhp.checkpoint.folder import MODEL, OPTIMIZER, read_about
from dhp.checkpoint.resume import CONTENTS, RECIPE
from dhp.checkpoint.shard_reader import ShardReader, mapped_shards, open_source
from dhp.config.data import DataConfig
from dhp.config.parts import DECODER
from dhp.core.errors import CheckpointError, ModelError
from dhp.core.files import fingerprint
from dhp.core.parameters import AdapterSettings
from dhp.models.base_files import BASE, find_directory, stored_tensors
from dhp.models.export import save_whole
from dhp.models.pretrained import weight_files


def export_whole(
    checkpoint: Path, out_dir: Path, base: str | None = None, pictures: bool = True, dtype: str = BASE
) -> str:
    """Put the parts together, with adapters added to their matrices, and write them where plain transformers can load
    them; what was written, in words.

    base: the model that training began with, if it is elsewhere now. pictures: the run's bounds of pictures go
    into the processors' files. dtype: of `dhp.models.base_files.FORMATS`. Raises CheckpointError, ModelError."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as beside:
        about, weights = read_parts(checkpoint, Path(beside))
        adapters, exact = adapters_in(about), master_reader([checkpoint / part for part in about["parts"]], weights)
        source = f"of step {about['step']}, from {checkpoint}"
        base = base or str(about.get("model_name"))
        if adapters:
            from dhp.models.export import merge  # which imports peft

            weights = merge(base, weights, adapters)
            source = f"with the adapters of step {about['step']} in them, from {checkpoint}"
        folder, lacking = _find_base(base, about)
        carried = save_whole(checkpoint / MODEL, weights, out_dir, folder, dtype, exact)
        notes = _write_stops(out_dir) + (_write_pictures(out_dir, picture_settings(about)) if pictures else "")
        return (
            "; ".join(one for one in (f"{out_dir}: {len(weights)} weights {source}", carried, lacking) if one) + notes
        )


def _find_base(base: str, about: Mapping[str, Any]) -> tuple[Path | None, str]:
    """The directory of the model that a checkpoint's run began with; and, where it is not there or holds other files
    now, what the export lacks, in words."""
    folder = find_directory(base)
    lost = "its keys and number formats are known as far as the checkpoint says. Say by --base where the model is"
    if folder is None:
        return None, f"the model that training began with, {base}, is not on this machine: {lost}"
    kept = about["settings"].get(f"{CONTENTS} {DECODER}.model_name")
    if kept is not None and kept != fingerprint(weight_files(folder)):
        return None, f"the weights in {base} are not those that training began with: {lost}"
    try:
        return (folder, "") if stored_tensors(folder) else (None, f"{base} has no safetensors: {lost}")
    except ModelError as error:  # half a copy in the hub's cache, for one
        return None, f"{error}; {lost}"


def master_reader(folders: Sequence[Path], weights: Mapping[str, Any]) -> Callable[[str], Any]:
    """A function that returns the master weight of which a checkpoint's weight of that name is the rounding, or None.
    folders: of its parts."""
    from dhp.parallel.optim.base import saved_master

    states = [open_source(one / OPTIMIZER) for one in folders if ShardReader.holds(one / OPTIMIZER)]
    saved = {name: source for source in states for name in source.names}

    def read(name: str) -> Any:
        return saved_master(name, weights[name], saved, lambda of: saved[of].whole(of)) if name in weights else None

    return read


def picture_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint's run read pictures, by keys of the configuration's section data, where they are set."""
    plain = DataConfig()
    keys = (
        "min_pixels",
        "max_pixels",
        "max_tiles",
        "reduced_jpeg",
        "video_fps",
        "video_max_frames",
        "video_max_pixels",
    )
    found = {key: about.get("settings", {}).get(RECIPE, {}).get(f"data.{key}", getattr(plain, key)) for key in keys}
    return {key: value for key, value in found.items() if value != getattr(plain, key)}


def _write_pictures(out_dir: Path, asked: Mapping[str, Any]) -> str:
    """Let processors of others read pictures as training did; what was changed, and what cannot be, in words."""
    from dhp.data.sample.sample import area_bounds, tile_arguments
    from dhp.models.pretrained import load_image_processor
    from dhp.models.processor_files import set_image_arguments, set_video_arguments
    from dhp.models.registry import load_family

    if not asked:
        return ""
    images, processor = load_image_processor(str(out_dir)), load_family(str(out_dir)).processor
    least, most = asked.get("min_pixels"), asked.get("max_pixels")
    arguments = {**area_bounds(images, least, most), **tile_arguments(images, asked.get("max_tiles"))}
    files, lost = list[str](), ""
    if processor.sees_videos:  # first, as it may go by the image processor's file
        names = {"video_fps": "fps", "video_max_frames": "max_frames"}
        taking = {name: asked[key] for key, name in names.items() if key in asked}
        size = area_bounds(images, least, asked.get("video_max_pixels") or most).get("size", {})
        files, lost = set_video_arguments(out_dir, processor, taking, size)
    if asked.get("reduced_jpeg"):
        lost += f"{'; ' * bool(lost)}training decoded JPEG files at less than their size (data.reduced_jpeg)"
    files = [*(set_image_arguments(out_dir, arguments) if arguments else ()), *files]
    words = ", ".join(f"data.{key}={value}" for key, value in asked.items() if key != "reduced_jpeg")
    notes = f"; {' and '.join(dict.fromkeys(files))} read pictures as training did ({words})" if files else ""
    return notes + (f"; what cannot be written: {lost}" if lost else "")


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
