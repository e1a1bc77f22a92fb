"""Checks a run before any actor starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dhp.checkpoint.folder import step_folders
from dhp.checkpoint.resume import AUTO, NEVER
from dhp.cluster.address import SUBMITTED
from dhp.config.layout import resolve_part
from dhp.config.parts import HEARING, model_name, parts
from dhp.config.resolve import check_model_dir, resolve
from dhp.config.rules import FLASH_ATTENTION_2
from dhp.config.run_dir import check_run_dir
from dhp.config.schema import Config
from dhp.config.steps import micro_batches
from dhp.config.vocabulary import environment_notes
from dhp.core.errors import ConfigError, DhpError, raise_all
from dhp.core.files import is_remote
from dhp.core.graph import StageGraph
from dhp.core.process import say_nothing
from dhp.data.remote.places import missing_data
from dhp.data.sample.chat import read_template
from dhp.models.family import VISION
from dhp.models.registry import import_plugins

if TYPE_CHECKING:
    from dhp.core.batch import FeatureSettings, KeepSettings
    from dhp.models.family import Family
    from dhp.plan.run_plan import RunPlan


def prepare(
    config: Config, new_run: bool = True, say: Callable[[str], None] = say_nothing, reads: bool = True
) -> Config:
    """The resolved configuration, after every check that needs no actor; with `new_run`, of run_dir too.

    Makes the tiny model and dataset first, when tiny_assets asks for them. For a dry run the data need not be there,
    and the model may be a hub id whose shape dhp ships. For a new run that a bad sample would end, some samples are
    checked. reads: datasets are read. say: receives a line when something that takes time begins. Raises ConfigError,
    ModelError or DataError."""
    say("checking the configuration")
    for note in environment_notes(os.environ) if new_run else ():
        say(note)
    import_plugins(config.plugins)
    try:
        config = resolve(config, reads)
    except ConfigError as error:
        raise_all([error, *_also_wrong(config, str(error))])
        raise
    if new_run:
        check_run_dir(config)
        _look_at_folders(config, say)
    if new_run and not config.training.dry_run:
        from dhp.trainer.step_reports import require_loggers  # it imports Ray

        require_loggers(config)
    if config.tiny_assets is not None:
        from dhp.tiny.tiny_model import make_tiny  # imports torch, as all below that are imported where they are used

        make_tiny(config, config.tiny_assets, say)
    check_model_dir(model_name(config))
    read_template(config.data.chat_template)
    if not config.training.dry_run:
        for missing in missing_data(config):
            raise ConfigError(missing)
    _fix_paths(config)
    say(f"checking the model {model_name(config)}")
    config, family = _check_model(config, new_run, say)
    _check_packages(config)
    for name, part in parts(config).items():
        for axis in family.parts[name].uneven_axes(part):
            say(
                f"{name}.{axis}={getattr(part, axis)} does not divide the heads: some actors compute more of them than "
                "others"
            )
    if config.data.cache_features is not None and not config.training.dry_run:
        check_folder(config)
    if new_run and not config.training.dry_run:
        _look_at_processors(config, family)
        end = _look_at_answers(config, family, say)
        _look_at_samples(config, family, say, end)
        _look_at_videos(config, family, say)
    return config


def _resumes(config: Config) -> bool:
    """Whether the run goes on from a checkpoint."""
    resume, checkpoints = config.training.resume, Path(str(config.training.checkpoint_dir))
    return bool(step_folders(checkpoints)) if resume == AUTO else resume != NEVER


def _look_at_folders(config: Config, say: Callable[[str], None]) -> None:
    """Say where results would go with Ray's cache, and where a run that is to go on has nothing to go on with."""
    checkpoints = Path(str(config.training.checkpoint_dir)).absolute()
    for key, folder in (("run_dir", Path(config.run_dir).absolute()), ("training.checkpoint_dir", checkpoints)):
        if SUBMITTED in os.environ and "runtime_resources" in folder.parts:
            say(
                f"warning: {key}={folder} lies in Ray's cache of the job's working directory, which Ray empties. Give "
                f"an absolute path outside of it, as {key}=$PWD/runs/first where the job is submitted"
            )
            break
    if config.training.resume == AUTO and not step_folders(checkpoints):
        say(
            f"training.resume=auto: {checkpoints} has no checkpoint, so the run begins at step 1. The same command "
            "goes on with it where run_dir is fixed"
        )


def _look_at_samples(config: Config, family: Family, say: Callable[[str], None], end: str) -> None:
    from dhp.data.sampling.probe import check_some_samples
    from dhp.models.config_file import tell_positions
    from dhp.objectives.objectives import OBJECTIVES

    looked = [*config.data.datasets, *config.data.eval_datasets]
    say(f"looking at some samples of {', '.join(looked)}")
    hears = HEARING in parts(config)
    data, skips = config.data, config.data.on_bad_sample == "skip"
    unseen, behind = family.processor.no_videos, tell_positions(data.positions, family)
    more = (data.allow_http, hears, skips, unseen, end, behind, OBJECTIVES[config.training.objective].compares)
    for note in check_some_samples(looked, data.data_registry, config.seed, *more):
        say(note)


