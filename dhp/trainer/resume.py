"""What of a run's settings a resumed run is held to: the recipe of its training, and files that no checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from dhp.checkpoint.resume import CONTENTS, RECIPE, Start
from dhp.config.learning_rate import CONSTANT, STABLE, decay_steps
from dhp.config.parts import DECODER, model_name, parts, read_datasets
from dhp.config.resolve import warmup_steps
from dhp.config.schema import Config
from dhp.core.files import fingerprint, fingerprint_of
from dhp.data.remote.files import RemoteFile
from dhp.data.remote.places import Place, find_place, remote_of
from dhp.data.sample.chat import read_template
from dhp.models.pretrained import WEIGHT_ENDINGS
from dhp.trainer.settings import world

TOTAL, WARMUP, DECAY = "training.total_steps", "training.warmup_steps", "training.lr_decay_steps"

# Of the sections training and data: what must stay (`dhp.trainer.settings.kept_settings`, and a sampler's order) …
HELD = {
    "training": {"batch_size", "micro_batch_size", "trainable", "frozen", "optimizer"},
    "data": {
        *("datasets", "shuffle", "balance", "balance_window", "long_tokens", "limits", "isf_passes"),
        "fullest_first",
    },
}
# … and what decides nothing that is trained. All else is the recipe.
BESIDE = {
    "training": {
        # By `rates`, which know the number of steps.
        *("num_epochs", "max_steps", "warmup_ratio", "warmup_steps", "lr_decay_ratio", "lr_decay_steps"),
        *("resume_changes", "empty_rows"),
        *("log_interval", "trace", "dry_run", "checkpoint_dir", "save_steps", "save_epochs"),
        *("save_minutes", "save_in_background", "save_timeout_s", "max_restarts", "restart_wait_s"),
        *("elastic", "elastic_wait_s"),
        *("save_final", "save_total_limit", "eval_steps", "max_nonfinite_steps"),
        *("eval_answers", "eval_answer_tokens", "best_metric", "resume", "loggers", "logger_project", "schedule"),
    },
    "data": {
        *("eval_datasets", "data_registry", "locality_slack", "cache_dir", "cache_features", "cache_features_gib"),
        *("cache_gib", "fetch_tries", "fetch_s"),
        *("num_workers", "prefetch", "video_whole_frames", "allow_http"),
    },
}
# Of the recipe, what may change: it decides rounding, memory or what is done with samples that cannot be read.
FREE = ("training.deterministic", "data.pin_memory", "data.on_bad_sample")
_OF_AN_ENTRY = ("annotation_path", "data_path", "weight")  # held as files, free, and held with data.datasets


def recipe(config: Config) -> dict[str, Any]:
    """What decides how samples are made and weights are updated, by key, as JSON gives it back."""
    found: dict[str, Any] = {}
    for section in HELD:
        values = asdict(getattr(config, section))
        found |= {f"{section}.{key}": values[key] for key in values if key not in HELD[section] | BESIDE[section]}
    for name in read_datasets(config.data):
        entry = asdict(config.data.data_registry[name])
        found |= {f"data.data_registry.{name}.{key}": v for key, v in entry.items() if key not in _OF_AN_ENTRY}
    template = read_template(config.data.chat_template)
    if template is not None:  # whose file may have changed under its name
        found["data.chat_template"] = (
            f"{config.data.chat_template} (sha256:{sha256(template.encode()).hexdigest()[:16]})"
        )
    return found


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
    start.check_recipe(recipe(config), FREE, config.training.resume_changes)


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
