"""Lists a part's layouts on so many devices.

Degrees are all factorizations of the devices, with every ZeRO stage, engine and way to hold norms. Left out without
being checked, each with a reason in `Refused`: tensor groups that leave a node, whose exchanges in each layer would go
between nodes, and ZeRO over one rank, which cuts nothing. DeepSpeed's layers (autotp) are there where they are held
alone, for parallelism=tensor cuts the same matrices and goes with more."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from dhp.config.layout import DEGREES, FREE, NAMES, OFFERED, PARALLELISMS, resolve_part
from dhp.config.parts import degrees, resolved
from dhp.config.rules import FSDP
from dhp.config.schema import PartConfig
from dhp.core.axes import OF_TOKENS, Degrees
from dhp.core.errors import ConfigError, DhpError
from dhp.models.family import Family
from dhp.plan.model_checks import check_part, check_plan
from dhp.plan.trainable import check_frozen_part

_AUTO = "auto"

Settings = Mapping[str, Any]  # of a part's section, by key


@dataclass(frozen=True)
class PartLayout:
    """One layout of a part. settings: keys of the part's section that the search set. section: the part's section with
    them, resolved."""

    part: str
    settings: Settings
    section: PartConfig

    @cached_property
    def degrees(self) -> Degrees:
        """Of each of its stages, of which there are `section.pipeline`."""
        return degrees(self.section)

    def __hash__(self) -> int:
        return hash((self.part, *self.settings.items()))


@dataclass(frozen=True)
class Refused:
    """Settings of a part that cannot be, or need not be tried. reason: the message of the run's check, or why."""

    settings: Settings
    reason: str


class PlanChecks:
    """`check_plan` of one model, once for all layouts that it treats alike: the first makes the model without weights,
    which takes seconds, and each further one a copy, which takes a tenth."""

    def __init__(self, family: Family, source: str):
        self._family, self._source = family, source
        self._known: dict[tuple[Any, ...], str | None] = {}

    def refusal(self, name: str, section: PartConfig) -> str | None:
        """The message for the resolved section of a part; None: there is a plan, or none is needed."""
        shares = section.expert > 1
        key = name, resolved(section.tensor), section.sequence_sharded_norms, section.parallelism == "autotp", shares
        if key not in self._known:
            try:
                check_plan(name, section, self._source, self._family)
                self._known[key] = None
            except DhpError as error:
                self._known[key] = str(error)
        return self._known[key]


def part_layouts(
    name: str,
    section: PartConfig,
    family: Family,
    devices: int,
    held: Collection[str] = (),
    node: int = 8,
    plans: PlanChecks | None = None,
    trains: bool = True,
) -> tuple[list[PartLayout], list[Refused]]:
    """The layouts of a part on so many devices, and what is refused, with one entry for each message and degrees.

    section: the part's, as composed. held: keys of `dhp.plan.search.free_keys.SEARCHED` that stay as they are
    there, and parallelism, where it is among them. family: having the run's parts. node: devices of a node. plans:
    whether matrices can be cut as the model's plan says is checked too. trains: some of the part is trained.

    What depends on the rest of the run is not checked: see `dhp.plan.search.space`."""
    space = _Space(name, section, family, frozenset(held), node, devices > node, plans, trains)
    layouts: list[PartLayout] = []
    refused = space.too_wide(devices)
    found = False
    for split in space.splits(devices):
        found = True
        reasons: dict[str, Settings] = {}
        for settings in space.settings(split):
            one = space.check(settings)
            if isinstance(one, str):
                reasons.setdefault(one, settings)
            else:
                layouts.append(one)
        refused += [Refused(settings, reason) for reason, settings in reasons.items()]
        refused += space.pointless(split)
    if not found:
        refused.append(space.no_split(devices))
    return layouts, refused


