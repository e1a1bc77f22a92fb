"""Finds and reads YAML files, refusing keys that run code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.config_source import ConfigSource as HydraSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from dhp.config.devices import nodes, shipped_directory
from dhp.config.keys import unknown_keys
from dhp.config.schema import Config
from dhp.config.vocabulary import has_alias, translated
from dhp.core.errors import ConfigError
from dhp.core.text import did_you_mean, nearest, shell_command

HYDRA = "hydra"
_CONSTRUCTED = ("_target_", "()")  # keys by which Hydra, and logging's configuration, name what they call
_OF_A_SWEEP = ("mode", "sweep.dir", "sweep.subdir", "sweeper.params")
_ADVICE = "A YAML file is data here. Give what is Hydra's on the command line"


def check_inert(file: str, values: Any, package: str | None) -> None:
    """Raise ConfigError for what is Hydra's own in a file, but `hydra.mode`, `hydra.sweep` and `hydra.sweeper.params`,
    and for names of something to construct.

    file: as Hydra has it, relative to its directory. values: what is in it. package: from its header."""
    if HYDRA in file.removesuffix(".yaml").split("/"):
        raise ConfigError(f"{file} configures Hydra itself. {_ADVICE}")
    if package is not None and HYDRA in package:
        raise ConfigError(f"in {file}: `@package {package}` puts the file into Hydra's own configuration. {_ADVICE}")
    if not isinstance(values, Mapping):
        return
    for key in _keys_below(values):
        if key in _CONSTRUCTED:
            raise ConfigError(f"in {file}: {key} names something to be constructed. {_ADVICE}")
    for entry in values.get("defaults") or ():
        if HYDRA in str(entry) or any("${" in str(group) for group in (entry if isinstance(entry, Mapping) else ())):
            raise ConfigError(f"in {file}: defaults has {entry}, which may choose a part of Hydra itself. {_ADVICE}")
    for key, value in values.items():
        if str(key).partition(".")[0] == HYDRA:
            _check_section(file, value if key == HYDRA else {str(key): value})


def _check_section(file: str, section: Any) -> None:
    """Of a sweep a file may say whether, where and over what."""
    settings = [str(section)]
    if isinstance(section, Mapping):
        settings = [f"{name}.{key}" for name, own in section.items() if isinstance(own, Mapping) for key in own]
        settings += [str(name) for name, own in section.items() if not isinstance(own, Mapping)]
        sweeper = section.get("sweeper")
        swept = sweeper.get("params") if isinstance(sweeper, Mapping) else None
        settings += [f"sweeper.params.{key}" for key in swept or () if HYDRA in str(key)]
    for setting in settings:
        if setting not in _OF_A_SWEEP:
            raise ConfigError(
                f"in {file}: {HYDRA}.{setting} is Hydra's own; a file may set "
                f"{', '.join(f'{HYDRA}.{one}' for one in _OF_A_SWEEP)}. {_ADVICE}"
            )


def _keys_below(values: Any) -> Iterator[str]:
    """Every key, however deep, of what YAML can hold."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _keys_below(value)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _keys_below(value)


_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_MISSING = object()


def guard_environment() -> None:
    """Make `${oc.env:NAME}` refuse variables that are secrets by their name."""
    OmegaConf.register_new_resolver("oc.env", _value_of, replace=True)


def _value_of(name: str, default: object = _MISSING) -> object:
    if _SECRET.search(name):
        raise ConfigError(
            f"${{oc.env:{name}}} is a secret by its name, and would be written into run_dir/config.yaml and sent to "
            "loggers. Leave it out: libraries read theirs from the environment themselves"
        )
    return oc.env(name) if default is _MISSING else oc.env(name, default)


# Hydra's own reader of directories, by the scheme under which it is known.
_sources: list[Any] = Plugins.instance().discover(HydraSource)
_Files: Any = next(source for source in _sources if source.scheme() == "file")


class YamlFiles(_Files):  # type: ignore[misc]
    """A directory of YAML files, given to Hydra as `dhp:///directory`. Files of groups are left as they are."""

    said: set[str] = set()  # Hydra reads a file several times; a notice is printed once

    @staticmethod
    def scheme() -> str:
        return "dhp"

    def load_config(self, config_path: str) -> ConfigResult:
        result: ConfigResult = super().load_config(config_path)
        values = OmegaConf.to_container(result.config, resolve=False)
        _refuse_boolean_names(values, self._normalize_file_name(config_path))
        check_inert(self._normalize_file_name(config_path), values, result.header.get("package"))
        if "/" not in config_path and isinstance(result.config, DictConfig):
            result.config, notices = _in_our_words(result.config, self._normalize_file_name(config_path))
            say([notice for notice in notices if notice not in self.said])
            self.said.update(notices)
        return result

    @classmethod
    def register(cls) -> None:
        """Make Hydra know the scheme, and begin a new configuration."""
        guard_environment()
        OmegaConf.register_new_resolver("nodes", nodes, replace=True)
        cls.said.clear()
        Plugins.instance().register(cls)


