"""What parts of a run are told of its configuration."""

from __future__ import annotations

from dhp.config.load import compose_config
from dhp.config.resolve import resolve
from dhp.data.reading import Reading
from dhp.wiring import feed_settings, kept_settings

OVERRIDES = ["data.datasets=[shapes,'shapes%50']", "data.max_tokens=900", "data.video_fps=1", "data.allow_http=true"]


def test_how_samples_are_read_reaches_the_dataset_actor() -> None:
    settings = feed_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert settings.datasets == ("shapes", "shapes%50")
    assert settings.reading == Reading(allow_http=True, max_tokens=900, video_fps=1.0)


def test_a_resumed_run_keeps_shares_and_weights() -> None:
    """Both decide which samples a step has; a weight of one is not told, as before there were weights."""
    plain = kept_settings(resolve(compose_config("tiny", overrides=OVERRIDES)))
    assert plain["data.datasets"] == ["shapes", "shapes%50"]
    heavy = compose_config("tiny", overrides=[*OVERRIDES, "data.data_registry.shapes.weight=1.5"])
    assert kept_settings(resolve(heavy))["data.datasets"] == ["shapes (weight 1.5)", "shapes%50 (weight 1.5)"]