def _look_at_answers(config: Config, family: Family, say: Callable[[str], None]) -> str:
    """The text of the token by which the chat template ends an answer. Say where there is none: the model would not
    learn to stop. Raises ModelError for a tokenizer with more tokens than the model."""
    from dhp.batch.reader import check_vocabulary
    from dhp.data.sample.template_check import find_answer_end
    from dhp.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model_name(config), read_template(config.data.chat_template) or "")
    check_vocabulary(model_name(config), tokenizer, family)
    end = find_answer_end(tokenizer) if tokenizer.chat_template else None
    if tokenizer.chat_template and end is None:
        say(
            "warning: the chat template writes no token behind an answer, so the model does not learn to stop: its "
            "answers will reach the limit of tokens. Name one that writes an end of turn in data.chat_template"
        )
    return "" if end is None else str(tokenizer.decode([end]))


def _also_wrong(config: Config, message: str) -> list[ConfigError]:
    """Where degrees of a part are refused with `message`: what the model's heads and layers would refuse next, as far
    as it does not depend on ZeRO, so that both mistakes are shown at once."""
    named = next((part.model_name for part in parts(config).values() if part.model_name), "")
    if not named or not any(f"{name}." in message for name in parts(config)):
        return []
    from dhp.models.pretrained import config_source
    from dhp.models.registry import load_family

    found = []
    try:
        family = load_family(config_source(named) if config.training.dry_run else named)
    except DhpError:  # which is raised when the rest is right
        return []
    for name, part in parts(config).items():
        kind = "data" if part.parallelism == "deepspeed" else part.parallelism
        plain = replace(part, zero_stage=0, zero_engine="auto", parallelism=kind)
        try:
            if name in family.parts:
                family.parts[name].check(resolve_part(name, plain))
        except DhpError as error:
            found += [] if str(error) in message or not isinstance(error, ConfigError) else [error]
    return found


def _check_packages(config: Config) -> None:
    """Packages that ranks of a Ray of our own need; on the nodes of a running cluster, each rank looks for itself."""
    if config.cluster.address != "local" or config.training.dry_run:
        return
    for name, part in parts(config).items():
        if part.attention_backend == FLASH_ATTENTION_2:
            from dhp.parallel.attention.attention_kernels import require_package

            require_package(f"{name}.attention_backend")
        if part.lora.quantization is not None:
            from dhp.models import quantized

            quantized.require_package(f"{name}.lora.quantization")


def _fix_paths(config: Config) -> None:
    """Actors of a running cluster start in a directory of their own, so no path may depend on this process's."""
    for part in parts(config).values():
        if Path(part.model_name).is_dir():
            part.model_name = str(Path(part.model_name).absolute())
        if part.lora.begin_from is not None:
            part.lora.begin_from = str(Path(part.lora.begin_from).absolute())
    if config.data.chat_template is not None:
        config.data.chat_template = str(Path(config.data.chat_template).absolute())
    if config.data.cache_features is not None:
        config.data.cache_features = str(Path(config.data.cache_features).absolute())
    for entry in config.data.data_registry.values():
        if not is_remote(entry.annotation_path):
            entry.annotation_path = str(Path(entry.annotation_path).absolute())
        if entry.data_path and not is_remote(entry.data_path):
            entry.data_path = str(Path(entry.data_path).absolute())


def _look_at_processors(config: Config, family: Family) -> None:
    """Raises ModelError where the library's processors of the model cannot be made here: some need torchvision."""
    from PIL import Image

    from dhp.models.pretrained import load_image_processor

    images, own = load_image_processor(model_name(config)), family.processor
    if own.placeholder is not None:  # a family without code asks the library's processor for all that its prompts have
        own.patches(images(images=[Image.new("RGB", (224, 224))], return_tensors="np", **own.image_arguments))
    if own.hearing is not None and HEARING in parts(config):
        own.hearing.load()


def _look_at_videos(config: Config, family: Family, say: Callable[[str], None]) -> None:
    """Say where frames are scaled otherwise than by the model's own video processor."""
    from dhp.models.pretrained import load_image_processor
    from dhp.models.processor_files import KIND, WHOLE, find_frame_size, read_video_settings

    if not family.processor.sees_videos:
        return
    rule, own = find_frame_size(model_name(config), family.config), read_video_settings(model_name(config))
    bounds = {key: getattr(config.data, key) for key in ("video_max_pixels", "max_pixels", "min_pixels")}
    given = ", ".join(f"data.{key}={value}" for key, value in bounds.items() if value is not None)
    if rule is not None and given:
        say(f"videos are scaled frame by frame ({given}); the model's own {rule.kind} has {rule}")
    elif rule is None and own and own.get(KIND) not in WHOLE:
        images = load_image_processor(model_name(config))
        size = given or {edge: pixels for edge, pixels in dict(images.size or {}).items() if pixels}
        say(f"videos are scaled as images are ({size}); the model's own {own.get(KIND)} has {own.get('size')}")


