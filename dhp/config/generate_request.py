"""Reads the request and layout of `python -m dhp generate`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml

from dhp.config.data import DataConfig, LimitsConfig
from dhp.config.layout import resolve_part
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.schema import Config, PartConfig
from dhp.config.training import without_evaluation
from dhp.core.errors import ConfigError
from dhp.core.parameters import EXACT_STATES
from dhp.core.text import did_you_mean, nearest

# Degrees that a run's own config.yaml has filled in, resolved again for another parallelism or number of actors.
_LAYOUT: dict[str, str] = {
    **dict.fromkeys(("pipeline", "data", "ulysses", "ring", "tensor", "cuts", "partition"), "null"),
    **{"expert": "1", "virtual_stages": "1", "zero_stage": "0", "zero_engine": "auto"},
}
# What steps are taken with, of which answers need none.
_OF_STEPS: dict[str, Any] = {"state_bytes": EXACT_STATES, "host_moments": False, "sequence_sharded_norms": False}
_IN_TRAINING = {"deepspeed": "data", "autotp": "tensor"}  # the same slices, without the states of training


@dataclass(frozen=True)
class GenerateRequest:
    """Settings of the command alone, in the order in which its help tells them."""

    prompt: str = ""
    """What the user says, after the images and videos."""

    images: list[str] = field(default_factory=list)
    """Files, shown in this order."""

    videos: list[str] = field(default_factory=list)
    """Files, shown behind the images."""

    dataset: str = ""
    """In the place of a prompt: a name from data.data_registry. Each sample is asked up to its first learned answer;
    `name%50` asks half of them."""

    checkpoint: str = ""
    """A run, a checkpoint or the directory of a Hugging Face model. Empty: the configuration's model."""

    max_new_tokens: int = 128
    """The answer ends there, or before with a token that ends one."""

    temperature: float = 0.0
    """0: the likeliest token each time. Above: tokens are drawn; the configuration's seed decides which."""

    top_p: float = 1.0
    """Of the likeliest tokens as few as have that share of all together."""

    top_k: int = 0
    """Of the likeliest tokens so many. 0: all."""

    out: str = ""
    """JSON file for token_ids and text; of a dataset, JSONL with a line an answer. Empty: the text is printed alone."""


def read_request(arguments: Sequence[str]) -> tuple[GenerateRequest, list[str]]:
    """The request among key=value arguments, and the others, which are the configuration's. Raises ConfigError."""
    known = {one.name: one for one in fields(GenerateRequest)}
    values: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in known:
            _check_known(key, bool(equals), list(known))
            rest.append(argument)
        elif key in values:
            raise ConfigError(f"{key} is given twice; give it once")
        else:
            values[key] = _read(key, value, known[key].default)
    request = GenerateRequest(**values)
    _check(request)
    return request, rest


def _check_known(key: str, is_setting: bool, known: list[str]) -> None:
    """Raises ConfigError for what is neither a key of the request nor one that a configuration may have."""
    whole = key.lstrip("+~")
    sections = [one.name for one in fields(Config)]
    if is_setting and "." not in whole and "/" not in whole and whole not in sections:
        raise ConfigError(
            f"{key} is no setting of generate, which has {', '.join(known)}, and the configuration's"
            f"{did_you_mean([nearest(whole, [*known, *sections])])}"
        )


def _read(key: str, value: str, default: Any) -> Any:
    if isinstance(default, str):
        return value
    if isinstance(default, (int, float)):
        try:
            return type(default)(value)
        except ValueError:
            raise ConfigError(f"{key}={value} is no {type(default).__name__}") from None
    try:
        found = yaml.safe_load(value) if value.startswith("[") else [value] if value else []
    except yaml.YAMLError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f"{key}={value} is no list of files; write {key}=[a.png,b.png], with quotes around odd names")
    return found


