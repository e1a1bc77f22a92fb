"""Which settings a search keeps, and which it may set."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dhp.config.layout import FREED, resolve_part
from dhp.config.parts import parts
from dhp.config.roles import SEARCHED as SEARCHED_KEY
from dhp.config.roles import keys_with
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import NCCL
from dhp.core.text import did_you_mean, nearest
from dhp.plan.batches import rows_by_tokens

# Keys of a part's section that a search sets where they are not held; parallelism and num_actors follow from them.
SEARCHED = keys_with(PartConfig, layout=SEARCHED_KEY)


def held_keys(config: Config, overrides: Sequence[str] = ()) -> dict[str, frozenset[str]]:
    """By part of the run, the keys of `SEARCHED` that are set in a composed configuration, before it is resolved.

    A key that has its default counts as not set; a degree of 1 is set, for its default is null. parallelism and
    num_actors hold nothing: what they would leave to a degree, a search decides. Where a value comes from is not known:
    that of a shipped file is set as the user's own, and in the config.yaml of a run, which has every degree as a
    number, all are.

    overrides: of the command line, which alone say more. `text.zero_stage=0` holds what is the default too, and
    `text.tensor=null` or `~text.tensor` leaves a key to the search that a file had set."""
    plain = PartConfig()
    found = {
        name: {key for key in SEARCHED if getattr(part, key) != getattr(plain, key)}
        for name, part in parts(config).items()
    }
    for override in overrides:
        path, _, value = override.lstrip("+").partition("=")
        name, _, key = path.lstrip("~").partition(".")
        if name not in found or key not in SEARCHED:
            continue
        if path.startswith("~") or value in ("null", "auto"):
            found[name].discard(key)
        else:
            found[name].add(key)
    return {name: frozenset(keys) for name, keys in found.items()}


ALL = "all"  # every key that a search may set
ROWS, SCHEDULE, DEVICES = "training.micro_batch_size", "training.schedule", "cluster.collocate"
PASSES = "training.vision_batch"
RECOMPUTE = "recompute"
_STAGES = {"cuts": None, "virtual_stages": 1}  # keys that go with a number of stages


@dataclass(frozen=True)
class FixedKeys:
    """Settings that a search keeps. keys: by their whole names, in the order of the configuration."""

    keys: tuple[str, ...]

    def of(self, part: str) -> frozenset[str]:
        """The keys of a part's section."""
        return frozenset(key.partition(".")[2] for key in self.keys if key.startswith(f"{part}."))

    def layouts(self, config: Config) -> dict[str, frozenset[str]]:
        """By part, what a search for layouts keeps of it."""
        return {name: self.of(name) - {RECOMPUTE} for name in parts(config)}


def searched_keys(config: Config) -> list[str]:
    """The whole names of all keys that a search sets in a run with these parts."""
    of_parts = [f"{name}.{key}" for name in parts(config) for key in (*SEARCHED, RECOMPUTE)]
    return [*of_parts, ROWS, SCHEDULE, DEVICES, PASSES]


def find_held(
    config: Config, overrides: Sequence[str] = (), fix: Collection[str] = (), free: Collection[str] = ()
) -> FixedKeys:
    """What a search keeps of a composed configuration: what it sets, what `fix` names besides, less what `free` names
    (`ALL`: all that may be free).

    overrides: of the command line. training.micro_batch_size counts as set where they name it, and where it says how
    many rows of data.limits.text tokens there are, which another number would make another batch of; `ALL` does not
    free it then. With layout=free all is freed that overrides do not set. Raises ConfigError for a name that is no such
    key."""
    known = searched_keys(config)
    if config.layout == FREED:
        fix, free = {*fix, *(key for key in _set_by(overrides) if key in known)} - set(free), [*free, ALL]
    _check_names("fix", fix, known)
    _check_names("free", [name for name in free if name != ALL], known)
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    own = {f"{name}.{key}" for name, keys in held_keys(config, overrides).items() for key in keys}
    own |= {f"{name}.{RECOMPUTE}" for name, part in parts(config).items() if _chooses(part)}
    own |= {key for key in (ROWS, SCHEDULE, DEVICES, PASSES) if key in given}
    own |= {PASSES} if config.training.vision_batch != Config().training.vision_batch else set()
    own |= {SCHEDULE} if config.training.schedule != Config().training.schedule else set()
    own |= {DEVICES} if not config.cluster.collocate or config.cluster.chain else set()
    fixed_rows = {ROWS} if rows_by_tokens(config) else set()
    left = set() if ALL in free else own - set(free)
    held = left | set(fix) | (fixed_rows - set(free)) | _without_choice(config)
    return FixedKeys(tuple(key for key in known if key in held))


