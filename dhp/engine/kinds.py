"""The engine of each part's stages, by the part's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dhp.engine.settings import StageSettings

if TYPE_CHECKING:
    from dhp.engine.stage import StageEngine


def make_rank(settings: StageSettings) -> StageEngine:
    """One rank of a stage, in its own process. Kinds are imported here: a driver, which makes none, starts seconds
    sooner without them. Raises what the kind's constructor raises."""
    match settings.spec.part:
        case "vision":
            from dhp.engine.encoder import EncoderEngine

            return EncoderEngine(settings)
        case "audio":
            from dhp.engine.encoder import AudioEngine

            return AudioEngine(settings)
        case "text":
            from dhp.engine.text import TextEngine

            return TextEngine(settings)
        case part:
            raise ValueError(f"stage {settings.spec.name} is of part {part!r}, which no engine runs")
