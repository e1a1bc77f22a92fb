"""The cases of memory, and the groups of layouts whose steps are timed: each group does the same work on two cores."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.plan_accuracy.layout import Load

PLAIN_NORMS = ("vision.kernels=norm:plain", "text.kernels=norm:plain")  # auto's proof in 16 bits depends on weights
SIXTEEN = ("vision.dtype=bfloat16", "text.dtype=bfloat16", *PLAIN_NORMS)
SMALL, LONG = Load(32, 32), Load(64, 64, 96, 64)


@dataclass(frozen=True)
class Case:
    """One configuration whose memory is counted."""

    shape: str
    settings: tuple[str, ...]
    load: Load = SMALL


def both(how: str, *more: str) -> tuple[str, ...]:
    """Two actors a part that share the work in one way."""
    keys = ("num_actors=2", f"parallelism={how}", *more)
    return tuple(f"{part}.{key}" for part in ("vision", "text") for key in keys)


def _steps(samples: int, of_micro_batch: int) -> tuple[str, ...]:
    return f"training.batch_size={samples}", f"training.micro_batch_size={of_micro_batch}"


ONE, TWO, FOUR = _steps(2, 2), _steps(4, 2), _steps(4, 1)
PACKED = ("data.packing=true",)
SHARDED = ("vision.sequence_sharded_norms=true", "text.sequence_sharded_norms=true")
STAGES = ("vision.num_actors=1", "text.num_actors=2", "text.parallelism=pipeline")
CHAINED = (
    "vision.num_actors=2", "vision.parallelism=pipeline", "text.num_actors=1", "cluster.chain=true",
    "training.schedule=1f1b",
)  # fmt: skip


def _choice(name: str) -> tuple[str, ...]:
    return f"vision.recompute={name}", f"text.recompute={name}"


CASES = {
    "plain": Case("balanced", ONE),
    "packed, in two micro-batches": Case("balanced", (*TWO, *PACKED)),
    "light": Case("balanced", (*TWO, *PACKED, *_choice("light"))),
    "mlp": Case("decoder", (*ONE, *_choice("mlp")), LONG),
    "linear, a long row": Case("tower", (*ONE, *PACKED, *_choice("linear")), LONG),
    "everything again": Case("balanced", (*TWO, *PACKED, *_choice("full"))),
    "everything again, 16 bits": Case("balanced", (*TWO, *PACKED, *SIXTEEN, *_choice("full"))),
    "16 bits": Case("decoder", (*TWO, *PACKED, *SIXTEEN)),
    "16 bits, 12 bytes": Case("balanced", (*TWO, *SIXTEEN, "vision.state_bytes=12", "text.state_bytes=12")),
    "replicas": Case("balanced", (*FOUR, *both("data"))),
    "sequence + tensor": Case("balanced", (*TWO, *PACKED, *both("tensor"), "vision.parallelism=sequence")),
    "sequence of both, recomputed": Case("tower", (*ONE, *PACKED, *both("sequence"), *_choice("linear")), LONG),
    "tensor": Case("decoder", (*TWO, *both("tensor"))),
    "tensor, sharded norms": Case("balanced", (*TWO, *PACKED, *both("tensor"), *SHARDED)),
    "pipeline, 1f1b": Case("decoder", (*FOUR, *STAGES, "training.schedule=1f1b", "cluster.collocate=false")),
    "chain": Case("tower", (*FOUR, *PACKED, *CHAINED)),
    "LoRA, frozen tower": Case("decoder", (*TWO, *PACKED, "text.lora.rank=8", "training.frozen=[vision,projector]")),
    "offload": Case("balanced", (*TWO, *PACKED, *_choice("offload"))),
    "MLPs in chunks, many targets": Case(
        "decoder", (*ONE, *PACKED, "text.mlp_chunks=4", "vision.mlp_chunks=2"), Load(32, 32, 1400, 1398)
    ),
    "experts, 16 bits": Case("experts", (*TWO, *PACKED, *SIXTEEN)),
    "experts over two, 16 bits": Case("experts", (*FOUR, *both("data"), "text.expert=2", *SIXTEEN)),
    "ZeRO-1": Case("balanced", (*FOUR, *both("data", "zero_stage=1"))),
    "ZeRO-2": Case("balanced", (*FOUR, *both("data", "zero_stage=2"))),
    "ZeRO-3": Case("balanced", (*FOUR, *both("data", "zero_stage=3"))),
    "FSDP2": Case("balanced", (*FOUR, *both("data", "zero_stage=3", "zero_engine=fsdp"))),
    "FSDP2, gradients cut, 16 bits": Case(
        "decoder", (*FOUR, *both("data", "zero_stage=2", "zero_engine=fsdp"), *SIXTEEN)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Work, and what each layout does it with. settings: of all layouts."""

    shape: str
    load: Load
    layouts: tuple[str, ...]
    settings: tuple[str, ...] = ()


_SAMPLES = 4
_EACH, _SPLIT = (
    f"training.micro_batch_size={_SAMPLES // replicas}" for replicas in (2, 1)
)  # of a replica: all samples in one micro-batch
_ALL = (f"training.batch_size={_SAMPLES}", "data.packing=true")
_PIPELINED = ("training.schedule=1f1b", "training.micro_batch_size=1")
LAYOUTS = {
    "DP": (*both("data"), _EACH),
    "SP+TP": (*both("tensor"), "vision.parallelism=sequence", _SPLIT),
    "TP": (*both("tensor"), _SPLIT),
    "SP": (*both("sequence"), _SPLIT),
    "SP+DP": (*both("data"), "vision.parallelism=sequence", _EACH),
    "ZeRO-1": (*both("data", "zero_stage=1"), _EACH),
    "ZeRO-3": (*both("data", "zero_stage=3"), _EACH),
    "FSDP2": (*both("data", "zero_stage=3", "zero_engine=fsdp"), _EACH),
    "pipeline": (*STAGES, *_PIPELINED),
    "apart": ("cluster.collocate=false", "training.schedule=vision_ahead", "training.micro_batch_size=1"),
    "chain": (
        "vision.num_actors=2", "vision.parallelism=pipeline", "text.num_actors=1", "cluster.chain=true", *_PIPELINED,
    ),
}  # fmt: skip
_FROZEN = ("training.frozen=[vision,projector]",)
_UNCUT = tuple(name for name in LAYOUTS if name not in ("ZeRO-1", "ZeRO-3", "FSDP2", "chain"))
GROUPS = {
    "decoder-heavy": Group("decoder", Load(32, 32), tuple(LAYOUTS)),
    "tower-heavy": Group("tower", Load(48, 48), tuple(name for name in LAYOUTS if name not in ("SP", "ZeRO-1"))),
    "frozen tower": Group("balanced", Load(48, 48), _UNCUT, _FROZEN),
    "long rows": Group("decoder", Load(32, 32, 800, 256), ("DP", "SP+TP", "TP", "SP", "pipeline", "FSDP2", "apart")),
}


def settings_of(group: Group, layout: str) -> tuple[str, ...]:
    """Of one layout's run."""
    return (*_ALL, *LAYOUTS[layout], *group.settings)
