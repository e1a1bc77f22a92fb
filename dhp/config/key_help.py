"""The text of `--help KEY`: type, default and meaning of one key, or of all keys of a section."""

from collections.abc import Iterable
from textwrap import wrap

from dhp.base.errors import raise_all
from dhp.config.keys import Key, default_words, find_key, schema_keys, type_words
from dhp.config.search_path import ConfigSource
from dhp.config.translate import unknown_key

_WIDTH, _INDENT = 110, "    "


def key_help(paths: Iterable[str], source: ConfigSource) -> str:
    """A paragraph a key: what docs/configuration.md says of it. A section has those of all its keys behind its own, and
    the choices of the folder of configurations that has its name. Raises ConfigError for what is no key, with the
    nearest one, for all of them at once.
    """
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
