"""Chooses trained parameters by rules over names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TypeVar

from dhp.core.errors import ConfigError

Number = TypeVar("Number", int, float)
PERSISTENT_ELEMENTS = 100_000  # ZeRO's stage 3 leaves parameters up to this size whole: biases, norms
_ADAPTERS = {"lora_A", "lora_B", "lora_magnitude_vector"}  # pieces of the names that peft gives adapters' parameters
EXPERTS = "experts"  # the module that has all experts of a layer as matrices of three axes
_BASE = "base_layer"  # and of the names of the weights that they adapt


@dataclass(frozen=True)
class Selector:
    """Some parameters: those inside modules, or those whose names fit a pattern.

    said: as the user wrote it; the pattern, where `inside` names no modules. inside: modules; outside: those within
    them that do not count.

    A pattern names neighbouring pieces of a parameter's dotted name, from anywhere on: `merger`, `layers.0`,
    `q_proj.weight`. `*` stands for any letters, dots included, `?` for one, `[0-9]` for one of several."""

    said: str
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def fits(self, name: str) -> bool:
        """Whether the parameter of that name is one of them."""
        if self.inside:
            return is_inside(name, self.inside) and not is_inside(name, self.outside)
        return _compiled(self.said).fullmatch(name) is not None


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one learning rate and one decay are for. warmup_steps: of its learning rate."""

    name: str
    learning_rate: float
    weight_decay: float
    warmup_steps: int


@dataclass(frozen=True)
class GroupRule:
    """Settings that differ for some parameters; None: as without the rule."""

    name: str
    selectors: tuple[Selector, ...]
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None

    def fits(self, name: str) -> bool:
        """Whether it applies to the parameter of that name."""
        return any(selector.fits(name) for selector in self.selectors)


@dataclass(frozen=True)
class TrainingRules:
    """Trained parameters: those that `trainable` selects (none: all), without those of `frozen`. How: by `groups`, of
    which a later one beats an earlier one in what it says.

    adapted: parts that have adapters. Those are trained whatever is selected, and of the parts' own weights only what
    `trainable` selects."""

    trainable: tuple[Selector, ...] = ()
    frozen: tuple[Selector, ...] = ()
    groups: tuple[GroupRule, ...] = ()
    adapted: tuple[Selector, ...] = ()

    @property
    def selects(self) -> bool:
        """Whether anything may be left out."""
        return bool(self.trainable or self.frozen or self.adapted)

    def trains(self, name: str) -> bool:
        """Whether the parameter of that name is trained."""
        if is_adapter(name):
            return True
        name = plain_name(name)
        chosen = _any(self.trainable, name) or not (self.trainable or _any(self.adapted, name))
        return chosen and not _any(self.frozen, name)

    def group(self, name: str, default: ParameterGroup) -> ParameterGroup:
        """The group of the parameter of that name; `default` where no rule applies to it."""
        found, rules = default, [rule for rule in self.groups if rule.fits(plain_name(name))]
        for rule in rules:
            found = ParameterGroup(
                "+".join(rule.name for rule in rules),
                _first(rule.learning_rate, found.learning_rate),
                _first(rule.weight_decay, found.weight_decay),
                _first(rule.warmup_steps, found.warmup_steps),
            )
        return found

    def default_name(self, part: str) -> str:
        """The name of the group of a part's parameters that no rule is about: the part's, which a rule may have too."""
        taken, name = {rule.name for rule in self.groups}, part
        while name in taken:
            name = f"rest of {name}"
        return name

    def selectors(self) -> Iterable[tuple[str, Selector]]:
        """All of them, each with the configuration's key that it stands under."""
        yield from (("training.trainable", selector) for selector in self.trainable)
        yield from (("training.frozen", selector) for selector in self.frozen)
        for rule in self.groups:
            yield from ((f"training.groups.{rule.name}", selector) for selector in rule.selectors)


ALL = TrainingRules()  # everything is trained alike


def is_adapter(name: str) -> bool:
    """Whether the parameter of that name is an adapter's."""
    return not _ADAPTERS.isdisjoint(name.split("."))


def names_experts(pattern: str) -> bool:
    """Whether a pattern of lora.targets may select matrices of experts: it has their module's name as a piece."""
    return EXPERTS in re.split(r"[.*]", pattern)


def plain_name(name: str) -> str:
    """The name that a parameter or module has in the model without adapters."""
    return name.replace(f".{_BASE}", "")


