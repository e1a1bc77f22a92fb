"""Features of a frozen tower on disk: whether a run may save them, where, and how many bytes more."""

from __future__ import annotations

from pathlib import Path

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.config.parts import model_name, parts
from dhp.config.schema import Config
from dhp.core.batch import FeatureSettings, KeepSettings
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph
from dhp.models.family import VISION

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
        FeatureFolder(Path(config.data.cache_features)).check()


def feature_settings(config: Config) -> FeatureSettings | None:
    """Settings for readers to look features up; None where none are saved. Reads the encoder's weights, which takes
    seconds."""
    where = config.data.cache_features
    if where is None:
        return None
    from dhp.models.weights import digest_tower  # imports modeling code, which takes a second

    return FeatureSettings(where, digest_tower(model_name(config), parts(config)[VISION].dtype, parts(config)))


def keep_settings(config: Config, graph: StageGraph) -> dict[str, KeepSettings]:
    """Settings of the ranks of each part that write features; the bytes that there is room for are shared evenly."""
    where, most = config.data.cache_features, config.data.cache_features_gib
    if where is None:
        return {}
    room = None
    if most is not None:
        degrees = graph.of_part(VISION)[0].degrees
        left = int(most * GIB) - FeatureFolder(Path(where)).nbytes()
        room = max(left, 0) // (degrees.data * degrees.sequence)
    return {VISION: KeepSettings(where, room)}
