"""Resolves a part's degrees and what its layers recompute."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from dhp.config.ranges import check_lora, require, require_choice, require_positive, resolve_lora, with_plugins
from dhp.config.rules import DEEPSPEED, FSDP, PART_RULES, check_formats, check_rules, check_state_bytes
from dhp.config.schema import PartConfig
from dhp.core.errors import ConfigError
from dhp.core.text import did_you_mean, nearest

# What a layer recomputes in backward, from nothing to everything; each recomputes what the one before does, and more:
# light, what costs no matrix product (norms, rotary positions, activation functions); mlp, the products before the
# activation function; linear, all but the attention itself; all, the whole layer; offload, the same, with what enters
# the layer in host memory.
OFFLOAD = "offload"
CHOICES = ("none", "light", "mlp", "linear", "all", OFFLOAD)
WORDS = ("none", "full", "auto")
_ITEM = re.compile(r"(?:(?P<choice>[a-z]+)(?::|$))?(?P<first>\d+)?(?:-(?P<last>\d+))?")


def read_choices(text: str, layers: int, key: str = "recompute") -> tuple[str, ...]:
    """What each of `layers` layers recomputes, one of CHOICES. auto, which the planner decides later: all.

    `text`: none | full | auto, or items with commas between them, each a layer (7) or a range of them (0-3), with or
    without what they recompute before it (mlp:0-3), which goes for the items after it too and is "all" at first; a
    choice alone (light) is for every layer. What no item names keeps everything. Raises ConfigError."""
    if text in WORDS:
        return ("none" if text == "none" else "all",) * layers
    found = ["none"] * layers
    choice = "all"
    for item in text.replace(" ", "").split(","):
        match = _ITEM.fullmatch(item)
        if match is None or not item:
            raise _unreadable(key, text, item)
        choice = match["choice"] or choice
        if choice not in CHOICES:
            raise _unreadable(key, text, choice)
        if match["first"] is None and (item != choice or match["last"]):
            raise _unreadable(key, text, item)
        first = 0 if match["first"] is None else int(match["first"])
        last = layers - 1 if match["first"] is None else int(match["last"] or first)
        if not first <= last < layers:
            raise ConfigError(
                f"{key}={text}: {item} is not among the {layers} layers; give layers from 0 to {layers - 1}, "
                "the first of a range before its last"
            )
        found[first : last + 1] = [choice] * (last + 1 - first)
    return tuple(found)


def resolve_recompute(name: str, part: PartConfig) -> str:
    """What the part (as "vision" or "text") recomputes, activation_checkpointing considered. Raises ConfigError."""
    text, checkpointing = part.recompute, part.activation_checkpointing
    if text is None:
        return "full" if checkpointing else "none"
    if checkpointing and text != "full":
        raise ConfigError(
            f"{name}.activation_checkpointing=true means {name}.recompute=full, and {name}.recompute={text} is given "
            f"too. Keep {name}.recompute alone."
        )
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    read_choices(text, max(numbers, default=0) + 1, f"{name}.recompute")
    return text


def check_mlp_chunks(name: str, part: PartConfig, mlp: Sequence[str]) -> None:
    """Raises ConfigError where MLPs cannot compute some tokens at a time. mlp: names of modules in one, in a layer."""
    key, chunks = f"{name}.mlp_chunks", part.mlp_chunks
    if chunks == 1:
        return
    require_positive(key, chunks)
    if not all("." in one for one in mlp) or not mlp:
        raise ConfigError(f"{key}={chunks}: the MLPs of this model's {name} part are no modules of their own. Set 1.")


def _unreadable(key: str, text: str, item: str) -> ConfigError:
    known = [*WORDS, *CHOICES[1:]]
    return ConfigError(
        f"{key}={text} cannot be read: {item or 'an empty item'}. Give none, full, auto, layers as 0-3,7, or what "
        f"layers recompute as mlp:0-15,all:16-31 ({', '.join(CHOICES)}){did_you_mean([nearest(item, known)])}"
    )


DEGREES = ("pipeline", "data", "ulysses", "ring", "tensor")
PARALLELISMS = {
    "vision": ("none", "data", "sequence", "tensor", "pipeline", "deepspeed"),
    "audio": ("none", "data", "sequence", "pipeline", "deepspeed"),
    "text": ("none", "data", "sequence", "tensor", "pipeline", "deepspeed", "autotp"),
}
OFFERED = {
    "vision": ("pipeline", "data", "ulysses", "ring", "tensor"),
    "audio": ("pipeline", "data", "ulysses"),
    "text": ("pipeline", "data", "ulysses", "ring", "tensor"),
}  # what may be above 1
# Other names of a parallelism.
_MEANT = {
    **dict.fromkeys(("ulysses", "ring", "context", "cp", "sp"), "sequence"),
    **dict.fromkeys(("tp", "megatron"), "tensor"),
    **dict.fromkeys(("pp", "gpipe"), "pipeline"),
    **dict.fromkeys(("dp", "ddp"), "data"),
    **dict.fromkeys(("zero", "fsdp"), "deepspeed"),
}

# The degree that a parallelism names.
_NAMED_DEGREE = {
    "data": "data",
    "sequence": "ulysses",
    "tensor": "tensor",
    "pipeline": "pipeline",
    "deepspeed": "data",
    "autotp": "tensor",
}
# Which name a layout with several degrees above 1 gets where all are set: the first one's.
NAMES = {"tensor": "tensor", "ulysses": "sequence", "ring": "sequence", "pipeline": "pipeline", "data": "data"}
PLAINEST = ("data", "ulysses", "tensor", "ring", "pipeline")  # first, of layouts that are as good as each other
FREE = ("data", "pipeline", "ulysses", "tensor")  # degrees of which one may take what the others leave
SEQUENCE_GROUPS = ("auto", "one")
EXACT, BMP, PARAMETERS = PARTITIONS = ("exact", "bmp", "parameters")
PARTITION_KEYS = ("partition", "partition_radius", "partition_candidates", "partition_trials")
LAYERS = "layers"  # how interleaved runs are cut; no choice
# Other names of a partition.
_MEANT_PARTITIONS = {
    **dict.fromkeys(("parameter", "params"), PARAMETERS),
    **dict.fromkeys(("auto", "balanced", "dp"), EXACT),
    "omnibal": BMP,
}
GIVEN, PLANNED, FREED = LAYOUTS = ("given", "auto", "free")  # where a run's layout is from
ZERO_STAGES = ("0", "1", "2", "3")
ZERO_ENGINES = ("auto", DEEPSPEED, FSDP)


def resolve_part(name: str, part: PartConfig) -> PartConfig:
    """A copy of the part ("vision", "audio" or "text") with every degree a number. Raises ConfigError."""
    require_choice(f"{name}.parallelism", part.parallelism, PARALLELISMS[name], _MEANT)
    for key in ("num_actors", *DEGREES, "virtual_stages", "expert"):
        if getattr(part, key) is not None:
            require_positive(f"{name}.{key}", getattr(part, key))
    check_formats(name, part)
    require_choice(f"{name}.sequence_groups", part.sequence_groups, SEQUENCE_GROUPS)
    require_choice(f"{name}.zero_stage", str(part.zero_stage), ZERO_STAGES)
    require_choice(f"{name}.zero_engine", part.zero_engine, ZERO_ENGINES)
    check_state_bytes(name, part)
    _check_none(name, part)
    degrees = _filled(name, part, {degree: getattr(part, degree) for degree in DEGREES})
    _check_product(name, part.num_actors, degrees)
    _check_existing(name, part, degrees)
    differ = degrees["tensor"] > 1 or part.expert > 1  # replicas, or their ranks, hold different weights
    engine = part.zero_engine if part.zero_engine != "auto" else FSDP if differ else DEEPSPEED
    filled: dict[str, Any] = {**degrees, "lora": resolve_lora(part.lora), "zero_engine": engine}
    found = replace(part, recompute=resolve_recompute(name, part), **filled)
    check_lora(name, found)
    check_rules(PART_RULES, name, found)
    _check_cuts(name, part, degrees["pipeline"])
    _check_partition(name, part)
    if found.zero_stage and engine == FSDP:
        _check_fsdp(name, part, degrees["tensor"])
    return found


def equation(degrees: dict[str, int]) -> str:
    """`data(1) × ulysses(2) × ring(1) × tensor(1)`, with the stages of a pipeline where there are several."""
    return " × ".join(f"{degree}({value})" for degree, value in degrees.items() if (degree, value) != ("pipeline", 1))


def _filled(name: str, part: PartConfig, degrees: dict[str, int | None]) -> dict[str, int]:
    named = _NAMED_DEGREE.get(part.parallelism)
    filled = {degree: 1 if value is None else value for degree, value in degrees.items()}
    if named is None or degrees[named] is not None:
        return filled
    others = {degree: value for degree, value in filled.items() if degree != named}
    if part.num_actors % prod(others.values()):
        raise ConfigError(
            f"{name}.num_actors={part.num_actors} leaves no whole number for {name}.{named}: "
            f"{equation(others)} = {prod(others.values())} does not divide num_actors({part.num_actors}). "
            f"Set {name}.num_actors to a multiple of {prod(others.values())}, or change a degree."
        )
    return filled | {named: part.num_actors // prod(others.values())}


def _check_product(name: str, num_actors: int, degrees: dict[str, int]) -> None:
    product = prod(degrees.values())
    if product != num_actors:
        raise ConfigError(
            f"{name}: {equation(degrees)} = {product} != num_actors({num_actors}). "
            f"Set {name}.num_actors={product}, or change a degree; an unset degree is 1, except the one "
            f"that parallelism names ({_names(name)}), which takes what is left."
        )


def _check_none(name: str, part: PartConfig) -> None:
    if part.parallelism != "none" or part.num_actors == 1:
        return
    others = " or ".join(f"{name}.parallelism={other}" for other in PARALLELISMS[name][1:])
    remedy = f"Set {name}.num_actors=1, or {others}"
    if (part.pipeline or 1) > 1 and "pipeline" in PARALLELISMS[name]:
        remedy = f"Set {name}.parallelism=pipeline for {name}.pipeline={part.pipeline}"
    raise ConfigError(
        f"{name}.num_actors={part.num_actors} with {name}.parallelism=none: none means num_actors = 1. {remedy}."
    )


def _check_existing(name: str, part: PartConfig, degrees: dict[str, int]) -> None:
    """Refuse degrees above 1, and ways to share out, that this part does not have."""
    for degree, value in degrees.items():
        if value != 1 and degree not in OFFERED[name]:
            raise ConfigError(
                f"{name}.{degree}={value} does not exist yet: {name} has {', '.join(OFFERED[name])}, so "
                f"{degree} = 1. Unset {name}.{degree}, and choose {name}.parallelism from "
                f"{', '.join(PARALLELISMS[name])}."
            )
    if name != "text" and part.expert > 1:
        raise ConfigError(f"{name}.expert={part.expert} does not exist: {name} has no experts. Set {name}.expert=1.")
    require(part.expert_load >= 1, f"{name}.expert_load", part.expert_load, "expert_load >= 1: most / mean")
    if name != "text" and part.sequence_groups != SEQUENCE_GROUPS[0]:
        raise ConfigError(
            f"{name}.sequence_groups={part.sequence_groups}: images and clips are always sharded whole as far as "
            "that is even. Leave it out, or set text.sequence_groups"
        )


def _check_cuts(name: str, part: PartConfig, pipeline: int) -> None:
    """Refuse cuts that no pipeline has. Their fit to the model's layers is checked where these are known."""
    wanted = pipeline * part.virtual_stages - 1
    if part.cuts is not None and len(part.cuts) != wanted:
        raise ConfigError(
            f"{name}.cuts={list(part.cuts)} has {len(part.cuts)} layers, but pipeline({pipeline}) × "
            f"virtual_stages({part.virtual_stages}) - 1 = {wanted} runs of layers begin after the first. Give as many "
            f"cuts, or leave {name}.cuts unset for those of text.partition."
        )


