"""From a resolved configuration to the settings of ranks and of the dataset actor, plain values."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dhp.checkpoint.resume import OPTIMIZER
from dhp.config.learning_rate import decay_steps
from dhp.config.part import PartConfig
from dhp.config.parts import DECODER, encoders, model_name, parts, read_datasets, resolved, split_share
from dhp.config.resolve import warmup_steps
from dhp.config.rules import read_kernels
from dhp.config.schema import Config
from dhp.core.addresses import is_remote
from dhp.core.batch import KeepSettings
from dhp.core.command import own_command
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import ALL, AdapterSettings, TrainingRules
from dhp.engine.settings import OptimizerSettings, StageSettings
from dhp.trainer.graph import stage_choices
from dhp.trainer.trainable import adapters_of

FULLEST_FIRST = "the fullest steps come first (data.fullest_first)"  # said at the beginning, where it is so


def measures(config: Config) -> bool:
    """Whether ranks report what activations take: where asked for, and where a plan is made of it."""
    return config.memory.accounting or any(part.recompute == "auto" for part in parts(config).values())


def kept_settings(config: Config) -> dict[str, Any]:
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
    """Adapter settings as JSON gives them back."""
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
    where those of its part are kept.
    """
    part: PartConfig = getattr(config, stage.part)
    goes_back = any(graph.goes_back(node) for node in stage.nodes)
    return StageSettings(
        spec=stage,
        graph=graph,
        model_name=part.model_name,
        dtype=part.dtype,
        device=device,
        recompute=stage_choices(resolved(part.recompute) if goes_back else "none", graph, stage),
        measure=measures(config) and goes_back,
        zero_stage=part.zero_stage,
        zero_engine=part.zero_engine,
        sequence_sharded_norms=part.sequence_sharded_norms,
        state_bytes=part.state_bytes,
        host_moments=part.host_moments,
        autotp=part.parallelism == "autotp",
        packing=config.data.packing,
        update=_optimizer_settings(config, steps),
        seed=config.seed,
        exclusive_sums=graph.sharing() > 1 and device == "cuda",
        attention_backend=part.attention_backend,
        kernels=read_kernels(stage.part, part.kernels),
        compiled=part.compile,
        mlp_chunks=part.mlp_chunks,
        rules=rules,
        adapters=adapters_of(config).get(stage.part),
        resume_from=None if checkpoint is None else str(checkpoint / stage.part),
        features=features,
        resume_states=states,
        deterministic=config.training.deterministic,
        objective=config.training.objective,
        plugins=tuple(config.plugins),
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
    return shlex.join(own_command("train", *words))
