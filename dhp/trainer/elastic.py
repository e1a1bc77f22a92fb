"""Layouts for fewer devices (`training.elastic`): found and checked before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dhp.config.command_line import with_words
from dhp.config.layout import AUTO, GIVEN
from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, DhpError, raise_all
from dhp.core.process import say_nothing
from dhp.supervise.elastic import Layout, Layouts
from dhp.trainer.preflight import prepare
from dhp.trainer.resume import recipe
from dhp.trainer.settings import kept_settings

_KEY = "training.elastic"
_MOST = 8  # planned ones: each takes seconds


def find_layouts(
    config: Config, prepared: Config, say: Callable[[str], None] = say_nothing, planned: bool = False
) -> Layouts:
    """All layouts of a run, as training.elastic asks for them. config: composed, with its layout; prepared: what
    `dhp.trainer.preflight.prepare` made of it. planned: the run's own layout was planned, and is not to be again. say:
    receives a line about each. Raises ConfigError for one that cannot be, or in which the run would train otherwise."""
    settings = _settings(config) if planned else {}
    own, smaller, errors = Layout(_devices(prepared), _words(settings)), dict[int, Layout](), []
    for number, text in enumerate(prepared.training.elastic):
        try:
            named = text != AUTO
            for words in (
                [_over(config, settings, tuple(text.split()))] if named else _planned(config, own.devices, say)
            ):
                layout = Layout(_checked(config, prepared, words, own.devices), words)
                smaller.setdefault(layout.devices, layout)
        except DhpError as error:
            errors.append(ConfigError(f"{_KEY}[{number}]={text}: {error}"))
    raise_all(errors)
    ordered = tuple(smaller[devices] for devices in sorted(smaller, reverse=True))
    for layout in ordered:
        say(f"{_KEY}: with {layout.devices} of {own.devices} devices, {' '.join(layout.words)}")
    return Layouts(own, ordered)


def _checked(config: Config, prepared: Config, words: tuple[str, ...], own_devices: int) -> int:
    """Devices of the layout that these settings make. Raises ConfigError."""
    other = prepare(with_words(config, words), new_run=False)
    before, after = kept_settings(prepared) | recipe(prepared), kept_settings(other) | recipe(other)
    changed = [f"{key} would be {after[key]}, not {before[key]}" for key in before if after.get(key) != before[key]]
    if changed:
        raise ConfigError(f"a layout may change neither data nor training: {'; '.join(changed)}")
    devices = _devices(other)
    if devices >= own_devices:
        raise ConfigError(f"it takes {devices} devices, and the run itself {own_devices}: it is of no use with fewer")
    return devices


def _devices(prepared: Config) -> int:
    """Devices that a run takes; where this machine has GPUs, they must hold what it keeps. Raises ConfigError."""
    from dhp.cluster.gpus import least_memory, read_gpus
    from dhp.trainer.dry_run import require_room
    from dhp.trainer.plan import plan_run

    plan = plan_run(prepared)
    gpus = [] if prepared.cluster.device == "cpu" else read_gpus()
    if gpus:
        require_room(plan, least_memory(gpus))
    return plan.graph.device_count()


def _planned(config: Config, own_devices: int, say: Callable[[str], None]) -> Iterator[tuple[str, ...]]:
    """Settings of the best layout for each smaller number of devices, or for some of them where there are many. A
    number for which none fits is left out, and named."""
    from dhp.trainer.forecast.auto import plan_for  # it imports torch

    for devices in _fewer(own_devices):
        try:
            yield _words(plan_for(config, devices, say))
        except ConfigError as error:
            say(f"{_KEY}: none for {devices} devices: {str(error).partition(chr(10))[0]}")


def _fewer(devices: int) -> list[int]:
    """Numbers below `devices`: each, or of many those of every eighth."""
    if devices <= _MOST:
        return list(range(devices - 1, 0, -1))
    step = max(1, devices // _MOST)
    return list(range(devices - step, 0, -step))[:_MOST]


def _settings(config: Config) -> dict[str, Any]:
    from dhp.trainer.forecast.auto import layout_settings  # it imports torch

    return layout_settings(config)


def _over(config: Config, settings: Mapping[str, Any], words: tuple[str, ...]) -> tuple[str, ...]:
    """Settings as on a command line over those of a planned layout: of a part that they name nothing of it is left."""
    if not settings:
        return words
    from dhp.trainer.forecast.auto import plain_settings  # it imports torch

    named = {word.partition("=")[0] for word in words}
    merged = dict(settings)
    for part in parts(config).keys() & {key.partition(".")[0] for key in named}:
        merged |= plain_settings(config, part)
    return (*_words({key: value for key, value in merged.items() if key not in named}), *words)


def _words(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return (f"layout={GIVEN}", *(f"{key}={_literal(value)}" for key, value in settings.items())) if settings else ()


def _literal(value: Any) -> str:
    """A value as command lines and YAML have it, without spaces."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_literal, value))}]"
    return str(value)