def is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a module or parameter of that name is one of the modules, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _any(selectors: Sequence[Selector], name: str) -> bool:
    return any(selector.fits(name) for selector in selectors)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*|\?|\[[^]]+\])", pattern)
    wild = {"*": ".*", "?": "."}
    body = "".join(wild.get(p) or (p if p.startswith("[") else re.escape(p)) for p in pieces)
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})(?:\..*)?")
    except re.error as error:
        raise ConfigError(
            f"{pattern} is no pattern of parameters' names ({error}). `*` stands for any letters, `?` for one, and "
            "`[0-9]` for one of a range that goes upwards"
        ) from error


def _first(value: Number | None, otherwise: Number) -> Number:
    return otherwise if value is None else value


ADAMW, MUON, ADAFACTOR = OPTIMIZERS = ("adamw", "muon", "adafactor")
NF4 = "nf4"  # four bits a value, the quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA")
ADAPTER = "default"  # peft's own name of the one adapter that a model has here


@dataclass(frozen=True)
class AdapterSettings:
    """Low-rank adapters (Hu et al. 2021, "LoRA") added to the matrices of a part: W + scale × B A.

    rank: rows of A, columns of B. scale: alpha / rank; with rslora alpha / √rank (Kalajdzievski 2023).

    dropout: of what enters A. targets: which matrices; none: all of the layers.

    dora: the norms of W's rows are trained too (Liu et al. 2024).

    quantization: the format of the layers' linear matrices that are not trained, NF4; None: the part's."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    dora: bool = False
    rslora: bool = False
    quantization: str | None = None

    def selectors(self) -> tuple[Selector, ...]:
        """`targets` as selectors over names of weights."""
        return tuple(Selector(said) for said in self.targets)


BFLOAT16, FLOAT32, FLOAT64, INT16 = "bfloat16", "float32", "float64", "int16"  # as torch names them
FORMAT_BYTES: Mapping[str, int] = MappingProxyType({BFLOAT16: 2, FLOAT32: 4, FLOAT64: 8, INT16: 2})

WEIGHT = "weight"  # what the module computes with
MASTER = "master"  # the optimizer's own copy of a weight, of which the module's is the rounding
COMPENSATION = "compensation"  # what the module's weight lacks of the master weight, whose other half it is
SUM = "sum"  # of gradients, over micro-batches and ranks
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's averages of the gradient and of its square
MOMENTUM = "momentum_buffer"  # Muon's average of a matrix's gradient
# Adafactor's averages of the gradient's square, by row and by column: whole on every rank, whatever is cut.
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")
STATE_KINDS = (*MOMENTS, MOMENTUM, *FACTORS)


@dataclass(frozen=True)
class StatePart:
    """A number that is kept of each trained parameter. kind: also its name in a checkpoint, as `<parameter>.exp_avg`;
    sums are in none, and the weights have files of their own."""

    kind: str
    format: str

    @property
    def nbytes(self) -> int:
        return FORMAT_BYTES[self.format]


@dataclass(frozen=True)
class StateForm:
    """All pieces of a parameter."""

    pieces: tuple[StatePart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a parameter where nothing is cut."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def equation(self) -> str:
        """`weight(2) + master(4) + sum(4) + exp_avg(4) + exp_avg_sq(4) = 18`."""
        return f"{' + '.join(f'{piece.kind}({piece.nbytes})' for piece in self.pieces)} = {self.nbytes}"

    @property
    def compensated(self) -> bool:
        """Whether the module's weight is half of the master weight, not a copy."""
        return any(piece.kind == COMPENSATION for piece in self.pieces)

    def format(self, kind: str) -> str:
        """The number format of a piece. Raises KeyError where the form has none of the kind."""
        return {piece.kind: piece.format for piece in self.pieces}[kind]


def _form(master: StatePart, sums: str, moments: str) -> StateForm:
    return StateForm(
        (StatePart(WEIGHT, BFLOAT16), master, StatePart(SUM, sums), *(StatePart(kind, moments) for kind in MOMENTS))
    )


_COPY, _HALF = StatePart(MASTER, FLOAT32), StatePart(COMPENSATION, INT16)
EXACT_STATES = 18  # the form whose update is AdamW's in float32, which every engine holds
FORMS: Mapping[int, StateForm] = MappingProxyType(
    {
        EXACT_STATES: _form(_COPY, FLOAT32, FLOAT32),
        16: _form(_COPY, BFLOAT16, FLOAT32),
        12: _form(_HALF, FLOAT32, BFLOAT16),
        10: _form(_HALF, BFLOAT16, BFLOAT16),
    }
)
