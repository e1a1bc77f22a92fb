"""A rule between settings as a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace

from dhp.config.part import PartConfig
from dhp.config.schema import Config
from dhp.config.vocabulary import shown_value
from dhp.core.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Settings that exclude each other. keys: dotted, separated by spaces; the error begins with them and their values,
    as `A=1 with B=2 and C=3`. when: whether they do, by the resolved section of a part, and by the configuration where
    the rule is about a whole run. says: the rest of the error.

    In keys and says, {name} is the part, {p} its section, {c} the configuration.
    """

    keys: str
    when: Callable[..., bool]
    says: str

    def error(self, name: str, part: PartConfig, config: Config | None) -> ConfigError:
        """The error for a part of that name."""
        settings = SimpleNamespace(**{**(vars(config) if config else {}), name: part})
        keys = self.keys.format(name=name).split()
        first, *others = (f"{key}={shown_value(attrgetter(key)(settings))}" for key in keys)
        shown = f"{first} with {' and '.join(others)}" if others else first
        return ConfigError(shown + self.says.format(name=name, p=part, c=config))


def check_rules(rules: Sequence[Rule], name: str, part: PartConfig, config: Config | None = None) -> None:
    """Raises ConfigError for the first rule that a resolved part breaks. config: of the run, for rules about it."""
    for rule in rules:
        if rule.when(part, *([] if config is None else [config])):
            raise rule.error(name, part, config)


def goes_with(
    key: str, asked: Callable[[PartConfig], bool], leave: str, *others: tuple[str, object, str]
) -> list[Rule]:
    """Rules of a setting that goes with one value of others alone. asked: whether a part has it. leave: the way
    without it. others: key, the value or values that it goes with, why."""
    rules = []
    for other, fits, why in others:
        values = fits if isinstance(fits, tuple) else (fits,)

        def when(p: PartConfig, other: str = other, values: tuple[object, ...] = values) -> bool:
            return asked(p) and attrgetter(other)(p) not in values

        needed = " or ".join(map(shown_value, values))
        says = f": {why}. Set {{name}}.{other}={needed}, or {leave}."
        rules.append(Rule(f"{{name}}.{key} {{name}}.{other}", when, says))
    return rules