@dataclass(frozen=True)
class _Space:
    name: str
    section: PartConfig
    family: Family
    held: frozenset[str]
    node: int
    several: bool  # nodes
    plans: PlanChecks | None
    trains: bool

    def given(self, key: str) -> Any:
        """The value of a key that is held; None for one that is searched."""
        return getattr(self.section, key) if key in self.held else None

    def splits(self, devices: int) -> Iterator[dict[str, int]]:
        """All degrees whose product is `devices`."""
        return self._rest(devices, DEGREES)

    def _rest(self, devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
        axis, *others = axes
        for own in self._degrees(axis, devices):
            if not others and own == devices:
                yield {axis: own}
            elif others:
                yield from ({axis: own} | rest for rest in self._rest(devices // own, tuple(others)))

    def _degrees(self, axis: str, devices: int) -> list[int]:
        """Those of an axis that divide so many devices."""
        given = self.given(axis)
        if given is not None:
            return [given] if given > 0 and devices % given == 0 else []
        if axis not in OFFERED[self.name]:
            return [1]
        found = [own for own in range(1, devices + 1) if devices % own == 0]
        if axis != "tensor":
            return found
        # A tensor group lies in one node, also the last one of a node.
        return [own for own in found if own <= self.node and (not self.several or self.node % own == 0)]

    def too_wide(self, devices: int) -> list[Refused]:
        """Tensor degrees beyond a node."""
        if self.given("tensor") is not None or "tensor" not in OFFERED[self.name]:
            return []
        reason = (
            f"{self.name}.tensor={{}} is more than the {self.node} devices of a node: its actors exchange several "
            f"times in each layer, between nodes too. {self.name}.pipeline cuts weights as well."
        )
        wide = (own for own in range(self.node + 1, devices + 1) if devices % own == 0)
        return [Refused({"tensor": own}, reason.format(own)) for own in wide]

    def settings(self, split: Mapping[str, int]) -> Iterator[Settings]:
        """All settings with these degrees."""
        base = {"parallelism": self._parallelism(split), "num_actors": prod(split.values()), **split}
        for expert, norms in product(self._experts(split), self._norms(split)):
            for stage, engine in self._zero(split, expert):
                more = {"expert": expert, "zero_stage": stage, "zero_engine": engine, "sequence_sharded_norms": norms}
                yield base | more

    def _parallelism(self, split: Mapping[str, int]) -> str:
        """The name that goes with the degrees: all are set, so that it decides nothing more."""
        given: str | None = self.given("parallelism")
        known = PARALLELISMS[self.name]
        named = (kind for axis, kind in NAMES.items() if split[axis] > 1 and kind in known)
        return given or next(named, "none")

    def _experts(self, split: Mapping[str, int]) -> list[int]:
        if "expert" in self.held:
            return [self.section.expert]
        if not self.family.parts[self.name].shared:
            return [1]
        return [own for own in range(1, split["data"] + 1) if split["data"] % own == 0]

    def _norms(self, split: Mapping[str, int]) -> tuple[bool, ...]:
        if "sequence_sharded_norms" in self.held:
            return (self.section.sequence_sharded_norms,)
        return (False, True) if split["tensor"] > 1 else (False,)

    def _zero(self, split: Mapping[str, int], expert: int) -> Iterator[tuple[int, str]]:
        """Stages with their engines: the one that auto gives, and FSDP where that is another one."""
        given: int | None = self.given("zero_stage")
        alone = given is None and _holders(split) == 1
        for stage in (given,) if given is not None else (0,) if alone else range(4):
            if "zero_engine" in self.held:
                yield stage, self.section.zero_engine
                continue
            yield stage, _AUTO
            if stage >= 2 and split["tensor"] == expert == 1:
                yield stage, FSDP

    def pointless(self, split: Mapping[str, int]) -> list[Refused]:
        """ZeRO where no two ranks hold the same."""
        if "zero_stage" in self.held or _holders(split) > 1 or prod(split.values()) == 1:
            return []
        reason = (
            f"{self.name}.zero_stage from 1 on with data(1) × ulysses(1) × ring(1): each actor holds other weights, so "
            "that there is nothing to cut among them."
        )
        return [Refused({**split, "zero_stage": 1}, reason)]

    def check(self, settings: Settings) -> PartLayout | str:
        """The layout, or the message of the check that refuses it."""
        try:
            section = resolve_part(self.name, replace(self.section, **settings))
            check_frozen_part(self.name, section, self.trains)
            check_part(self.name, section, self.family)
        except ConfigError as error:
            return str(error)
        refusal = self.plans.refusal(self.name, section) if self.plans else None
        return refusal or self._uneven(section) or PartLayout(self.name, settings, section)

    def _uneven(self, section: PartConfig) -> str | None:
        """Heads that a free degree does not divide: some actors would compute more of them than others, or zeros."""
        for axis in self.family.parts[self.name].uneven_axes(section):
            if axis not in self.held:
                return (
                    f"{self.name}.{axis}={getattr(section, axis)} does not divide the heads: some actors would wait "
                    f"for others. It runs where {self.name}.{axis} is set."
                )
        return None

    def no_split(self, devices: int) -> Refused:
        """The run's message for held degrees that do not multiply to so many devices."""
        own = {axis: self.given(axis) for axis in DEGREES}
        free = [axis for axis in FREE if own[axis] is None]
        kind = NAMES[free[0]] if free else "data"
        settings = {**own, "num_actors": devices, "parallelism": kind}
        try:
            resolve_part(self.name, replace(self.section, **settings))
        except ConfigError as error:
            return Refused(settings, str(error))
        reason = f"{self.name}: no degrees beside those that are set multiply to {devices} on nodes of {self.node}."
        return Refused(settings, reason)


def _holders(split: Mapping[str, int]) -> int:
    """Ranks of a stage that hold the same weights."""
    return prod(split[axis] for axis in OF_TOKENS)
