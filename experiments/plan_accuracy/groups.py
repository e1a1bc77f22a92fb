"""The groups of layouts whose steps are timed: each group does the same work, on two cores."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.plan_accuracy.cases import STAGES, both
from experiments.plan_accuracy.models import Load


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
