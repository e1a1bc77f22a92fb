"""Decides a run's layout: given, planned, or for fewer devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dhp.checkpoint.folder import find_checkpoint, newest_checkpoint
from dhp.checkpoint.resume import AUTO, NEVER
from dhp.config.command_line import job_overrides, with_words
from dhp.config.devices import GIB
from dhp.config.layout import DEGREES, FREED, GIVEN, LAYOUTS, PARTITION_KEYS, PLANNED
from dhp.config.parts import DECODER, encoders, parts
from dhp.config.ranges import require_choice
from dhp.config.roles import FOLLOWS, keys_with
from dhp.config.run_dir import check_run_dir, config_of, read_recorded
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError, DhpError, raise_all
from dhp.core.process import say_nothing
from dhp.data.remote.places import missing_data
from dhp.models.family import VISION
from dhp.models.registry import import_plugins
from dhp.plan.count.samples import Samples, assumed_equal, equal_samples
from dhp.plan.search.candidates import Candidate
from dhp.plan.search.free_keys import RECOMPUTE, ROWS, FixedKeys, find_held, put, searched_keys, with_settings
from dhp.plan.search.layout_search import Found, search
from dhp.plan.search.run_devices import machine_ahead
from dhp.plan.search.sample_source import measured_table, why_not_measured
from dhp.plan.search.space import Space, Subject, make_space, read_subject
from dhp.plan.search.verdict import equations
from dhp.supervise.attempt import ElasticLayout, ElasticLayouts
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import fixed_settings, recipe


def with_layout(
    config: Config,
    say: Callable[[str], None] = say_nothing,
    overrides: Sequence[str] | None = None,
    new_run: bool = True,
) -> Config:
    """A composed configuration with its layout planned, where `layout` asks for that. overrides: of the command line;
    None: those of this process's. new_run: run_dir must be free for it. Raises ConfigError where no layout fits."""
    require_choice("layout", config.layout, LAYOUTS)
    if config.plugins:
        say(f"importing {', '.join(config.plugins)}")
    import_plugins(config.plugins)
    if config.layout == GIVEN:
        return config

    return plan_layout(config, say, overrides, new_run)


_NAMING = ("parallelism", "num_actors")  # follow from degrees
_CHECKPOINTING = "activation_checkpointing"
_BESIDE = keys_with(PartConfig, layout=FOLLOWS)  # go with a part's layout


def plan_layout(
    config: Config, say: Callable[[str], None], overrides: Sequence[str] | None = None, new_run: bool = True
) -> Config:
    """A composed configuration with its layout planned; that of the run that it continues, if it does.

    overrides: of the command line; None: those of this process's. new_run: run_dir must be free for it. say: receives
    what is chosen. Raises ConfigError where no layout fits, or none can be, and what reading the model and the data
    raises."""
    held = find_held(config, job_overrides() if overrides is None else overrides)
    recorded = recorded_run(config)
    of_run = None if recorded is None else read_recorded(recorded)
    other = [] if of_run is None else _others(config, held, of_run)
    if of_run is not None and not other:
        say(f"layout={config.layout}: that of the run that is resumed, by {recorded}")
        return replace(put(config, _settings_of(of_run, held)), layout=GIVEN)
    if of_run is not None:  # its checkpoint is read in any layout, with its rows
        say(f"layout={config.layout}: planned anew, as {'; '.join(other)}")
        config = replace(config, training=replace(config.training, micro_batch_size=of_run.training.micro_batch_size))
        held, new_run = replace(held, keys=tuple(dict.fromkeys([*held.keys, ROWS]))), False
    best = _plan(config, held, say, new_run)
    return replace(put(config, with_settings(config, held, best.settings)), layout=GIVEN)


