"""Layout-independent counts of a model, cached on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dhp.config.parts import DECODER, model_name, parts
from dhp.config.rules import read_kernels
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ModelError
from dhp.core.files import write_whole
from dhp.core.graph import StageSpec
from dhp.core.parameters import ADAMW, AdapterSettings, TrainingRules, is_inside
from dhp.core.process import say_nothing
from dhp.core.reports import RecomputePolicies
from dhp.models.family import VISION, Family
from dhp.models.registry import load_family
from dhp.models.shape import DecoderSizes, HeldParameter, Parameter
from dhp.plan.count.loads import window_length
from dhp.plan.count.row_bytes import (
    PartBytes,
    TracedRows,
    layers_to_trace,
    no_bytes,
    of_all_layers,
    read_bytes,
    trace_bytes,
    written_bytes,
)
from dhp.plan.count.state_bytes import Units, stage_units
from dhp.plan.count.unit_work import (
    TowerLoad,
    UnitParameters,
    replay_shares,
    replays,
    shares_of,
    tower_operations,
    tower_pieces,
)
from dhp.plan.trainable import adapters_of, training_rules

How = Mapping[str, Any]  # fields of TraceSettings, but for what layers recompute and which are traced


def trace_layers(
    source: str, family: Family, part: str, stands: Mapping[int, int], how: How, first_apart: bool
) -> PartBytes:
    """Of the whole part on a rank. stands: for each layer the one that is traced for it. first_apart: the first layer
    keeps less than others. Raises ModelError where the part cannot be traced."""
    try:
        return _of_some(source, family, part, stands, how, first_apart)
    except ModelError:  # layers may read what others make, as keys that they share
        if len(set(stands.values())) == len(stands):
            raise
        return _of_some(source, family, part, {at: at for at in stands}, how, first_apart)


def _of_some(
    source: str, family: Family, part: str, stands: Mapping[int, int], how: How, first_apart: bool
) -> PartBytes:
    from dhp.plan.count.traced import (
        TraceSettings,  # imports torch, and modeling code
        trace_moments,
    )

    layers = sorted(set(stands.values()))

    def trace(rows: TracedRows, choices: RecomputePolicies) -> Traced:
        return trace_moments(source, family, part, rows, TraceSettings(**how, recompute=choices, layers=layers))

    features = 64 * (VISION in family.parts)
    base = TracedRows(256, features, 64) if part == DECODER else _of_pictures(family)
    kinds = [family.parts[part].layers.kinds[at] for at in layers]
    return of_all_layers(trace_bytes(kinds, base, trace, first_apart), stands)


def _of_pictures(family: Family) -> TracedRows:
    """About a thousand patches, of whole pictures where the tower takes no others; in windows of sixteen where it has
    some."""
    each = family.tower.patches_of_picture
    return TracedRows(0, patches=each * -(-_PATCHES // each), windows=64 if each == 1 else 1)


def count_held(
    family: Family,
    source: str,
    rules: TrainingRules,
    adapters: Mapping[str, AdapterSettings],
    name: str,
    tensor: int,
    sharing: int,
    dropped: Sequence[str] = (),
) -> tuple[HeldParameter, ...]:
    """What the fullest of `tensor` ranks holds of part `name`, whose experts so many replicas (sharing) share out,
    without the modules `dropped`."""
    from dhp.models.empty import adapt, held_parameters
    from dhp.models.quantized import find_quantized
    from dhp.models.shape import hidden_matrices
    from dhp.parallel.tensor.styles import with_fused

    part, asked = family.parts[name], adapters.get(name)
    rounded = asked is not None and asked.quantization is not None
    return held_parameters(
        source,
        (*family.outside(name), *dropped),
        tensor,
        tuple(part.shared_heads(tensor)),
        with_fused(part.tensor_plan, part.fused),
        partial(_is_trained, rules, family) if rules.selects or family.idle else None,
        part.shared,
        sharing,
        partial(adapt, family=family, adapters={} if asked is None else {name: asked}),
        partial(find_quantized, layers=part.layers, trains=rules.trains) if rounded else lambda _: (),
        partial(hidden_matrices, family=family),
    )


def _is_trained(rules: TrainingRules, family: Family, name: str) -> bool:
    return rules.trains(name) and not is_inside(name, family.idle)


if TYPE_CHECKING:
    from dhp.plan.count.row_bytes import Traced

T = TypeVar("T")
_PATCHES = 1024  # of a tower's trace
AT_ONCE = 16  # layers of a part that are traced without being asked for; many take a minute
FOLDER = "shapes"  # below the cache's
_PACKAGES = ("torch", "transformers")
_FORM = 8  # of the files; raised when what they hold changes


@dataclass(frozen=True)
class Cut:
    """How a part's matrices are cut, and in which format it computes: what its bytes depend on."""

    dtype: str
    tensor: int = 1
    expert: int = 1
    sequence_sharded_norms: bool = False
    mlp_chunks: int = 1
    kernels: str = "auto"

    @classmethod
    def of(cls, section: PartConfig) -> Cut:
        """Of a resolved section."""
        values = {one.name: getattr(section, one.name) for one in fields(cls)}
        return cls(**values)


