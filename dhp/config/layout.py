"""Resolves the degrees of one part: the unset ones from parallelism, num_actors and the set ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from dhp.config.part import PartConfig
from dhp.config.ranges import require_choice, require_positive
from dhp.config.recompute import resolve_recompute
from dhp.config.rules import check_compile, check_formats, check_lora
from dhp.core.errors import ConfigError

DEGREES = ("pipeline", "data", "ulysses", "ring", "tensor")
PARALLELISMS = {
    "vision": ("none", "data", "sequence", "tensor", "deepspeed"),
    "audio": ("none", "data", "sequence", "deepspeed"),
    "text": ("none", "data", "sequence", "tensor", "pipeline", "deepspeed", "autotp"),
}
OFFERED = {
    "vision": ("data", "ulysses", "ring", "tensor"),
    "audio": ("data", "ulysses"),
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
SEQUENCE_GROUPS = ("auto", "one")
ZERO_STAGES = ("0", "1", "2", "3")
DEEPSPEED, FSDP = "deepspeed", "fsdp"
ZERO_ENGINES = ("auto", DEEPSPEED, FSDP)


def resolve_part(name: str, part: PartConfig) -> PartConfig:
    """A copy of the part ("vision", "audio" or "text") with every degree a number. Raises ConfigError."""
    require_choice(f"{name}.parallelism", part.parallelism, PARALLELISMS[name], _MEANT)
    require_positive(f"{name}.num_actors", part.num_actors)
    degrees = {degree: getattr(part, degree) for degree in DEGREES}
    for degree, value in degrees.items():
        if value is not None:
            require_positive(f"{name}.{degree}", value)
    check_formats(name, part)
    _check_none(name, part)
    degrees = _filled(name, part, degrees)
    _check_product(name, part.num_actors, degrees)
    _check_existing(name, degrees)
    _check_pipeline(name, part, degrees["pipeline"])
    _check_expert(name, part, degrees)
    _check_sequence(name, part, degrees)
    engine = _resolve_engine(name, part, degrees["tensor"])
    filled: dict[str, Any] = dict(degrees)
    lora = part.lora
    if lora.rank and lora.alpha is None:
        lora = replace(lora, alpha=2.0 * lora.rank)
    found = replace(part, recompute=resolve_recompute(name, part), zero_engine=engine, lora=lora, **filled)
    check_compile(name, found)
    check_lora(name, found)
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


def _check_existing(name: str, degrees: dict[str, int]) -> None:
    """Refuse degrees above 1 that this part does not have."""
    for degree, value in degrees.items():
        if value != 1 and degree not in OFFERED[name]:
            raise ConfigError(
                f"{name}.{degree}={value} does not exist yet: {name} has {', '.join(OFFERED[name])}, so "
                f"{degree} = 1. Unset {name}.{degree}, and choose {name}.parallelism from "
                f"{', '.join(PARALLELISMS[name])}."
            )


def _check_pipeline(name: str, part: PartConfig, pipeline: int) -> None:
    """Refuse runs of layers and cuts that no pipeline has. Their fit to the model's layers is checked where these are
    known."""
    require_positive(f"{name}.virtual_stages", part.virtual_stages)
    if part.virtual_stages > 1 and pipeline == 1:
        raise ConfigError(
            f"{name}.virtual_stages={part.virtual_stages} with {name}.pipeline=1: virtual stages are runs of layers "
            f"that the stages of a pipeline take in turn. Set {name}.pipeline to 2 or more, or {name}.virtual_stages=1."
        )
    wanted = pipeline * part.virtual_stages - 1
    if part.cuts is not None and len(part.cuts) != wanted:
        raise ConfigError(
            f"{name}.cuts={list(part.cuts)} has {len(part.cuts)} layers, but pipeline({pipeline}) × "
            f"virtual_stages({part.virtual_stages}) - 1 = {wanted} runs of layers begin after the first. Give as many "
            f"cuts, or leave {name}.cuts unset for even ones."
        )
    if pipeline > 1 and part.parallelism == "autotp":
        raise ConfigError(
            f"{name}.pipeline={pipeline} with {name}.parallelism=autotp: DeepSpeed's layers are not cut into stages. "
            f"Set {name}.parallelism=tensor or pipeline, or {name}.pipeline=1."
        )


def _check_expert(name: str, part: PartConfig, degrees: dict[str, int]) -> None:
    """Refuse expert parallelism in layouts that are not known to be exact. The number of experts is checked where it is
    known."""
    expert = part.expert
    require_positive(f"{name}.expert", expert)
    if expert == 1:
        return
    if name != "text":
        raise ConfigError(f"{name}.expert={expert} does not exist: {name} has no experts. Set {name}.expert=1.")
    if degrees["tensor"] > 1:
        raise ConfigError(
            f"{name}.expert={expert} with {name}.tensor={degrees['tensor']}: experts are either shared out among "
            f"replicas or cut by their width, not both. Set {name}.tensor=1, or {name}.expert=1: tensor cuts each."
        )
    if part.zero_stage:
        raise ConfigError(
            f"{name}.expert={expert} with {name}.zero_stage={part.zero_stage}: ZeRO cuts what all replicas hold alike, "
            f"but expert({expert}) > 1 gives them different experts. Set {name}.zero_stage=0, or {name}.expert=1."
        )


def _check_sequence(name: str, part: PartConfig, degrees: dict[str, int]) -> None:
    """Refuse a shared sequence in layouts that are not known to be exact."""
    ring, ulysses = degrees["ring"], degrees["ulysses"]
    require_choice(f"{name}.sequence_groups", part.sequence_groups, SEQUENCE_GROUPS)
    if name != "text" and part.sequence_groups != SEQUENCE_GROUPS[0]:
        raise ConfigError(
            f"{name}.sequence_groups={part.sequence_groups}: images and clips are always sharded whole as far as "
            "that is even. Leave it out, or set text.sequence_groups"
        )
    if ring * ulysses == 1:
        return
    setting = f"{name}.ulysses={ulysses} and {name}.ring={ring}"
    if part.parallelism == "autotp":
        raise ConfigError(
            f"{name}.parallelism=autotp with {setting}: DeepSpeed's layers know no shared sequence. Set "
            f"{name}.parallelism=tensor or sequence."
        )
    if part.expert > 1:
        raise ConfigError(
            f"{name}.expert={part.expert} with {setting}: experts are shared out among replicas (data) alone. Set "
            f"{name}.expert=1; {name}.tensor cuts each expert."
        )


def _resolve_engine(name: str, part: PartConfig, tensor: int) -> str:
    """The ZeRO engine: deepspeed or fsdp. Raises ConfigError where the one that is asked for, or either, cannot."""
    stage, asked = part.zero_stage, part.zero_engine
    require_choice(f"{name}.zero_stage", str(stage), ZERO_STAGES)
    require_choice(f"{name}.zero_engine", asked, ZERO_ENGINES)
    engine = asked if asked != "auto" else FSDP if tensor > 1 else DEEPSPEED
    if part.parallelism == "deepspeed" and not stage:
        raise ConfigError(
            f"{name}.parallelism=deepspeed with {name}.zero_stage=0: DeepSpeed is here for its ZeRO stages, and stage "
            f"0 cuts nothing. Set {name}.zero_stage=1 (cuts the optimizer's state), 2 (gradients too) or 3 (weights "
            f"too), or {name}.parallelism=data for replicas without DeepSpeed."
        )
    if stage and part.parallelism == "autotp":
        raise ConfigError(
            f"{name}.zero_stage={stage} with {name}.parallelism=autotp: DeepSpeed's layers are not cut any further. "
            f"Set {name}.parallelism=tensor, whose states are cut with zero_stage 2 or 3, or {name}.zero_stage=0."
        )
    if stage and engine == DEEPSPEED:
        _check_deepspeed(name, part, tensor)
    if stage and engine == FSDP:
        _check_fsdp(name, part, tensor)
    return engine


def _check_deepspeed(name: str, part: PartConfig, tensor: int) -> None:
    stage = part.zero_stage
    if part.dtype == "float64":
        raise ConfigError(
            f"{name}.zero_stage={stage} with {name}.dtype=float64: DeepSpeed, which does the ZeRO stages, has no "
            f"float64. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 or 3, {name}.zero_stage=0, or "
            f"{name}.dtype=float32."
        )
    if tensor > 1:
        raise ConfigError(
            f"{name}.zero_engine=deepspeed with {name}.zero_stage={stage} and {name}.tensor={tensor}: DeepSpeed cuts "
            f"what all actors of a part hold alike, but tensor({tensor}) > 1 gives them different slices of each "
            f"matrix. Set {name}.zero_engine=fsdp with {name}.zero_stage=2 or 3, or {name}.tensor=1."
        )


def _check_fsdp(name: str, part: PartConfig, tensor: int) -> None:
    if part.parallelism == "deepspeed":
        chosen = f"{name}.tensor={tensor} makes FSDP2 the engine of ZeRO, which alone cuts the states of slices"
        other = f"{name}.tensor=1" if tensor > 1 else f"{name}.zero_engine=auto"
        raise ConfigError(
            f"{chosen if tensor > 1 else f'{name}.zero_engine=fsdp'}, and {name}.parallelism=deepspeed asks for "
            f"DeepSpeed's. Set {name}.parallelism=data, or {other}."
        )
    if part.zero_stage == 1:
        raise ConfigError(
            f"{name}.zero_stage=1 with {name}.zero_engine={part.zero_engine} and {name}.tensor={tensor}: torch's "
            "FSDP2, which alone cuts the states of slices (tensor > 1), has stages 2 and 3. Set "
            f"{name}.zero_stage=2, which keeps whole weights on each actor as stage 1 does"
            + ("." if tensor > 1 else f", or {name}.zero_engine=deepspeed.")
        )


def _names(name: str) -> str:
    """`data → data, sequence → ulysses, deepspeed → data`."""
    return ", ".join(f"{kind} → {_NAMED_DEGREE[kind]}" for kind in PARALLELISMS[name][1:])
