"""Private names of transformers; tests/core/test_transformers_private.py has their canaries."""

from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

TIED_KEYS = "_tied_weights_keys"  # of a model's class: which weights are one
IGNORED_KEYS = "_keys_to_ignore_on_load_unexpected"  # of a model or its class: patterns of keys that it does not load


_RENAMES = "transformers.utils.deprecation"  # where its decorators that give arguments new names are
_INNER = "func"  # as these call the function that they are around


def set_attention(config: Any, name: str) -> None:
    """Make a configuration's model call this attention. The property's setter looks names with "flash" up on the hub,
    and asks the whole model, parts of which may not be here."""
    config._attn_implementation_internal = name


def set_experts(config: Any, name: str) -> None:
    """Make a configuration's model multiply experts so. The property's setter asks the whole model."""
    config._experts_implementation_internal = name


def class_of(auto: Any, config: type) -> Any:
    """The class that an Auto class has for a class of configurations. Raises KeyError where it has none."""
    return auto._model_mapping[config]


def has_class(auto: Any, config: type) -> bool:
    """Whether an Auto class knows a class of configurations."""
    return config in auto._model_mapping


def registered_classes(auto: Any) -> list[Any]:
    """The classes that users registered with an Auto class."""
    return list(auto._model_mapping._extra_content.values())


def expand_plan(model: Any, plan: Mapping[str, str]) -> Any:
    """A tensor-parallel plan with its patterns expanded to a model's modules."""
    return model._expand_parallel_plan(plan)


def tensor_plan(model: Any) -> dict[str, str]:
    """The rules of a model's tensor-parallel plan, without those of its children."""
    return model._tp_plan


def set_tensor_plan(model: Any, plan: dict[str, str]) -> None:
    """Replace these rules."""
    model._tp_plan = plan


def encodes_as(tokenizer: Any, base: Any) -> bool:
    """Whether a tokenizer's call is that of the class `base`: no class of its own changes it."""
    own = type(tokenizer)
    return own._encode_plus is base._encode_plus and own.__call__ is base.__call__


def ties_of(model: Any) -> Mapping[str, str]:
    """Weights of a model's class that are others, by name."""
    return model._tied_weights_keys or {}


def ignored_patterns(model: Any) -> list[str]:
    """Patterns of keys that a model, or its class, does not load."""
    return sorted(getattr(model, IGNORED_KEYS) or ())


def unsaved_names(model: Any) -> set[str]:
    """Weights of a model that its files lack."""
    return set(model._keys_to_ignore_on_save or ())


def renamed_inner(function: Any) -> Any:
    """The function itself, without the library's decorators that only give arguments new names. Others stay."""
    while _is_renaming(function):
        function = function.__wrapped__
    return function


def with_renamed_inner(function: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its decorators of that kind, around `inner` in the place of `renamed_inner(function)`: without
    them, an argument of the old name would be lost among those that a forward hands on."""
    if not _is_renaming(function):
        return inner
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    cells[_INNER] = CellType(with_renamed_inner(function.__wrapped__, inner))
    again = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells.values()))
    again.__wrapped__ = cells[_INNER].cell_contents  # type: ignore[attr-defined]
    return again


def _is_renaming(function: Any) -> bool:
    return (
        isinstance(function, FunctionType)
        and function.__globals__.get("__name__") == _RENAMES
        and _INNER in function.__code__.co_freevars
    )
