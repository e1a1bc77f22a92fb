"""Settings of ranks, and the recipe of a resumed run."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from dhp.checkpoint.resume import CONTENTS, OPTIMIZER, RECIPE, Start
from dhp.config.parts import DECODER, encoders, model_name, parts, read_datasets, resolved, split_share
from dhp.config.ranges import CONSTANT, STABLE, decay_steps
from dhp.config.roles import FREE, keys_with
from dhp.config.roles import RECIPE as RECIPE_KEY
from dhp.config.schema import Config, PartConfig
from dhp.config.steps import warmup_steps
from dhp.config.training import TrainingConfig
from dhp.core.batch import KeepSettings
from dhp.core.files import fingerprint, fingerprint_of, is_remote
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import ALL, AdapterSettings, ParameterGroup, TrainingRules, is_adapter, is_inside
from dhp.core.text import aligned, shell_command
from dhp.data.remote.places import Place, find_place, remote_of
from dhp.data.remote.remote_files import RemoteFile
from dhp.data.sample.chat import read_template
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.pretrained import weight_files
from dhp.plan.run_plan import RunPlan, stage_choices, world
from dhp.plan.trainable import PROJECTOR, adapters_of, begins_of, part_names

FULLEST_FIRST = "the fullest steps come first (data.fullest_first)"  # said at the beginning, where it is so


def measures(config: Config) -> bool:
    """Whether ranks report what activations take: where asked for, and where a plan is made of it."""
    return config.memory.accounting or any(part.recompute == "auto" for part in parts(config).values())


def fixed_settings(config: Config) -> dict[str, Any]:
    """Settings that must stay when a run is resumed, by key: all that decides which samples a step has, in which rows,
    and what is trained. Degrees are not among them: a checkpoint is read in any layout."""
    return {
        "seed": config.seed,
        "data.datasets": [_weighted(config, text) for text in config.data.datasets],
        "data.shuffle": config.data.shuffle,
        "data.balance": config.data.balance,
        "training.batch_size": config.training.batch_size,
        "training.micro_batch_size": config.training.micro_batch_size,
        "training.trainable": sorted(config.training.trainable),
        "training.frozen": sorted(config.training.frozen),
        OPTIMIZER: config.training.optimizer,
        "lora": {name: _plain(adapters) for name, adapters in adapters_of(config).items()},
    }


def _plain(adapters: AdapterSettings) -> dict[str, Any]:
    return asdict(adapters) | {"targets": list(adapters.targets)}


def _weighted(config: Config, text: str) -> str:
    """A name of data.datasets, with its dataset's weight where there is one: both decide which samples a step has."""
    weight = config.data.data_registry[split_share(text)[0]].weight
    return text if weight == 1 else f"{text} (weight {weight})"


def stage_settings(
    config: Config,
    graph: StageGraph,
    stage: StageSpec,
    device: str,
    steps: int,
    checkpoint: Path | None = None,
    rules: TrainingRules = ALL,
    features: KeepSettings | None = None,
    states: bool = True,
) -> StageSettings:
    """The settings of each rank of a stage in a run of `steps` optimizer steps.

    checkpoint: the one that the run continues; states: with its optimizer's. rules: what is trained, and how. features:
    where those of its part are kept."""
    goes_back = any(graph.goes_back(node) for node in stage.nodes)
    section: PartConfig = getattr(config, stage.part)
    return StageSettings(
        config=config,
        spec=stage,
        graph=graph,
        device=device,
        update=_optimizer_settings(config, steps),
        recompute=stage_choices(resolved(section.recompute) if goes_back else "none", graph, stage),
        measure=measures(config) and (goes_back or config.memory.accounting),
        rules=rules,
        adapters=adapters_of(config).get(stage.part),
        resume_from=None if checkpoint is None else str(checkpoint / stage.part),
        resume_states=states,
        features=features,
    )


def _optimizer_settings(config: Config, steps: int) -> OptimizerSettings:
    training, warmup = config.training, warmup_steps(config, steps)
    return OptimizerSettings(
        learning_rate=training.learning_rate,
        betas=(training.betas[0], training.betas[1]),
        eps=training.eps,
        weight_decay=training.weight_decay,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=steps,
        max_grad_norm=training.max_grad_norm,
        min_lr=training.min_lr,
        cycles=training.lr_num_cycles,
        decay_steps=decay_steps(training, steps, warmup),
        decay_type=training.lr_decay_type,
        optimizer=training.optimizer,
        momentum=training.muon_momentum,
        adjust_lr=training.muon_adjust_lr,
    )