def _set_by(overrides: Sequence[str]) -> list[str]:
    """Keys to which a command line gives a value."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return [key for key, _, value in pairs if not key.startswith("~") and value not in ("null", "auto")]


def freed(config: Config, held: FixedKeys) -> Config:
    """The configuration with all that is not held as a search expects it: one actor a part, and recompute=auto.

    A key that is held without a value, as a degree that follows from parallelism and num_actors, gets the one that the
    run would have. Raises ConfigError where that is not known."""
    own: dict[str, Any] = {name: _freed(name, part, held.of(name)) for name, part in parts(config).items()}
    training, cluster, plain = config.training, config.cluster, Config()
    if SCHEDULE not in held.keys:
        training = replace(training, schedule=plain.training.schedule)
    if PASSES not in held.keys:
        training = replace(training, vision_batch=plain.training.vision_batch)
    if DEVICES not in held.keys:
        cluster = replace(cluster, collocate=True)
    return replace(config, training=training, cluster=cluster, **own)


def one_actor_each(config: Config) -> Config:
    """The run on one device, as far as layouts go: what its data and its model are does not depend on them."""
    alone = freed(config, FixedKeys((ROWS,)))
    return replace(alone, cluster=replace(alone.cluster, chain=False))


def _freed(name: str, part: PartConfig, held: Collection[str]) -> PartConfig:
    plain = PartConfig()
    values: dict[str, Any] = {key: getattr(plain, key) for key in SEARCHED if key not in held}
    unknown = [key for key in SEARCHED if key in held and getattr(part, key) is None]
    if unknown:
        run = resolve_part(name, part)
        values |= {key: getattr(run, key) for key in unknown}
    if "pipeline" not in held:
        values |= _STAGES
    if RECOMPUTE not in held:
        values |= {RECOMPUTE: "auto", "activation_checkpointing": False}
    if part.parallelism != "autotp" or "tensor" not in held:
        values["parallelism"] = plain.parallelism
    return replace(part, num_actors=1, **values)


def put(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with settings by their whole names, as `text.tensor`."""
    of_section: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        of_section.setdefault(section, {})[name] = value
    own: dict[str, Any] = {name: replace(getattr(config, name), **values) for name, values in of_section.items()}
    return replace(config, **own)


def _chooses(part: PartConfig) -> bool:
    return part.recompute not in (None, "auto") or part.activation_checkpointing


def _without_choice(config: Config) -> set[str]:
    alone = {name for name, part in parts(config).items() if part.compile or part.lora.quantization is not None}
    passes = {PASSES} if config.cluster.transport == NCCL else set()  # which several GPUs refuse with it above 1
    return {f"{name}.{RECOMPUTE}" for name in alone} | passes


def _check_names(what: str, names: Collection[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            others = "" if what == "fix" else f" or {ALL}"
            raise ConfigError(
                f"{what}={name} is no key that a search sets{did_you_mean([nearest(name, known)]) or '.'} Known are "
                f"{', '.join(known)}{others}; other keys are always as the configuration has them"
            )


def with_settings(config: Config, held: FixedKeys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's settings, and those that must go with them in the configuration that was searched from: recompute
    replaces activation_checkpointing, and cuts are of as many stages as they were made for."""
    found = dict(settings)
    for name, part in parts(config).items():
        if part.activation_checkpointing:
            found[f"{name}.activation_checkpointing"] = False
        if f"{name}.pipeline" not in held.keys:
            found |= {f"{name}.{key}": plain for key, plain in _STAGES.items() if getattr(part, key) != plain}
    return found