def _refuse_boolean_names(values: Any, file: str, within: str = "") -> None:
    """YAML takes no, off, yes and on for booleans. Raises ConfigError for one as a key, or as the name of a dataset."""
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(key, bool):
                raise ConfigError(_boolean(key, file, within))
            _refuse_boolean_names(value, file, f"{within}.{key}".lstrip("."))
    elif isinstance(values, list) and within.rpartition(".")[2] in ("datasets", "eval_datasets"):
        for value in values:
            if isinstance(value, bool):
                raise ConfigError(_boolean(value, file, within))


def _boolean(value: bool, file: str, within: str) -> str:
    words = "'yes', 'on' or 'true'" if value else "'no', 'off' or 'false'"
    return f"in {file}: {within or 'the top'} has a name that YAML takes for {str(value).lower()}. Quote it, as {words}"


def wrong_keys(file: Path) -> list[ConfigError]:
    """An error for each key of a run's own YAML that neither vocabulary has. None for a file that cannot be read as a
    configuration: Hydra will say why."""
    try:
        text = file.read_text(encoding="utf-8")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return []
    if not isinstance(values, dict) or "@package" in text.partition("\n")[0]:
        return []
    flat = {key: value for key, value in _flat(values).items() if key.partition(".")[0] not in ("defaults", HYDRA)}
    own = {key: value for key, value in flat.items() if not has_alias(key, value)}
    return unknown_keys(_nested(own), where=f"in {file.name}: ")


def say(notices: list[str]) -> None:
    """One line each on stderr."""
    for notice in notices:
        print(notice, file=sys.stderr, flush=True)


def _in_our_words(config: DictConfig, file: str) -> tuple[DictConfig, list[str]]:
    """The translated configuration and its notices; unchanged without notices when no key is of the other
    vocabulary."""
    flat = _flat(OmegaConf.to_container(config, resolve=False))
    if not any(has_alias(key, value) for key, value in flat.items()):
        return config, []
    try:
        values, notices = translated(flat)
    except ConfigError as error:
        raise ConfigError(f"in {file}: {error}") from error
    return OmegaConf.create(_nested(values)), [f"in {file}: {notice}" for notice in notices]


def _flat(config: Any) -> dict[str, Any]:
    """Keys of sections as `section.key`, one level deep: anything deeper is a value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        section = value if isinstance(value, dict) and value else None
        flat |= {f"{name}.{key}": below for key, below in section.items()} if section else {str(name): value}
    return flat


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested


ENTRY = "_dhp_entry"  # primary config that Hydra composes: schema, then settings of Hydra, then the named YAML
_SCHEMA = "_dhp_schema"
SWEEP = "dhp_sweep"  # a resolver: where Hydra keeps what belongs to a sweep, and to one of its jobs


def _sweep(what: str, *, _root_: DictConfig) -> str:
    """Runs of one sweep are numbered folders below its run_dir. One that numbers its jobs by itself has no name before
    they run: what belongs to the sweep goes above it."""
    if what == "subdir":
        return "." if names_jobs(_root_) else str(HydraConfig.get().job.num)
    return str(Path(_raw_run_dir(_root_).partition("$")[0] + "_").parent) if names_jobs(_root_) else str(_root_.run_dir)


def names_jobs(composed: DictConfig) -> bool:
    """Whether run_dir is another in each job of a sweep by itself."""
    return "hydra:job" in _raw_run_dir(composed)


def _raw_run_dir(composed: DictConfig) -> str:
    values = OmegaConf.to_container(composed, resolve=False)
    return str(values["run_dir"]) if isinstance(values, dict) else ""


_HELP = """usage: {called} FILE.yaml|--config-name=NAME key=value …

--help KEY …   type, default and meaning of a key, as data.balance, or of all keys of a section, as text
--hydra-help   the flags

Configurations: {names}

Keys and their values:

