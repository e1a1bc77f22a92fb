"""Reads a run's command line: Hydra's overrides, checked."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dhp.config.hydra_errors import translated_errors
from dhp.config.keys import ANY_NAME, Key, default_words, find_key, schema_keys, type_words, unknown_key, unknown_keys
from dhp.config.schema import Config
from dhp.config.vocabulary import has_alias, names_here, translated
from dhp.config.yaml_files import ENTRY, ConfigSource, named_file, names_jobs, say, wrong_keys
from dhp.core.errors import ConfigError, DhpError, raise_all
from dhp.core.text import did_you_mean, harmless, nearest


@dataclass(frozen=True)
class _Entry:
    """`section.NAME.field=value`, which is merged into the section: Hydra alone cannot add an entry of a declared type.
    path: below the section. value: in Hydra's words."""

    section: str
    path: tuple[str, ...]
    value: str


def checked_overrides(arguments: Sequence[str], source: ConfigSource, others: Sequence[ConfigError] = ()) -> list[str]:
    """The overrides to hand to Hydra. Raises ConfigError, one for all, for text that is no override and for
    unknown keys, those in the named YAML included. others: what else is wrong with the command line.

    `key=value` and `+key=value` set a key of the schema alike (all of them exist, and entries of a
    dictionary need not); `~key` returns it to its default. Overrides of Hydra itself, of config groups and
    deletions of dictionary entries go through as they are."""
    parsed, errors = [], list(others)
    for argument in arguments:
        try:
            parsed.append((argument, _parse(argument)))
        except ConfigError as error:
            errors.append(error)
    of_others = [override for _, override in parsed if _is_alias(override)]
    own: list[str | _Entry] = []
    for argument, override in parsed:
        try:
            own += [] if override in of_others else [_checked(argument, override, source)]
        except ConfigError as error:
            errors.append(error)
    file = source.file()
    raise_all(([] if file is None else wrong_keys(file)) + errors)
    return _joined(own) + _translated(parsed, of_others)


def _is_alias(override: Override) -> bool:
    plain = override.package is None and not (override.is_delete() or override.is_sweep_override())
    return plain and has_alias(override.key_or_group, _value(override))


def _translated(parsed: Sequence[tuple[str, Override]], of_others: Sequence[Override]) -> list[str]:
    """Overrides in the vocabulary of `dhp.config.vocabulary`, translated to ours; each is named on stderr."""
    if not of_others:
        return []
    plain = [override for _, override in parsed if not (override.is_delete() or override.is_sweep_override())]
    values, notices = translated({override.key_or_group: _value(override) for override in plain})
    say(notices)
    own = {override.key_or_group: _value(override) for override in plain if override not in of_others}
    changed = {key: value for key, value in values.items() if key not in own or value != own[key]}
    return [f"++{key}={_hydra_literal(value)}" for key, value in changed.items()]


def _value(override: Override) -> Any:
    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def wrong_flags(arguments: Sequence[str], known: Collection[str]) -> list[ConfigError]:
    """An error for each flag `--key` that is none of Hydra's: other trainers' command lines have settings so."""
    errors = []
    for argument, following in zip(arguments, [*arguments[1:], "-"]):
        flag, _, value = argument.partition("=")
        # Hydra's flag of this name has no value; LLaVA's names a template.
        versioned = flag == "--version" and bool(value or not following.startswith("-"))
        if not flag.startswith("--") or (any(one.startswith(flag) for one in known) and not versioned):
            continue
        key = flag[2:].replace("-", "_")
        hint = f"write {key}={value or 'VALUE'}" if find_key(key) else str(unknown_key(key)).partition("; ")[2]
        errors.append(ConfigError(f"{flag} is no flag: settings are key=value; {hint}"))
    return errors


def _checked(argument: str, override: Override, source: ConfigSource) -> str | _Entry:
    name = override.key_or_group
    is_hydras = name == "hydra" or name.startswith(("hydra.", "hydra/"))
    is_choice = source.has_group(name) and not isinstance(override.value(), dict)
    if is_choice and not is_hydras:
        _check_choice(name, override.value(), source)
        if not argument.startswith(("+", "~")) and not source.composes(name):
            return f"+{argument}"
    if is_hydras or override.package is not None or is_choice:
        return argument
    key = find_key(name)
    if key is None and names_here(name):
        raise ConfigError(
            f"{name} can be set to one value only; to sweep or unset it, use {', '.join(names_here(name))}"
        )
    if key is None:
        raise unknown_key(name)
    value = override.value()
    if key.is_section and isinstance(value, dict):
        raise_all(unknown_keys(value, name))
    in_entry = ANY_NAME in key.path
    if override.is_delete():
        return argument if in_entry or key.is_section else f"++{name}={_hydra_literal(key.default)}"
    if in_entry and not override.is_sweep_override():
        return _merged_entry(key, override)
    return f"++{argument.lstrip('+')}"