def _check(request: GenerateRequest) -> None:
    asks = bool(request.prompt.strip() or request.images or request.videos)
    if request.dataset and asks:
        raise ConfigError(
            f"dataset={request.dataset} asks what its samples ask, and a prompt, images or videos are given beside it. "
            "Keep one of the two"
        )
    if request.dataset and not request.out:
        raise ConfigError(f"dataset={request.dataset} needs a file for the answers; add out=answers.jsonl")
    if not (asks or request.dataset):
        raise ConfigError(
            "prompt is missing; add for example prompt='What is this?', or dataset=NAME out=answers.jsonl"
        )
    if request.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={request.max_new_tokens} is out of range: max_new_tokens >= 1")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise ConfigError(f"temperature={request.temperature} is out of range: temperature >= 0 and finite")
    if not 0 < request.top_p <= 1:
        raise ConfigError(f"top_p={request.top_p} is out of range: 0 < top_p <= 1")
    if request.top_k < 0:
        raise ConfigError(f"top_k={request.top_k} is out of range: top_k >= 0")
    if request.temperature == 0 and (request.top_k or request.top_p < 1):
        raise ConfigError("top_p and top_k bound what is drawn, and temperature=0 draws nothing; set a temperature")


def laid_out_anew(overrides: Sequence[str]) -> list[str]:
    """Overrides of a run's own config.yaml, before which the degrees that it filled in are unset for each part whose
    parallelism or number of actors they change."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    changed = [name for name in parts(Config()) if {f"{name}.parallelism", f"{name}.num_actors"} & given]
    unset = [f"{name}.{key}={value}" for name in changed for key, value in _LAYOUT.items()]
    return [one for one in unset if one.partition("=")[0] not in given] + list(overrides)


def answering(config: Config, dataset: str = "") -> Config:
    """The configuration without what training alone needs: sharded states, replicas of the decoder, all data but the
    dataset of prompts.

    Raises ConfigError, with what to set, for a decoder in a layout that cannot generate."""
    own: dict[str, Any] = {name: _answering_part(name, part) for name, part in parts(config).items()}
    data = replace(unbalanced(config.data), eval_datasets=[], cache_features=None, cache_features_gib=None)
    if dataset:
        data = replace(data, datasets=[dataset], shuffle=False)
    else:
        data = replace(data, datasets=[], data_registry={}, on_bad_sample="error")
    training = replace(config.training, batch_size=1, micro_batch_size=1, schedule="sequential", dry_run=False)
    training = replace(without_evaluation(training), resume="never", trace=False, loggers=[])
    memory = replace(config.memory, accounting=False, budget_gib=None)
    whole = replace(config, data=data, training=training, memory=memory, **own)
    return replace(whole, tiny_assets=None, overwrite=False)


def _answering_part(name: str, part: PartConfig) -> PartConfig:
    part = resolve_part(name, replace(part, **_OF_STEPS))
    if name == DECODER:
        check_layout(part, f"set {name}.parallelism=tensor, sequence or none, with {name}.num_actors to match")
        replicas = resolved(part.data)
        part = replace(part, data=1, num_actors=part.num_actors // replicas)
    kind = _IN_TRAINING.get(part.parallelism, part.parallelism)
    kind = "none" if part.num_actors == 1 else kind
    part = replace(part, parallelism=kind, zero_stage=0, zero_engine="auto", compile=False)
    return replace(part, recompute="none", activation_checkpointing=False)


def check_layout(part: PartConfig, remedy: str) -> None:
    """Raises ConfigError for a resolved decoder no rank of which has all layers with all experts. remedy: what to do
    instead."""
    if resolved(part.pipeline) > 1:
        raise ConfigError(
            f"{DECODER}.pipeline={part.pipeline}: a new token would go through all stages one behind another, and that "
            f"is not done here; {remedy}"
        )
    if part.expert > 1:
        raise ConfigError(
            f"{DECODER}.expert={part.expert}: replicas that share out experts exchange tokens of all of them, and an "
            f"answer has one; {remedy}"
        )


def unbalanced(data: DataConfig) -> DataConfig:
    """The data settings with equally many samples in each row, and without keys of balanced rows."""
    balancing = ("balance", "balance_window", "long_tokens", "isf_passes")
    defaults = {key: getattr(DataConfig, key) for key in balancing}
    return replace(data, limits=LimitsConfig(), fullest_first=False, **defaults)