def _check_partition(name: str, part: PartConfig) -> None:
    """Refuse ways to cut layers that do not exist, or beside cuts by hand, and settings of another way."""
    for key, default in (("partition_radius", 1), ("partition_candidates", 15)):
        value = getattr(part, key)
        if value < 1:
            raise ConfigError(f"{name}.{key}={value} is not at least 1")
        if value != default and part.partition != BMP:
            raise ConfigError(
                f"{name}.{key}={value} is of text.partition=bmp, and {name}.partition is "
                f"{part.partition or 'not set'}. Set text.partition=bmp, or leave {name}.{key} out"
            )
    tried = (None, EXACT, BMP) if name == "text" and part.cuts is None and part.virtual_stages == 1 else ()
    if part.partition_trials and part.partition not in tried:
        raise ConfigError(
            f"{name}.partition_trials=true is for text.partition=exact or bmp, without text.cuts and "
            f"text.virtual_stages. Set one of these, or leave {name}.partition_trials out"
        )
    if part.partition is None:
        return
    require_choice(f"{name}.partition", part.partition, with_plugins("text.partition", PARTITIONS), _MEANT_PARTITIONS)
    if name != "text":
        raise ConfigError(
            f"{name}.partition={part.partition} does not exist: text.partition says how the stages of all parts are "
            f"cut. Leave {name}.partition out, and set text.partition={part.partition}, or {name}.cuts"
        )
    if part.cuts is not None:
        raise ConfigError(
            f"{name}.partition={part.partition} with {name}.cuts={list(part.cuts)}: cuts by hand leave nothing to "
            f"choose. Leave {name}.partition or {name}.cuts out"
        )