def needed_paths(config: Config, checkpoint: Path | None) -> dict[str, dict[str, str]]:
    """Paths that must be on the nodes of each part's ranks and of the dataset actor ("data"), by configuration key."""
    model = model_name(config)  # all parts' and the processors'; a hub id is found by each node itself
    shared = {f"{DECODER}.model_name": model} if Path(model).is_dir() else {}
    of_ranks = shared | ({} if checkpoint is None else {"training.resume": str(checkpoint)})
    read = read_datasets(config.data)
    entries = {f"data.data_registry.{name}": config.data.data_registry[name] for name in read}
    files = {f"{key}.annotation_path": entry.annotation_path for key, entry in entries.items()}
    folders = {f"{key}.data_path": entry.data_path for key, entry in entries.items() if entry.data_path}
    near = {key: path for key, path in (files | folders).items() if not is_remote(path) and "{" not in path}
    kept = {} if config.data.cache_features is None else {"data.cache_features": config.data.cache_features}
    of_encoders = dict.fromkeys(encoders(config), of_ranks | kept)
    of_parts = dict.fromkeys(parts(config), of_ranks) | of_encoders
    for name, folder in begins_of(config).items() if checkpoint is None else ():
        of_parts[name] = of_parts[name] | {f"{name}.lora.begin_from": folder}
    return of_parts | {"data": shared | near | kept}


def resume_line(config: Config, newest: Path | None) -> str:
    """The command that goes on after the newest checkpoint of a run that was stopped."""
    own = Path(str(config.training.checkpoint_dir)).absolute()
    if newest is None or newest.parent != own:
        return "there is no checkpoint of this run yet; training.save_steps says when there is one"
    words = [f"--config-path={Path(config.run_dir).absolute()}", "--config-name=config", "training.resume=auto"]
    words += ["overwrite=false"] if config.overwrite else []
    return shlex.join(shell_command("train", *words))


ADAPTERS = " adapters"  # after the name of their part
_HEADINGS = ("part", "group", "parameters", "learning rate", "weight decay", "warm-up")


def table_of_training(plan: RunPlan) -> list[str]:
    """Lines that say what is trained and how: a row for each group of each part, one for what of it is frozen."""
    training, family, rules = plan.config.training, plan.family, plan.rules
    rows, counts, trained = Counter[tuple[str, ParameterGroup | None]](), 0, 0
    for one in plan.parameters:
        label = PROJECTOR if is_inside(one.name, family.parts[one.part].projector) else one.part
        label += ADAPTERS if is_adapter(one.name) else ""
        default = ParameterGroup(rules.default_name(one.part), training.learning_rate, training.weight_decay, -1)
        on = one.used and rules.trains(one.name)
        rows[label, rules.group(one.name, default) if on else None] += one.size
        counts += one.size
        trained += one.size if on else 0
    order = [name + kind for name in part_names(family) for kind in ("", ADAPTERS)]
    lines = sorted(rows.items(), key=lambda item: (order.index(item[0][0]), item[0][1] is None))
    body = [_row(label, group, size, training) for (label, group), size in lines]
    total = f"{trained:,} of {counts:,} parameters are trained ({100 * trained / max(counts, 1):.3g}%)"
    return [*aligned([_HEADINGS, *body], left=2), total]


def _row(label: str, group: ParameterGroup | None, size: int, training: TrainingConfig) -> tuple[str, ...]:
    if group is None:
        return (label, "frozen", f"{size:,}", "-", "-", "-")
    warmup = group.warmup_steps if group.warmup_steps >= 0 else training.warmup_steps
    warmup_text = f"{training.warmup_ratio:.3g} of all steps" if warmup is None else f"{warmup} steps"
    return (label, group.name, f"{size:,}", f"{group.learning_rate:.3g}", f"{group.weight_decay:.3g}", warmup_text)


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
        found[f"{CONTENTS} {DECODER}.model_name"] = fingerprint(weight_files(model))
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
