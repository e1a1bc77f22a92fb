"""Makes settings of ranks, and a table of trained parameters."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dhp.checkpoint.resume import OPTIMIZER
from dhp.config.parts import DECODER, encoders, model_name, parts, read_datasets, resolved, split_share
from dhp.config.ranges import decay_steps
from dhp.config.resolve import warmup_steps
from dhp.config.schema import Config, PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.batch import KeepSettings
from dhp.core.files import is_remote
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import ALL, AdapterSettings, ParameterGroup, TrainingRules, is_adapter, is_inside
from dhp.core.text import aligned, shell_command
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.plan.run_plan import RunPlan
from dhp.plan.stage_graph import stage_choices
from dhp.plan.trainable import PROJECTOR, adapters_of, part_names

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
        measure=measures(config) and goes_back,
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
    return dict.fromkeys(parts(config), of_ranks) | of_encoders | {"data": shared | near | kept}


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