def plan_for(config: Config, devices: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Settings of the best layout of a run for so many devices, with the rows that it has. Raises ConfigError where
    none fits, or it would take fewer."""
    free = replace(config, layout=FREED, cluster=replace(config.cluster, devices=devices))
    held = find_held(free, fix=(ROWS,))
    best = _plan(free, held, say, new_run=False)
    if best.plan.graph.device_count() < devices:
        raise ConfigError("the best one takes fewer")
    return with_settings(free, held, best.settings)


def layout_settings(config: Config) -> dict[str, Any]:
    """All settings of a layout, as a composed configuration has them."""
    return _settings_of(config, FixedKeys(()))


def plain_settings(config: Config, part: str) -> dict[str, Any]:
    """Those of a part of which nothing is set."""
    keys = [key for key in layout_settings(config) if key.startswith(f"{part}.")]
    return {key: getattr(PartConfig(), key.partition(".")[2]) for key in keys}


def recorded_run(config: Config) -> Path | None:
    """The configuration of the run that this one continues; None: it continues none."""
    resume, run_dir = config.training.resume, Path(config.run_dir).expanduser()
    if resume == NEVER:
        return None
    if resume != AUTO:
        return config_of(find_checkpoint(Path(resume).expanduser()))
    folder = Path(config.training.checkpoint_dir or run_dir / "checkpoints").expanduser()
    newest = None if config.overwrite else newest_checkpoint(folder)
    if newest is None:
        return None
    own = run_dir / "config.yaml"
    if own.is_file():
        return own
    try:
        return config_of(newest)
    except ConfigError as error:
        raise ConfigError(
            f"layout={config.layout} keeps the layout of the run that is resumed, which its config.yaml says, and "
            f"neither {own} nor {newest.parent.parent / 'config.yaml'} is there. Give the run's own run_dir, or set "
            "its degrees with layout=given"
        ) from error


def _settings_of(recorded: Config, held: FixedKeys) -> dict[str, Any]:
    """The layout of a run by its record, but for what is held."""
    keys = [key for key in searched_keys(recorded) if key not in held.keys]
    for name in parts(recorded):
        chosen = {_CHECKPOINTING} if RECOMPUTE in held.of(name) else set()  # which a recompute of one's own replaces
        keys += [f"{name}.{key}" for key in _BESIDE if key not in chosen]
    values = {}
    for key in keys:
        section, _, name = key.partition(".")
        values[key] = getattr(getattr(recorded, section), name)
    if any(
        values.get(f"{name}.cuts") is not None for name in parts(recorded)
    ):  # in whose place a method would choose others
        values |= {f"{DECODER}.{key}": getattr(PartConfig(), key) for key in PARTITION_KEYS}
    return values


def _others(config: Config, held: FixedKeys, recorded: Config) -> list[str]:
    """What is set otherwise than the run that is resumed had it, in words."""
    found = []
    both = parts(config).keys() & parts(recorded).keys()
    for name, part in ((one, parts(config)[one]) for one in sorted(both)):
        for key in sorted(held.of(name) - {RECOMPUTE}):
            mine, theirs = getattr(part, key), getattr(parts(recorded)[name], key)
            if mine not in (None, "auto", theirs):
                found.append(f"{name}.{key}={mine} is set, and the run that is resumed has {name}.{key}={theirs}")
    mine, theirs = config.cluster.devices, recorded.cluster.devices
    if mine is not None and mine != theirs:
        found.append(f"cluster.devices={mine} is set, and the run that is resumed has cluster.devices={theirs}")
    return found


def _plan(config: Config, held: FixedKeys, say: Callable[[str], None], new_run: bool) -> Candidate:
    subject = read_subject(config, say)
    if others := [name for name in encoders(config) if name != VISION]:
        raise ConfigError(f"layout={config.layout}: the {', '.join(others)} part is not in a plan yet. Set its degrees")
    if new_run:  # what takes seconds comes behind what may refuse the run
        check_run_dir(subject.plain)
    missing = [] if config.training.dry_run else missing_data(subject.plain)
    if missing:
        raise ConfigError(missing[0])
    samples = _samples(subject, say)
    machine, source = machine_ahead(subject, samples, say)
    say(f"layout={config.layout}: planning for {machine}, {samples}; {source}")
    space = make_space(subject, held, machine, samples, say)
    found = search(space)
    for count in range(machine.count - 1, machine.count // 2, -1):
        if found.candidates or found.tight is not None:
            break
        found = search(replace(space, machine=replace(machine, count=count, node=min(count, machine.node)), known={}))
    if not found.candidates:
        raise ConfigError(_none(config, held, space, found))
    sure = [one for one in found.candidates if one.found.peak.total <= machine.sure_bytes]
    best = sure[0] if sure else found.candidates[0]
    for line in _lines(config, machine.count, best, found.candidates):
        say(line)
    return best


def _samples(subject: Subject, say: Callable[[str], None]) -> Samples:
    """Of the run's own lengths; of assumed ones where its data are not here, as for a dry run."""
    plain, family = subject.plain, subject.family
    equal, absent = assumed_equal(plain), why_not_measured(plain)
    if absent:
        return equal_samples(plain, family, replace(equal, why=f"assumed: {absent}"))
    return Samples(family, measured_table(plain, say), equal)


def _lines(config: Config, devices: int, best: Candidate, others: Sequence[Candidate]) -> list[str]:
    """The chosen layout as settings that differ from the plain ones, and the next best one."""
    used = best.plan.graph.device_count()
    idle = f" on {used} of them, as {devices} can have none" if used < devices else ""
    lines = [f"layout={config.layout}: {_text(best.settings)}{idle}; {best.found.step_s:.3g} s a step"]
    slower = [one for one in others if one is not best and one.found.step_s >= best.found.step_s]
    if slower:
        ratio = slower[0].found.step_s / best.found.step_s - 1
        lines.append(f"layout={config.layout}: the next best is {ratio:.0%} slower: {_text(slower[0].settings)}")
    return lines


def _text(settings: Mapping[str, Any]) -> str:
    """Settings that are not as they would be anyway."""
    plain = Config()
    shown = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        default = 1 if name in DEGREES else getattr(getattr(plain, section), name)
        if name not in _NAMING and value != default:
            shown.append(f"{key}={value}")
    return " ".join(shown) or "one device"


def _none(config: Config, held: FixedKeys, space: Space, found: Found) -> str:
    kept = f" with {', '.join(held.keys)} as set" if held.keys else ""
    more = "`python -m dhp plan` with the same configuration names what would change that"
    if found.tight is not None:
        machine, peak = space.machine, found.tight.found.peak.total
        return (
            f"layout={config.layout}: no layout fits on {machine}{kept}: the smallest takes {peak / GIB:.2f} GiB of a "
            f"device's {machine.limit_bytes / GIB:.2f} ({_text(found.tight.settings)}); {more}"
        )
    reasons = "".join(f"\n  {reason}" for reason in equations(found))
    return f"layout={config.layout}: no layout can be on {space.machine}{kept}; {more}{reasons}"


_KEY = "training.elastic"
_MOST = 8  # planned ones: each takes seconds


def find_layouts(
    config: Config, prepared: Config, say: Callable[[str], None] = say_nothing, planned: bool = False
) -> ElasticLayouts:
    """All layouts of a run, as training.elastic asks for them. config: composed, with its layout; prepared: what
    `dhp.trainer.preflight.prepare` made of it. planned: the run's own layout was planned, and is not to be again. say:
    receives a line about each. Raises ConfigError for one that cannot be, or in which the run would train otherwise."""
    settings = _settings(config) if planned else {}
    own, smaller, errors = ElasticLayout(_devices(prepared), _words(settings)), dict[int, ElasticLayout](), []
    for number, text in enumerate(prepared.training.elastic):
        try:
            named = text != PLANNED
            for words in (
                [_over(config, settings, tuple(text.split()))] if named else _planned(config, own.devices, say)
            ):
                layout = ElasticLayout(_checked(config, prepared, words, own.devices), words)
                smaller.setdefault(layout.devices, layout)
        except DhpError as error:
            errors.append(ConfigError(f"{_KEY}[{number}]={text}: {error}"))
    raise_all(errors)
    ordered = tuple(smaller[devices] for devices in sorted(smaller, reverse=True))
    for layout in ordered:
        say(f"{_KEY}: with {layout.devices} of {own.devices} devices, {' '.join(layout.words)}")
    return ElasticLayouts(own, ordered)


def _checked(config: Config, prepared: Config, words: tuple[str, ...], own_devices: int) -> int:
    """Devices of the layout that these settings make. Raises ConfigError."""
    other = prepare(with_words(config, words), new_run=False)
    before, after = fixed_settings(prepared) | recipe(prepared), fixed_settings(other) | recipe(other)
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
    from dhp.plan.run_plan import plan_run
    from dhp.trainer.dry_run import require_room

    plan = plan_run(prepared)
    gpus = [] if prepared.cluster.device == "cpu" else read_gpus()
    if gpus:
        require_room(plan, least_memory(gpus))
    return plan.graph.device_count()


def _planned(config: Config, own_devices: int, say: Callable[[str], None]) -> Iterator[tuple[str, ...]]:
    """Settings of the best layout for each smaller number of devices, or for some of them where there are many. A
    number for which none fits is left out, and named."""

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

    return layout_settings(config)


def _over(config: Config, settings: Mapping[str, Any], words: tuple[str, ...]) -> tuple[str, ...]:
    """Settings as on a command line over those of a planned layout: of a part that they name nothing of it is left."""
    if not settings:
        return words

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