def _check_choice(group: str, value: Any, source: ConfigSource) -> None:
    """`group=value` takes one of the configurations in a folder. Raises ConfigError, with all of them, for another."""
    choices = source.choices(group)
    if isinstance(value, str) and value.removesuffix(".yaml") not in choices:
        suggestion = did_you_mean([nearest(value, choices)])
        raise ConfigError(f"{group}={value} does not exist; choose from {', '.join(choices)}{suggestion}")


def _merged_entry(key: Key, override: Override) -> _Entry:
    section, _, below = key.path.partition(f".{ANY_NAME}")
    name = override.key_or_group.removeprefix(f"{section}.").removesuffix(below)
    path = (name, *(below[1:].split(".") if below else ()))
    return _Entry(section, path, override.get_value_element_as_str())


def _joined(overrides: Sequence[str | _Entry]) -> list[str]:
    """Overrides as Hydra takes them. Entries of one section are one override: a sweep would keep the last
    of several for the same section alone."""
    texts: list[str] = []
    section, place, tree = "", 0, dict[str, Any]()
    for one in overrides:
        if isinstance(one, str):
            section = "" if section and section in one else section  # what is set later stays later
            texts.append(one)
            continue
        if one.section != section or not _put(tree, one):
            section, place, tree = one.section, len(texts), {}
            _put(tree, one)
            texts.append("")
        texts[place] = f"++{section}={_braces(tree)}"
    return texts


def _put(tree: dict[str, Any], entry: _Entry) -> bool:
    """Whether the entry has a place in the tree, where it is then: a value that is written whole has none inside."""
    *names, last = entry.path
    for name in names:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return False
    if isinstance(tree.get(last), dict):
        return False
    tree[last] = entry.value
    return True


def _braces(tree: Any) -> str:
    if isinstance(tree, str):
        return tree
    return "{" + ",".join(f"{name}:{_braces(inner)}" for name, inner in tree.items()) + "}"


def _parse(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{argument!r} is not an override ({reason}); write key=value, and quote a value with special "
            "characters twice: 'key=\"a, b\"'"
        ) from error


def is_swept(argument: str) -> bool:
    """Whether the override has several values, one for each job. Raises ConfigError for what is none."""
    return _parse(argument).is_sweep_override()


def _hydra_literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) else str(value).replace("'", "")


def compose_config(config_name: str | None, config_path: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration that `--config-name=… --config-path=… overrides…` means, not yet resolved.

    None as the name gives the schema's defaults. Raises ConfigError for an unknown name, directory or key
    and for a value of the wrong type."""
    source = ConfigSource.find(config_name, config_path)
    source.register()
    arguments = checked_overrides(overrides, source)
    with translated_errors(), initialize(None, version_base="1.3"):
        return to_config(compose(ENTRY, arguments))


def to_config(composed: DictConfig) -> Config:
    """Hydra's composed configuration as plain dataclasses, interpolations replaced. Raises ConfigError."""
    with translated_errors():
        config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise ConfigError(f"the composed configuration is a {type(config).__name__}, not one of dhp's schema")
    return config


def with_words(config: Config, words: Sequence[str]) -> Config:
    """A composed configuration with settings as on a command line. Raises ConfigError."""
    for word in words:
        key, sign, _ = word.partition("=")
        if not sign:
            raise ConfigError(f"{word} is no setting; write key=value, apart by spaces")
        if find_key(key) is None:
            raise unknown_key(key)
    with translated_errors():
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(words)))
    assert isinstance(merged, DictConfig)
    return to_config(merged)


def job_overrides() -> list[str]:
    """The settings of the command line of this process's run; none in a program of one's own."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def same_command(argv: Sequence[str], changes: Mapping[str, str], words: Sequence[str] = ()) -> list[str]:
    """The arguments that ask again for the job that is run now, with other values of some keys. argv: those of this
    process; of a sweep's job, its own settings take their place. words: further settings, as they are written."""
    flags, rest = _config_flags(list(argv))
    (name, path), _ = named_file(rest, flags.config_name, flags.config_path)
    named = [f"--config-path={path}"] * (path is not None) + [f"--config-name={name}"] * (name is not None)
    named += [f"--config-dir={folder}" for folder in flags.config_dir]
    set_anew = {*changes, *(word.partition("=")[0] for word in words)}
    kept = [word for word in job_overrides() if word.lstrip("+~").partition("=")[0] not in set_anew]
    return [*named, *kept, *(f"{key}={_quoted(value)}" for key, value in changes.items()), *words]


