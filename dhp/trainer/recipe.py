"""The recipe that a resumed run must keep."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from dhp.checkpoint.resume import CONTENTS, RECIPE, Start
from dhp.config.parts import DECODER, model_name, parts, read_datasets
from dhp.config.ranges import CONSTANT, STABLE, decay_steps
from dhp.config.resolve import warmup_steps
from dhp.config.roles import FREE, keys_with
from dhp.config.roles import RECIPE as RECIPE_KEY
from dhp.config.schema import Config
from dhp.core.files import fingerprint, fingerprint_of
from dhp.data.remote.places import Place, find_place, remote_of
from dhp.data.remote.remote_files import RemoteFile
from dhp.data.sample.chat import read_template
from dhp.models.pretrained import WEIGHT_ENDINGS
from dhp.plan.stage_graph import world

TOTAL, WARMUP, DECAY = "training.total_steps", "training.warmup_steps", "training.lr_decay_steps"


def recipe(config: Config) -> dict[str, Any]:
    """What decides how samples are made and weights are updated, by key, as JSON gives it back."""
    found: dict[str, Any] = {}
    for section in ("training", "data"):
        values, keys = asdict(getattr(config, section)), _recipe_keys(getattr(config, section))
        found |= {f"{section}.{key}": values[key] for key in keys}
    for name in read_datasets(config.data):
        entry = config.data.data_registry[name]
        found |= {f"data.data_registry.{name}.{key}": asdict(entry)[key] for key in _recipe_keys(entry)}
    template = read_template(config.data.chat_template)
    if template is not None:  # whose file may have changed under its name
        found["data.chat_template"] = (
            f"{config.data.chat_template} (sha256:{sha256(template.encode()).hexdigest()[:16]})"
        )
    return found


def _recipe_keys(section: Any) -> tuple[str, ...]:
    return (*keys_with(section, resume=RECIPE_KEY), *keys_with(section, resume=FREE))


def free_layout(config: Config) -> dict[str, Any]:
    """What may change, as the tensors of a checkpoint are put together for any of it: by part degrees, number format,
    bytes of states."""
    found = {f"{name}.{key}": value for name, values in world(config).items() for key, value in values.items()}
    for name, part in parts(config).items():
        found |= {f"{name}.dtype": part.dtype, f"{name}.state_bytes": part.state_bytes}
    return found


def rates(config: Config, steps: int) -> dict[str, Any]:
    """What of a run's length its learning rates depend on. steps: of the whole run."""
    kind, warmup = config.training.lr_scheduler_type, warmup_steps(config, steps)
    falls = {DECAY: decay_steps(config.training, steps, warmup)} if kind == STABLE else {}
    return {TOTAL: None if kind == CONSTANT else steps, WARMUP: warmup, **falls}


def check_recipe(config: Config, start: Start) -> None:
    """Raise CheckpointError where the run would train in another way than the checkpoint's, and was not asked to."""
    free = [f"{name}.{key}" for name in ("training", "data") for key in keys_with(getattr(config, name), resume=FREE)]
    start.check_recipe(recipe(config), free, config.training.resume_changes)


def check_rates(config: Config, start: Start, steps: int) -> None:
    """The same of its learning rates, once the number of its steps is known. Where the rate is constant, then and now,
    how long it has risen leaves it as it is, and when it begins to fall too."""
    now, kept = rates(config, steps), start.settings.get(RECIPE, {})
    before = kept.get(WARMUP)  # None: a release that kept no steps
    free = [WARMUP] if before is None or (_is_flat(now, start.step) and start.step >= before) else []
    if before is not None and _is_flat(now, start.step) and _is_flat(kept, start.step):
        free += [TOTAL, DECAY]
    start.check_recipe(now, free, config.training.resume_changes)


def _is_flat(of: Mapping[str, Any], step: int) -> bool:
    """Whether the curve of such rates is between its warm-up and its fall behind `step` steps."""
    total, decay = of.get(TOTAL), of.get(DECAY)
    falls_later = total is None or (decay is not None and step <= total - decay)
    return bool(falls_later and step >= of[WARMUP])


def held_files(config: Config) -> dict[str, str]:
    """Fingerprints of what a run reads and its checkpoints do not hold: the model's weights, where they are a
    directory's, and annotations. Their paths may change. Raises OSError."""
    found = {}
    model = Path(model_name(config))
    if model.is_dir():
        weights = sorted(file for file in model.iterdir() if file.name.endswith(WEIGHT_ENDINGS) and file.is_file())
        found[f"{CONTENTS} {DECODER}.model_name"] = fingerprint(weights)
    for name in read_datasets(config.data):
        place = find_place(config.data.data_registry[name].annotation_path, remote_of(config.data))
        found[f"{CONTENTS} data.data_registry.{name}.annotation_path"] = _contents(place)
    return found


def _contents(place: Place) -> str:
    """A fingerprint of annotations. Of one file behind an address it is that of its copy; shards there are not read for
    it: their names, sizes and states go by what their file system says."""
    if isinstance(place, Path):
        files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
        return fingerprint(files)
    far = [file for file in place.files if isinstance(file, RemoteFile)]
    if not far:
        return fingerprint([file for file in place.files if isinstance(file, Path)])
    if len(far) == 1 and far[0].suffix not in (".tar", ".parquet"):
        with far[0].open() as copy:
            return fingerprint_of(far[0].name, far[0].size, copy)
    states = [(file.name, file.about().size, file.about().tag) for file in far]
    return f"states:{sha256(json.dumps(states).encode()).hexdigest()[:16]}"