def _check_model(config: Config, saves: bool, say: Callable[[str], None]) -> tuple[Config, Family]:
    """Degrees, plans and cuts against the model's heads and layers, and the schedule against the stages; the
    configuration with what it does in the place of what the model has not, and the model's family. saves: what
    checkpoints take along too."""
    from dhp.models.registry import load_family
    from dhp.objectives.objectives import find_objective
    from dhp.plan.equivalents import take_no_states, take_whole_pictures
    from dhp.plan.model_checks import check_fit, check_plan, having_parts
    from dhp.plan.run_plan import plan_run
    from dhp.plan.trainable import check_frozen_states
    from dhp.step.schedule import make_schedule

    find_objective(config.training.objective)
    source = model_name(config)
    if config.training.dry_run:
        from dhp.models.pretrained import config_source

        source = config_source(source)
    family = having_parts(config, load_family(source))
    config, notes = take_whole_pictures(config, family)
    check_fit(config, family)
    for name, part in parts(config).items():
        check_plan(name, part, source, family)
    plan = plan_run(config, source)
    _check_rules(plan, begins=saves and not _resumes(config))
    trains = {name: any(stage.trains for stage in plan.graph.of_part(name)) for name in parts(config)}
    config, more = take_no_states(config, trains)
    if more:
        plan = plan_run(config, source)
    for note in (*notes, *more):
        say(note)
    check_frozen_states(config, plan.graph)
    check_features(config, plan.graph)
    make_schedule(config.training.schedule, plan.graph, micro_batches(config))
    if Path(model_name(config)).is_dir() and not config.training.dry_run:
        from dhp.models.pretrained import auxiliary_files, check_weight_files

        check_weight_files(Path(model_name(config)))
        if saves:
            auxiliary_files(model_name(config))  # or the first checkpoint would be the first to say so
    return config, family


def _check_rules(plan: RunPlan, begins: bool) -> None:
    """Raises ConfigError for rules of training that match nothing in the model, or leave nothing to train. begins:
    whether the run may begin from adapters, and not from a checkpoint."""
    from dhp.plan.trainable import begins_of, check_rules, part_names

    if plan.adapters:
        from dhp.models.empty import check_adapters
        from dhp.models.quantized import check_quantized
        from dhp.plan.count.traced import check_draws

        begin = begins_of(plan.config) if begins else {}
        check_adapters(plan.source, plan.family, plan.adapters, begin, model_name(plan.config))
        check_quantized(plan.family, plan.adapters)
        for name, asked in plan.adapters.items():
            check_draws(plan.source, plan.family, name, asked)
    training = plan.config.training
    if training.trainable or training.frozen or training.groups:
        check_rules(plan.rules, plan.parameters, part_names(plan.family))


GIB = 1 << 30


def check_features(config: Config, graph: StageGraph) -> None:
    """Raises ConfigError where the encoder's features would change as it is trained."""
    where = config.data.cache_features
    if where is None:
        return
    if any(stage.trains for stage in graph.of_part(VISION)):
        raise ConfigError(
            f"data.cache_features={where} with something of {VISION} trained: what is kept of a picture would be that "
            "of other weights after the first step. "
            f"Set training.frozen=[{VISION},projector] and {VISION}.zero_stage=0 without {VISION}.lora, or leave "
            "data.cache_features out."
        )


def check_folder(config: Config) -> None:
    """Raises ConfigError where the folder cannot be written."""
    if config.data.cache_features is not None:
        from dhp.checkpoint.feature_folder import FeatureFolder

        FeatureFolder(Path(config.data.cache_features)).check()


def feature_settings(config: Config) -> FeatureSettings | None:
    """Settings for readers to look features up; None where none are saved. Reads the encoder's weights, which takes
    seconds."""
    where = config.data.cache_features
    if where is None:
        return None
    from dhp.core.batch import FeatureSettings
    from dhp.models.empty import digest_tower

    return FeatureSettings(where, digest_tower(model_name(config), parts(config)[VISION].dtype, parts(config)))


def keep_settings(config: Config, graph: StageGraph) -> dict[str, KeepSettings]:
    """Settings of the ranks of each part that write features; the bytes that there is room for are shared evenly."""
    where, most = config.data.cache_features, config.data.cache_features_gib
    if where is None:
        return {}
    room = None
    if most is not None:
        degrees = graph.of_part(VISION)[0].degrees
        from dhp.checkpoint.feature_folder import FeatureFolder

        left = int(most * GIB) - FeatureFolder(Path(where)).nbytes()
        room = max(left, 0) // (degrees.data * degrees.sequence)
    from dhp.core.batch import KeepSettings

    return {VISION: KeepSettings(where, room)}


def reference_digest(config: Config) -> str:
    """Digest of the model that preferences are compared with: where it is, its files, and what it computes in; "": the
    objective compares with none."""
    from dhp.objectives.objectives import OBJECTIVES

    if not OBJECTIVES[config.training.objective].refers:
        return ""
    from dhp.models.empty import digest_files

    begun = config.training.preference.reference == "start"
    sections = parts(config)
    folders = [one.lora.begin_from for one in sections.values() if begun and one.lora.rank and one.lora.begin_from]
    formats = [f"{name} {part.dtype}" for name, part in sections.items()]
    return digest_files([model_name(config), *folders], formats)
