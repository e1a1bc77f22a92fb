"""The degrees of one part: what parallelism, num_actors and the degrees that are set say about the unset ones."""

from dataclasses import replace
from math import prod

from dhp.config.ranges import require_choice, require_positive
from dhp.config.schema import PartConfig
from dhp.errors import ConfigError

DEGREES = ("data", "ulysses", "ring", "tensor")
PARALLELISMS = {"vision": ("none", "data", "sequence"), "text": ("none", "data", "tensor")}
_NAMED_DEGREE = {"data": "data", "sequence": "ulysses", "tensor": "tensor"}  # the degree a parallelism names
_ZERO_STAGES = {"vision": (0, 1), "text": (0,)}
_DTYPES = ("bfloat16", "float32", "float64")
_BACKENDS = ("auto", "sdpa")


def resolve_part(name: str, part: PartConfig) -> PartConfig:
    """A copy of the part ("vision" or "text") with every degree a number. Raises ConfigError."""
    require_choice(f"{name}.parallelism", part.parallelism, PARALLELISMS[name])
    require_positive(f"{name}.num_actors", part.num_actors)
    degrees = {degree: getattr(part, degree) for degree in DEGREES}
    for degree, value in degrees.items():
        if value is not None:
            require_positive(f"{name}.{degree}", value)
    _check_formats(name, part)
    _check_none(name, part)
    degrees = _filled(name, part, degrees)
    _check_product(name, part.num_actors, degrees)
    _check_existing(name, degrees)
    return replace(part, **degrees)


def equation(degrees: dict[str, int]) -> str:
    """`data(1) × ulysses(2) × ring(1) × tensor(1)`."""
    return " × ".join(f"{degree}({value})" for degree, value in degrees.items())


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
            "that parallelism names (data → data, sequence → ulysses, tensor → tensor), which takes what is left."
        )


def _check_none(name: str, part: PartConfig) -> None:
    if part.parallelism == "none" and part.num_actors != 1:
        others = " or ".join(f"{name}.parallelism={other}" for other in PARALLELISMS[name][1:])
        raise ConfigError(
            f"{name}.num_actors={part.num_actors} with {name}.parallelism=none: none means num_actors = 1. "
            f"Set {name}.num_actors=1, or {others}."
        )


def _check_existing(name: str, degrees: dict[str, int]) -> None:
    """Refuse degrees above 1 that no parallelism of this part offers."""
    offered = {_NAMED_DEGREE[kind] for kind in PARALLELISMS[name][1:]}
    for degree, value in degrees.items():
        if value != 1 and degree not in offered:
            raise ConfigError(
                f"{name}.{degree}={value} does not exist yet: {name} has {' and '.join(sorted(offered))}, so "
                f"{degree} = 1. Unset {name}.{degree}, and choose {name}.parallelism from "
                f"{', '.join(PARALLELISMS[name])}."
            )


def _check_formats(name: str, part: PartConfig) -> None:
    if part.dtype in ("bfloat16", "bf16", "float16", "fp16"):
        raise ConfigError(
            f"{name}.dtype={part.dtype} is not there yet: training in 16 bits comes later. "
            f"Set {name}.dtype=float32."
        )
    require_choice(f"{name}.dtype", part.dtype, _DTYPES)
    if part.attention_backend == "flash_attention_2":
        raise ConfigError(
            f"{name}.attention_backend=flash_attention_2 works in 16 bits only, and {name}.dtype={part.dtype}; "
            f"training in 16 bits comes later. Set {name}.attention_backend=sdpa."
        )
    require_choice(f"{name}.attention_backend", part.attention_backend, _BACKENDS)
    if part.zero_stage not in _ZERO_STAGES[name]:
        offered = " and ".join(f"{name}.zero_stage={stage}" for stage in _ZERO_STAGES[name])
        nearest = min(_ZERO_STAGES[name], key=lambda stage: abs(stage - part.zero_stage))
        raise ConfigError(
            f"{name}.zero_stage={part.zero_stage} does not exist yet; there is {offered}. "
            f"Set {name}.zero_stage={nearest}, the nearest: the same arithmetic, with more memory an actor."
        )
    if part.zero_stage > 0 and part.dtype == "float64":
        raise ConfigError(
            f"{name}.zero_stage={part.zero_stage} with {name}.dtype=float64: DeepSpeed, which does the ZeRO "
            f"stages, has no float64. Set {name}.zero_stage=0 or {name}.dtype=float32."
        )