$CONFIG"""


def _help(names: Sequence[str]) -> str:
    return _HELP.format(called=" ".join(shell_command("train")), names=", ".join(names))


@dataclass(frozen=True)
class ConfigSource:
    """A configuration's name and the directories it is looked up in, first match first."""

    name: str | None
    directories: tuple[Path, ...]

    @classmethod
    def find(cls, name: str | None, config_path: str | None, more: tuple[str, ...] = ()) -> ConfigSource:
        """Check that the directories and the named YAML exist; `name` None means the schema's defaults alone.

        `config_path` (relative to the working directory) is searched before dhp's own configs, `more` after
        it. Raises ConfigError."""
        directories = []
        if config_path is not None:
            directories.append(_directory("--config-path", config_path))
        directories += [_directory("--config-dir", given) for given in more]
        if shipped_directory() not in directories:
            directories.append(shipped_directory())
        source = cls(name.removesuffix(".yaml") if name else None, tuple(directories))
        if source.name is not None:
            source._require_file()
        return source

    def names(self) -> list[str]:
        """Names of the configurations directly in the directories."""
        return sorted({file.stem for directory in self.directories for file in directory.glob("*.yaml")})

    def has_group(self, group: str) -> bool:
        """Whether `group` is a folder of configurations, which `group=choice` selects from."""
        return any((directory / group).is_dir() for directory in self.directories)

    def composes(self, group: str, name: str | None = None) -> bool:
        """Whether the defaults list of the YAML, or of one that it is composed over, has the group."""
        file = replace(self, name=name or self.name).file()
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else None
        except (YAMLError, ValueError):  # which composing says with its line
            return True
        listed = read.get("defaults") or [] if isinstance(read, dict) else []
        names = [key.split("@")[0].split()[-1] for one in listed if isinstance(one, dict) for key in one]
        over = [one.split("@")[0] for one in listed if isinstance(one, str) and one not in ("_self_", name, self.name)]
        return group in names or any(self.composes(group, one) for one in over)

    def choices(self, group: str) -> list[str]:
        """The configurations in the folder `group`."""
        files = [file for directory in self.directories for file in (directory / group).rglob("*.yaml")]
        located = [(file, next(d for d in self.directories if file.is_relative_to(d / group))) for file in files]
        return sorted({str(file.relative_to(d / group).with_suffix("")) for file, d in located})

    def file(self) -> Path | None:
        """The named YAML."""
        files = [directory / f"{self.name}.yaml" for directory in self.directories]
        return next((file for file in files if file.is_file()), None)

    def register(self) -> None:
        """Put the schema and the entry config over this source into Hydra's store.

        The entry makes the schema the base of every YAML, so that a YAML needs no defaults list, and keeps
        Hydra from writing directories, changing the working directory and configuring logging."""
        YamlFiles.register()
        OmegaConf.register_new_resolver(SWEEP, _sweep, replace=True)
        store = ConfigStore.instance()
        store.store(name=_SCHEMA, node=Config)
        named = [f"{self.name}@_global_"] if self.name else []
        quiet = [{"override hydra/job_logging": "disabled"}, {"override hydra/hydra_logging": "disabled"}]
        store.store(
            name=ENTRY,
            node={
                "defaults": [_SCHEMA, "_self_", *named, *quiet],
                "hydra": {
                    "searchpath": [f"{YamlFiles.scheme()}://{directory}" for directory in self.directories],
                    "output_subdir": None,
                    "run": {"dir": "."},
                    "sweep": {"dir": f"${{{SWEEP}:dir}}", "subdir": f"${{{SWEEP}:subdir}}"},
                    "job": {"name": "train_ray", "chdir": False},
                    "help": {"app_name": "dhp.train_ray", "template": _help(self.names())},
                },
            },
        )

    def _require_file(self) -> None:
        if self.file() is not None:
            return
        found = self.names()
        given = Path(f"{self.name}.yaml")
        if given.is_file():
            raise ConfigError(
                f"--config-name={self.name} is a name, not a path. The file {given} is used by giving it alone, or by\n"
                f"  --config-path={given.parent} --config-name={given.stem}"
            )
        raise ConfigError(
            f"--config-name={self.name} does not exist{did_you_mean([nearest(str(self.name), found)])}\n"
            f"  searched: {', '.join(str(directory) for directory in self.directories)}\n"
            f"  found: {', '.join(found) or 'none'}"
        )


def named_file(
    arguments: Sequence[str], name: str | None, config_path: str | None
) -> tuple[tuple[str | None, str | None], list[str]]:
    """(name, config_path) as the flags say, or as one FILE.yaml among the arguments says; and the other arguments.

    What has `=` in it is an override, whatever it ends with. Raises ConfigError for two files, for a file together with
    the flags, and for one that does not exist."""
    files = [part for part in arguments if _is_file(part)]
    if not files:
        return (name, config_path), list(arguments)
    given = [f"--config-name={name}"] * (name is not None) + [f"--config-path={config_path}"] * (
        config_path is not None
    )
    if len(files) > 1 or given:
        raise ConfigError(f"{' and '.join([*files, *given])} all name the configuration; give one")
    file = Path(files[0]).expanduser()
    if not file.is_file():
        beside = nearest(file.name, sorted(one.name for one in file.parent.glob("*.yaml")))
        hint = did_you_mean([str(file.with_name(beside)) if beside else None])
        raise ConfigError(
            f"{files[0]} does not exist ({file.absolute()}){hint or '; give a YAML file, or --config-name=NAME'}"
        )
    if file.suffix != ".yaml":
        raise ConfigError(f"{files[0]}: Hydra reads files that end with .yaml; rename it to {file.stem}.yaml")
    return (file.stem, str(file.parent)), [part for part in arguments if part != files[0]]


def _is_file(part: str) -> bool:
    return not part.startswith(("-", "~")) and "=" not in part and part.endswith((".yaml", ".yml", ".json"))


def _directory(flag: str, given: str) -> Path:
    directory = Path(given).expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError(
            f"{flag}={given} is not a directory ({directory}); give the directory that holds the YAML, "
            "absolute or relative to the working directory"
        )
    return directory