class Counted:
    """One model, trained by these rules."""

    def __init__(
        self,
        family: Family,
        source: str,
        rules: TrainingRules,
        adapters: Mapping[str, AdapterSettings],
        objective: str,
        folder: Path | None = None,
        say: Callable[[str], None] = say_nothing,
        optimizer: str = ADAMW,
    ):
        """folder: of the cache; None: nothing is kept on disk. say: receives a line before what takes seconds.
        optimizer: who takes the steps, by name."""
        self._say = say
        self.family, self.source, self.rules, self.adapters = family, source, rules, adapters
        self.objective, self.optimizer = objective, optimizer
        self._folder = None if folder is None else folder / FOLDER
        self._known: dict[str, Any] = {}

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the model, those of adapters among them."""

        def make() -> Any:
            from dhp.models.empty import list_parameters  # imports modeling code, which takes a second

            return [asdict(one) for one in list_parameters(self.source, self.family, self.adapters)]

        return tuple(
            Parameter(**{**one, "also": tuple(one["also"]), "shape": tuple(one["shape"])})
            for one in self._kept("parameters", make)
        )

    @cached_property
    def sizes(self) -> DecoderSizes:
        """Of the decoder's pieces."""

        def make() -> Any:
            from dhp.models.empty import decoder_sizes

            return asdict(decoder_sizes(self.source))

        found = self._kept("sizes", make)
        return DecoderSizes(**{**found, "layers": tuple(found["layers"])})

    @cached_property
    def pieces(self) -> list[UnitParameters]:
        """Of the tower."""
        return tower_pieces(self.family, self.parameters, self.rules)

    @cached_property
    def replays(self) -> dict[str, list[Mapping[str, float]]]:
        """By part, of each unit, the share of its forward that each choice of recompute runs again."""
        found: dict[str, list[Mapping[str, float]]] = {}
        for part in self.family.parts:
            if part == DECODER:
                known = {size: replay_shares(self.family, size) for size in set(self.sizes.layers)}
                own: list[Mapping[str, float]] = [known[size] for size in self.sizes.layers]
            elif part == VISION:
                shares = {piece: replays(piece.inner / piece.size) for piece in set(self.pieces[1:-1])}
                own = [shares[piece] for piece in self.pieces[1:-1]]
            else:
                continue
            found[part] = [{}, *own, {}]
        return found

    @cached_property
    def trained(self) -> dict[int | None, float] | None:
        """Of each of the decoder's layers, and under None of what is outside, the share that is trained; None: all."""
        return shares_of(self.family, self.parameters, self.rules) if self.rules.selects else None

    @cached_property
    def window(self) -> float:
        """Patches that see each other in the tower's windows, in the mean."""
        return window_length(self.family)

    def tower_operations(self, load: TowerLoad) -> list[tuple[float, float]]:
        """As the function of that name, which is linear in the load, in a fraction of its time."""
        found = np.einsum("luk,l->uk", self._operations, [getattr(load, one.name) for one in fields(TowerLoad)])
        return [(products, attention) for products, attention in found.tolist()]

    @cached_property
    def _operations(self) -> np.ndarray:
        """Of each kind of load alone: [loads, units, 2]."""
        ones = np.eye(len(fields(TowerLoad)))
        return np.array([tower_operations(self.family, self.pieces, TowerLoad(*row)) for row in ones.tolist()])

    @cached_property
    def trains_before(self) -> bool:
        """Whether the tower trains, so that gradients go back through the whole decoder."""
        return VISION in self.family.parts and any(piece.trained for piece in self.pieces)

    def trains(self, part: str) -> bool:
        """Whether anything of the part is trained."""
        return any(one.part == part and one.used and self.rules.trains(one.name) for one in self.parameters)

    def held(self, part: str, cut: Cut) -> tuple[HeldParameter, ...]:
        """What the fullest tensor rank holds of the whole part."""
        key = f"held {part} {cut.tensor} {cut.expert}"
        if key not in self._known:
            found = self._kept(key, lambda: [asdict(one) for one in self._count(part, cut)])
            lists = ("names", "shape")
            self._known[key] = tuple(HeldParameter(**one | {name: tuple(one[name]) for name in lists}) for one in found)
        known: tuple[HeldParameter, ...] = self._known[key]
        return known

    def unit_parameters(self, part: str, cut: Cut, trained: bool = False, experts: bool = False) -> list[int]:
        """Of each unit, the parameters that a rank holds: what precedes the layers, each layer, what follows them.
        trained: those alone that are. experts: those alone of experts that replicas share out."""
        key = f"units {part} {cut.tensor} {cut.expert} {trained} {experts}"
        if key not in self._known:
            own = self.family.parts[part]
            path, count = f"{own.layers.path}.", len(own.layers.kinds)
            begins = (self.family.decoder.embedding, *self.family.decoder.entrance) if part == DECODER else ()
            found = [0] * (count + 2)
            for one in self.held(part, cut):
                name = one.names[0]
                inside = name.startswith(path)
                layer = int(name.removeprefix(path).partition(".")[0]) + 1 if inside else -1
                found[0 if is_inside(name, begins) else layer] += (
                    one.own * (one.trains or not trained) * (one.shared_out or not experts)
                )
            self._known[key] = found
        known: list[int] = self._known[key]
        return known

    def units_of(self, stage: StageSpec, cut: Cut) -> Units:
        """What a rank of the stage holds."""
        parameters, experts = (self.unit_parameters(stage.part, cut, experts=only) for only in (False, True))
        spread = [own + (cut.expert - 1) * shared for own, shared in zip(parameters, experts, strict=True)]
        return stage_units(parameters, stage.layers, spread)

    def alike(self, part: str, cut: Cut) -> list[int]:
        """Of each unit of a part, the place of the first one that does the same and holds as many parameters."""
        own, kinds = self.unit_parameters(part, cut), self.keeps(part, cut).kinds
        if part == DECODER:
            shares = self.trained
            does: list[Any] = [(size, shares and shares.get(at, 0.0)) for at, size in enumerate(self.sizes.layers)]
            does = ["before", *does, "after"]
        else:
            done = self._operations.transpose(1, 0, 2).tolist()
            does = [(piece, str(each)) for piece, each in zip(self.pieces, done, strict=True)]
        ends = ("before", *kinds, "after")
        first: dict[Any, int] = {}
        return [first.setdefault(key, at) for at, key in enumerate(zip(does, ends, own, strict=True))]

    def keeps(self, part: str, cut: Cut) -> PartBytes:
        """What the part keeps of a micro-batch on a rank. Raises ModelError where it cannot be traced."""
        key = f"keeps {part} {cut} {self.trains_before}"
        if key not in self._known:
            self._known[key] = read_bytes(self._kept(key, lambda: written_bytes(self._trace(part, cut))))
        known: PartBytes = self._known[key]
        return known

    def is_traced(self, part: str, cut: Cut) -> bool:
        """Whether `keeps` answers at once."""
        key = f"keeps {part} {cut} {self.trains_before}"
        return key in self._known or (self._folder is not None and self._path(key).is_file())

    def is_quick(self, part: str, cut: Cut) -> bool:
        """Whether a trace of the part takes no minute: few of its layers are unlike."""
        return len(set(self.stands(part, cut).values())) <= AT_ONCE

    def keeps_if_quick(self, part: str, cut: Cut) -> PartBytes:
        """What the part keeps; nothing where that takes a minute, or cannot be traced. The same whether it was traced
        before or not, as cuts into stages must not depend on it."""
        with suppress(ModelError):
            if self.is_quick(part, cut):
                return self.keeps(part, cut)
        return no_bytes(self.family.parts[part].layers.kinds)

    def trains_first(self, part: str) -> bool:
        """Whether gradients go on from the part's first layer, to what is before it."""
        if part != DECODER:
            return bool(self.pieces[0].trained)
        named = [
            one
            for one in self.parameters
            if is_inside(one.name, (self.family.decoder.embedding, *self.family.decoder.entrance))
        ]
        return self.trains_before or any(self.rules.trains(one.name) for one in named)

    def _count(self, part: str, cut: Cut) -> tuple[HeldParameter, ...]:
        return count_held(self.family, self.source, self.rules, self.adapters, part, cut.tensor, cut.expert)

    def stands(self, part: str, cut: Cut) -> dict[int, int]:
        """See `layers_to_trace`. Where some layers are trained, and others are not, all are traced."""
        own = self.family.parts[part]
        held, trained = (self.unit_parameters(part, cut, only)[1:-1] for only in (False, True))
        if any(trained) and held != trained:
            return {at: at for at in range(len(held))}
        return layers_to_trace(list(zip(own.layers.kinds, held)), [*own.leaves.values(), *own.takes.values()])

    def _trace(self, part: str, cut: Cut) -> PartBytes:

        norms = ", sharded norms" * cut.sequence_sharded_norms
        self._say(f"tracing {part} in {cut.dtype} with tensor={cut.tensor}{norms}, once for this model")
        how = {
            "dtype": cut.dtype,
            "tensor": cut.tensor,
            "trains": self.rules.trains,
            "receives_gradients": self.trains_before,
            "adapters": self.adapters,
            "mlp_chunks": cut.mlp_chunks,
            "sequence_sharded_norms": cut.sequence_sharded_norms,
            "objective": self.objective,
            "kernels": read_kernels(part, cut.kernels),
        }
        first_apart = self.trains(part) and not self.trains_first(part)
        return trace_layers(self.source, self.family, part, self.stands(part, cut), how, first_apart)

    def _kept(self, what: str, make: Callable[[], T]) -> T:
        """As JSON gives it back."""
        if self._folder is None:
            found: T = json.loads(json.dumps(make()))
            return found
        path = self._path(what)
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            return found
        text = json.dumps(make())
        with suppress(OSError):  # without a cache all is counted again
            write_whole(path, text + "\n")
        found = json.loads(text)
        return found

    def _path(self, what: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{_digest([self._key, what])}.json"

    @cached_property
    def _key(self) -> str:
        known = [self.family.values, repr(self.rules), repr(dict(self.adapters)), self.objective]
        return _digest([_FORM, known, sorted(self.family.parts), [version(package) for package in _PACKAGES]])


def stage_parameters(held: Sequence[HeldParameter], absent: Sequence[str]) -> list[HeldParameter]:
    """Those of a stage. held: of the whole part; absent: its modules that the stage does not hold."""
    return [one for one in held if not all(is_inside(name, absent) for name in one.names)]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]


def count_model(config: Config, source: str | None = None, say: Callable[[str], None] = say_nothing) -> Counted:
    """The model of a resolved configuration, counted when it is asked; kept in the folder of lengths. source: of its
    configuration; None: its own directory or hub id. Raises ConfigError and ModelError."""
    source = source or model_name(config)
    family, adapters = load_family(source).having(parts(config)), adapters_of(config)
    rules = training_rules(config.training, family, adapters)
    folder, training = config.data.cache_dir, config.training
    kept = None if folder is None else Path(folder)
    return Counted(family, source, rules, adapters, training.objective, kept, say, training.optimizer)