def _quoted(value: str) -> str:
    """A text as Hydra's grammar reads it back: backslashes are doubled before a quote alone."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def to_yaml(config: Config) -> str:
    """The configuration as YAML text that `compose_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


_WIDTH, _INDENT = 110, "    "


def key_help(paths: Iterable[str], source: ConfigSource) -> str:
    """A paragraph a key, as in docs/reference/configuration.md. A section has those of all its keys behind its own, and
    the choices of the folder of configurations that has its name. Raises ConfigError for what is no key, with the
    nearest one, for all of them at once."""
    wanted = list(paths)
    raise_all([unknown_key(path) for path in wanted if find_key(path) is None])
    return "\n\n".join(_paragraph(key, source) for path in wanted for key in _of(path))


def _of(path: str) -> list[Key]:
    """The key, and in a section all below it; the settings of a training stage are a run's own and not repeated."""
    key = find_key(path)
    if key is None or not key.is_section:
        return [key] if key else []
    return [key, *(below for name, below in schema_keys().items() if name.startswith(f"{key.path}."))]


def _paragraph(key: Key, source: ConfigSource) -> str:
    if key.is_section:
        head = f"{key.path}: a section of keys"
        if source.has_group(key.path):
            head += f"; {key.path}=NAME takes a configuration: {', '.join(source.choices(key.path))}"
    else:
        head = f"{key.path}: {type_words(key.type)}; default {default_words(key)}"
    return "\n".join([head, *wrap(key.doc, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)])


# Hydra's own flags that are written with two dashes, but --experimental-rerun, which unpickles a file.
_FLAGS = {
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir"),
}
_HELP_FLAGS = {"--help", "-h", "--hydra-help", "--version"}


def hydra_entry(run: Callable[[Config], None], argv: Sequence[str] | None = None) -> None:
    """Call `run` with the configuration that the command line asks for, once, or once a job with --multirun.

    `argv` are the arguments after the program's name; None takes those of the process. Any DhpError, from
    the configuration or from `run`, is printed to stderr without a traceback and ends the process with
    status 1; other exceptions pass through."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not while it is captured
            stream.reconfigure(errors="backslashreplace")  # no arrow in a table ends a run where the locale is ASCII
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        _check_letters("\n".join(arguments))
        _enter(run, arguments)
    except DhpError as error:
        exit_with(error)


def _check_letters(text: str) -> None:
    """Refuse what the locale cannot write: a name of a file may be made of it. Raises ConfigError."""
    encoding = sys.getfilesystemencoding()
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        line = text[text.rfind("\n", 0, error.start) + 1 :].partition("\n")[0].strip()
        shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        raise ConfigError(
            f"the locale's encoding, {encoding}, cannot write all of {shown}. Set PYTHONUTF8=1, or a locale such as "
            "LC_ALL=C.UTF-8"
        ) from error


def _enter(run: Callable[[Config], None], argv: list[str]) -> None:
    flags, rest = _config_flags(argv)
    named, rest = named_file(rest, flags.config_name, flags.config_path)
    source = ConfigSource.find(*named, tuple(flags.config_dir))
    asked = _help_keys(rest)
    if asked:
        print(key_help(asked, source))
        return
    wrong = wrong_flags(rest, _FLAGS)
    if source.name is None and (wrong or not _HELP_FLAGS & set(rest)):
        names = ", ".join(source.names())
        raise_all([*wrong, ConfigError(f"name a FILE.yaml, or --config-name=NAME, of which there are: {names}")])
    source.register()

    def job(composed: DictConfig) -> None:
        # Hydra would announce a failed job and print its overrides before the message; leave before it can.
        try:
            config = _numbered(to_config(composed), names_jobs(composed), rest)
            _check_letters(to_yaml(config))
            run(config)
        except DhpError as error:
            exit_with(error)

    _call_hydra(job, _checked_arguments(rest, source))


def _help_keys(rest: list[str]) -> list[str]:
    """The words behind --help: keys that are asked for. None with anything else on the command line."""
    words = [part for part in rest if part not in ("--help", "-h")]
    return [] if len(words) == len(rest) or any(part.startswith(("-", "~")) or "=" in part for part in words) else words


def _config_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=None)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    return parser.parse_known_args(argv)


def _checked_arguments(rest: list[str], source: ConfigSource) -> list[str]:
    """The arguments with each override checked; flags and their values (`--cfg job`) go through.

    Overrides come first: the parser that Hydra uses takes them from one place only."""
    overrides = [part for part in rest if _is_override(part)]
    flags = wrong_flags(rest, _FLAGS)
    if flags:  # what follows one is its value, and no setting of ours
        overrides = [part for before, part in zip(["", *rest], rest) if _is_override(part) and before[:2] != "--"]
    return checked_overrides(overrides, source, flags) + [part for part in rest if not _is_override(part)]


def _is_override(part: str) -> bool:
    return not part.startswith("-") and ("=" in part or part.startswith("~"))


def _numbered(config: Config, named: bool, arguments: list[str]) -> Config:
    """In a sweep, give each job a directory of its own below run_dir, unless run_dir names jobs or is swept."""
    job = HydraConfig.get()
    each = named or any(is_swept(part) for part in arguments if part.lstrip("+").startswith("run_dir="))
    if job.mode == RunMode.MULTIRUN and not each:
        config.run_dir = str(Path(config.run_dir) / str(job.job.num))
    return config


def _call_hydra(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us instead of Hydra's own printing
    command = hydra.main(config_path=None, config_name=ENTRY, version_base="1.3")(job)
    program, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with translated_errors():
            command()
    finally:
        sys.argv = program


def exit_with(error: DhpError, status: int = 1) -> NoReturn:
    """Print the error as a person reads it, and end the process."""
    print(f"{type(error).__name__}: {harmless(str(error))}", file=sys.stderr, flush=True)
    sys.exit(status)
