"""Lists the schema's keys, and names those that are not."""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from dhp.config.schema import Config
from dhp.config.vocabulary import foreign_hint, mistyped_hint
from dhp.core.errors import ConfigError
from dhp.core.text import did_you_mean, nearest_key

ANY_NAME = "<name>"  # stands for a name of the user's choice in a dotted key

_TYPE_WORDS = {
    Any: "true, false or two steps",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


@dataclass(frozen=True)
class Key:
    """One leaf of the schema, or one section (`default` is then None)."""

    path: str
    type: Any
    default: Any
    doc: str
    is_section: bool
    advanced: bool = False


_SETTINGS = f"stages.{ANY_NAME}.settings."  # of a training stage: any key of a run


@cache
def schema_keys() -> dict[str, Key]:
    """Every key of the schema by its dotted path, in the order written; sections come before their keys."""
    return {key.path: key for key in _walk(Config(), "")}


def find_key(path: str) -> Key | None:
    """The key at `path`, where a name of the user's choice matches `<name>`; None when there is none. One value of a
    mapping, as `columns.images`, is a key too, and so is a key of a run inside `stages.<name>.settings`."""
    chosen = _chosen(path)
    generic = path if chosen is None else ".".join([chosen[0], ANY_NAME, *chosen[1][1:]])
    if generic.startswith(_SETTINGS):
        inner = find_key(generic.removeprefix(_SETTINGS))
        return None if inner is None else replace(inner, path=_SETTINGS + inner.path)
    mapping = schema_keys().get(generic.rpartition(".")[0])
    if mapping is not None and get_origin(mapping.type) is dict and not mapping.is_section:
        return Key(generic, get_args(mapping.type)[1], None, mapping.doc, is_section=False)
    return schema_keys().get(generic)


def known_paths(path: str) -> list[str]:
    """All dotted paths, with the name of the user's choice that `path` uses filled in."""
    chosen = _chosen(path)
    return [known.replace(ANY_NAME, chosen[1][0] if chosen else ANY_NAME) for known in schema_keys()]


def type_words(annotation: Any) -> str:
    """A type as a person says it: `a whole number or null`."""
    options = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    words = []
    for option in options:
        if get_origin(option) is list:
            example = "[0.9, 0.999]" if get_args(option)[0] is float else "[first, second]"
            words.append(f"a list such as {example}")
        elif get_origin(option) is dict and not is_dataclass(get_args(option)[1]):
            words.append("a mapping such as {images: photos}")
        elif get_origin(option) is dict or is_dataclass(option):
            words.append("a section of keys")
        else:
            words.append("null" if option is type(None) else _TYPE_WORDS[option])
    return " or ".join(words)


def default_words(key: Key) -> str:
    """A key's default between backticks, as it is written in YAML; `to be set`, without them, where there is none."""
    if key.default == "" and ANY_NAME in key.path:
        return "to be set"
    return f"`{key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)}`"


def _walk(made: Any, prefix: str) -> Iterator[Key]:
    """made: a section with its defaults."""
    section: type = type(made)
    docs, hints = field_docs(section), get_type_hints(section)
    for field in fields(section):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        inner = hint if isinstance(hint, type) and is_dataclass(hint) else _entry_type(hint)
        if inner is None:
            advanced = field.metadata.get("advanced", False)
            yield Key(path, hint, getattr(made, field.name), docs.get(field.name, ""), False, advanced)
            continue
        doc = docs.get(field.name, "") or inspect.getdoc(inner) or ""
        yield Key(path, hint, None, doc, is_section=True)
        below = path if is_dataclass(hint) else f"{path}.{ANY_NAME}"
        if not is_dataclass(hint):
            yield Key(below, inner, None, inspect.getdoc(inner) or "", is_section=True)
        yield from _walk(getattr(made, field.name) if is_dataclass(hint) else inner(), f"{below}.")


def _entry_type(hint: Any) -> type | None:
    if get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
        return get_args(hint)[1]
    return None


@cache
def field_docs(section: type) -> dict[str, str]:
    """The string below each field of a dataclass, on one line, by the field's name."""
    (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(section))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    found = {}
    for statement, following in zip(body, body[1:]):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _chosen(path: str) -> tuple[str, list[str]] | None:
    """The section in which a path names an entry of the user's, and the names behind it; None for any other path."""
    for known in schema_keys():
        section = known.removesuffix(f".{ANY_NAME}")
        if section != known and path.startswith(f"{section}."):
            return section, path.removeprefix(f"{section}.").split(".")
    return None


def unknown_key(path: str, where: str = "") -> ConfigError:
    """The error for a dotted key that the schema does not have: what another trainer's key is called here, else the
    nearest one that it has."""
    ours = did_you_mean(nearest_key(path, known_paths(path)))
    hint = foreign_hint(path) or ours or mistyped_hint(path) or _keys_beside(path)
    return ConfigError(f"{where}{path} is not a key{hint}")


def unknown_keys(values: Mapping[Any, Any], section: str = "", where: str = "") -> list[ConfigError]:
    """An error for each key of `values`, the contents of `section`, that the schema does not have."""
    errors = []
    for name, value in values.items():
        path = f"{section}.{name}" if section else str(name)
        key = find_key(path)
        if key is None:
            errors.append(unknown_key(path, where))
        elif key.is_section and isinstance(value, Mapping):
            errors += unknown_keys(value, path, where)
    return errors


def _keys_beside(path: str) -> str:
    section = path.rpartition(".")[0]
    while section and not find_key(section):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    beside = [known for known in known_paths(path) if known.startswith(prefix) and "." not in known[len(prefix) :]]
    return f"; {section or 'the top level'} has {', '.join(known[len(prefix) :] for known in beside)}"
