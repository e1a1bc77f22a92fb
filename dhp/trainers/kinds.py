"""Which trainer runs the stages of a part."""

from __future__ import annotations

from dhp.base.stages import StageSpec
from dhp.trainers.stage import StageRank
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer

_KINDS: dict[str, type[StageRank]] = {"vision": VisionTrainer, "text": TextTrainer}


def trainer_of(stage: StageSpec) -> type[StageRank]:
    """The class of a stage's ranks."""
    return _KINDS[stage.part]
