"""Resolves what a run trains, checked against the model's parameters."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from dhp.config.parts import parts, resolved
from dhp.config.rules import FSDP
from dhp.config.schema import Config, PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph
from dhp.core.parameters import AdapterSettings, GroupRule, Selector, TrainingRules, is_inside
from dhp.core.text import did_you_mean, nearest
from dhp.models.family import Family
from dhp.models.shape import Parameter

PROJECTOR = "projector"  # of all encoders: what leads from them to the decoder


def adapters_of(config: Config) -> dict[str, AdapterSettings]:
    """The adapters of a resolved configuration, by part."""
    return {
        name: AdapterSettings(
            lora.rank,
            resolved(lora.alpha),
            lora.dropout,
            tuple(lora.targets),
            lora.dora,
            lora.rslora,
            lora.quantization,
        )
        for name, lora in ((name, part.lora) for name, part in parts(config).items())
        if lora.rank
    }


def begins_of(config: Config) -> dict[str, str]:
    """The directories of adapters that parts with adapters begin from."""
    folders = {name: part.lora.begin_from for name, part in parts(config).items() if part.lora.rank}
    return {name: folder for name, folder in folders.items() if folder is not None}


def training_rules(training: TrainingConfig, family: Family, adapted: Collection[str] = ()) -> TrainingRules:
    """The rules of a configuration for a model. family: the model's, with the parts of the run. adapted: parts that
    have adapters."""
    select = partial(_select, family)
    of_parts = tuple(Selector(part, family.parts[part].modules) for part in adapted)
    groups = (
        GroupRule(name, select(group.parameters or [name]), group.learning_rate, group.weight_decay, group.warmup_steps)
        for name, group in training.groups.items()
    )
    return TrainingRules(select(training.trainable), select(training.frozen), tuple(groups), of_parts)


def trained_stage(
    rules: TrainingRules, parameters: Callable[[], Iterable[Parameter]]
) -> Callable[[str, Sequence[str]], bool]:
    """A function: whether a stage of a part trains anything, when the part's modules `absent` are not in it.
    parameters: of the model, which are listed only where rules select some."""
    if not rules.selects:
        return lambda part, absent: True
    trained = [one for one in parameters() if one.used and rules.trains(one.name)]
    return lambda part, absent: any(one.part == part and not is_inside(one.name, absent) for one in trained)


def check_rules(rules: TrainingRules, parameters: Sequence[Parameter], known_parts: Iterable[str]) -> None:
    """Raises ConfigError for what selects no parameter, and where nothing is left to train. known_parts: by name."""
    for key, selector in rules.selectors():
        if not any(selector.fits(one.name) for one in parameters):
            raise ConfigError(
                f"{key}: {selector.said} is no parameter of this model{_meant(selector, parameters, known_parts)}"
            )
    if not any(one.used and rules.trains(one.name) for one in parameters):
        raise ConfigError(
            f"training.trainable={_said(rules.trainable)} with training.frozen={_said(rules.frozen)}: nothing would be "
            f"trained. Take something out of training.frozen; the parts are {', '.join(known_parts)}."
        )


def check_frozen_states(config: Config, graph: StageGraph) -> None:
    """Raises ConfigError for a part that ZeRO has nothing to cut of."""
    for name, part in parts(config).items():
        check_frozen_part(name, part, any(stage.trains for stage in graph.of_part(name)))


def check_frozen_part(name: str, part: PartConfig, trains: bool) -> None:
    """Of a part that trains nothing ZeRO can cut the weights alone. Raises ConfigError for stages, and for an engine,
    that do not. trains: some of it is."""
    if not part.zero_stage or trains or (part.zero_stage == 3 and part.zero_engine == FSDP):
        return
    if part.zero_stage == 3:
        raise ConfigError(
            f"{name}.zero_stage=3 by {name}.zero_engine={part.zero_engine} with nothing of {name} trained: DeepSpeed "
            f"cuts no weights that it does not train. Set {name}.zero_engine=fsdp and {name}.parallelism=data, or "
            f"{name}.zero_stage=0"
        )
    raise ConfigError(
        f"{name}.zero_stage={part.zero_stage} with nothing of {name} trained: stages 1 and 2 cut what training keeps, "
        f"and a part that is not trained keeps nothing but weights. Set {name}.zero_stage=0; weights that are "
        f"too large for a device are cut by {name}.zero_stage=3 with {name}.zero_engine=fsdp, or by {name}.tensor"
    )


def part_names(family: Family) -> list[str]:
    """Names that stand for parts in the rules of a run."""
    return [*family.parts, PROJECTOR]


def _select(family: Family, said: Iterable[str]) -> tuple[Selector, ...]:
    return tuple(_selector(family, one) for one in said)


def _selector(family: Family, said: str) -> Selector:
    projectors = tuple(module for part in family.parts.values() for module in part.projector)
    if said == PROJECTOR and projectors:
        return Selector(said, projectors)
    if said in family.parts:
        return Selector(said, family.parts[said].modules, projectors)
    return Selector(said)


def _meant(selector: Selector, parameters: Sequence[Parameter], known_parts: Iterable[str]) -> str:
    """Suggests what may have been meant: a part, or pieces of names."""
    shared = next((one for one in parameters if any(selector.fits(name) for name in one.also)), None)
    if shared is not None:
        return f" by itself: it is the same weight as {shared.name}. Name that"
    pieces = {piece for one in parameters for piece in one.name.split(".") if not piece.isdigit()}
    whole = dict.fromkeys(name for one in parameters for name in _paths(one.name))
    wanted = selector.said.strip("*.")
    found = [nearest(wanted, [*known_parts, *sorted(pieces)])] if "." not in wanted else [nearest(wanted, whole)]
    modules = sorted({one.name.rpartition(".")[0].rpartition(".")[2] for one in parameters} - {""})
    known = [name for name in modules if not name.isdigit()][:12]
    return did_you_mean(found) or f". Name a part ({', '.join(known_parts)}) or pieces of names, as {', '.join(known)}"


def _paths(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[start:end]) for start in range(len(pieces)) for end in range(start + 2, len(pieces) + 1)]


def _said(selectors: Sequence[Selector]) -> str:
    return f"[{', '.join(selector.said for selector in selectors)}]"