def _check_fsdp(name: str, part: PartConfig, tensor: int) -> None:
    differ = {"tensor": tensor, "expert": part.expert}
    key = next((key for key, degree in differ.items() if degree > 1), None)
    if part.parallelism == "deepspeed":
        chosen = f"{name}.{key}={differ[key]} makes FSDP2 the engine of ZeRO" if key else f"{name}.zero_engine=fsdp"
        why = {
            "tensor": ", which alone cuts the states of slices",
            "expert": ", which alone knows who has which experts",
        }
        raise ConfigError(
            f"{chosen}{why[key] if key else ''}, and {name}.parallelism=deepspeed asks for DeepSpeed's. Set "
            f"{name}.parallelism=data, or {name}.{f'{key}=1' if key else 'zero_engine=auto'}."
        )
    if part.zero_stage == 1:
        degree = f"{name}.{key or 'tensor'}={differ[key or 'tensor']}"
        raise ConfigError(
            f"{name}.zero_stage=1 with {name}.zero_engine={part.zero_engine} and {degree}: torch's FSDP2, which alone "
            "cuts the states of slices (tensor > 1) and of experts that replicas share out (expert > 1), has stages 2 "
            f"and 3. Set {name}.zero_stage=2, which keeps whole weights on each actor as stage 1 does"
            + ("." if key else f", or {name}.zero_engine=deepspeed.")
        )


def _names(name: str) -> str:
    """`data → data, sequence → ulysses, deepspeed → data`."""
    return ", ".join(f"{kind} → {_NAMED_DEGREE[kind]}" for kind in PARALLELISMS[name][1:])
