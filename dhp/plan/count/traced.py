"""Traces what a part keeps for backward, without weights."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dhp.core.draws import TokenKeys, drawing
from dhp.core.errors import ConfigError, DhpError, ModelError
from dhp.core.parameters import AdapterSettings
from dhp.core.preferences import Mark
from dhp.core.reports import RecomputePolicies, StageUsage
from dhp.core.torch_private import tree_leaves
from dhp.core.transformers_private import expand_plan
from dhp.core.wrapping import call_weakly, wrap_forward
from dhp.engine.build import freeze, shard_without_ranks
from dhp.models.decoder import Decoder, unchanged
from dhp.models.empty import adapt, empty_slices
from dhp.models.family import Family
from dhp.models.load import cast_reals
from dhp.models.lora import adapted_modules
from dhp.models.tower import Tower, TowerInputs
from dhp.models.types import DecoderInputs, Part
from dhp.objectives.objective import Head, MarkedSamples
from dhp.objectives.objectives import find_objective
from dhp.parallel.attention.by_sample import run_by_sample
from dhp.parallel.attention.mixers import CHUNK, run_by_segment
from dhp.parallel.attention.segment_plan import RowRanks, SegmentPlan, plan_row, plan_segments
from dhp.parallel.attention.segments import packed_attention, segment_attention
from dhp.parallel.attention.shard_plan import contiguous_plan
from dhp.parallel.kernels.replace import replace_without_weights
from dhp.parallel.recompute.meter import ActivationMeter, LiveStorages
from dhp.parallel.recompute.recomputed_layers import ATTENTION, RecomputedLayers, tile_mlps
from dhp.parallel.recompute.saved_tensors import save_output
from dhp.parallel.tensor.row_norms import scale_rows
from dhp.parallel.tensor.sequence_norms import TensorRanks
from dhp.parallel.tensor.slices import sum_without_ranks
from dhp.parallel.tensor.styles import share_heads_without_ranks, with_fused, with_shared_heads
from dhp.parallel.tensor.tensor_plan import local_plan
from dhp.plan.count.row_bytes import Pass, Traced, TracedRows
from dhp.plan.count.shapes_alone import shapes_alone

FORWARD: Pass = "forward"
BACKWARD: Pass = "backward"
GROWING: Pass = "growing"  # backward, where gradients of parameters stay
BEFORE = -1  # the place of what precedes the layers; what follows them has their number


class MomentsOfTrace(LiveStorages):
    """Records a trace. To be entered around it, with the model's layers."""

    of_meta = True

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], meter: ActivationMeter):
        super().__init__(shares=False)
        self._meter = meter
        self._saved: dict[int, int] = defaultdict(int)  # the most that was kept in each layer's backward
        self._count = len(layers)
        self._now: tuple[Pass, int] = (FORWARD, BEFORE)
        self._found: dict[tuple[Pass, int], list[int]] = defaultdict(list)
        self._gradients = self._earlier = 0  # bytes of gradients, and of those, what came before this layer's
        for tensor in (*model.parameters(), *model.buffers()):
            self.leave_out(tensor)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize > 2:  # others are dropped at once
                parameter.register_post_accumulate_grad_hook(call_weakly(self._take))
        for at, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entering(at), with_kwargs=True)
            layer.register_forward_hook(self._leaving(at))

    def after_operation(self) -> None:
        own, at = self._now
        self._found[own, at].append(self.bytes - self._gradients)
        if own == BACKWARD:
            self._found[GROWING, at].append(self.bytes - self._earlier)
            self._saved[at] = max(self._saved[at], self._meter.now())

    def taken(self, usage: StageUsage, replays_parts: bool) -> Traced:
        """What was recorded. usage: of the same trace. replays_parts: backward runs parts of layers again, of which the
        meter does not know where they begin."""
        kept = usage.before_bytes
        before = {BEFORE: 0.0}
        for at, layer in enumerate(usage.layers):
            before[at] = kept
            kept += layer.held_bytes
        before[self._count] = kept
        behind = {at: before[at + 1] for at in range(BEFORE, self._count)} | {self._count: kept + usage.after_bytes}
        kept_by = {FORWARD: before, BACKWARD: behind, GROWING: behind}
        if replays_parts:
            again = (max(0, self._saved[at] - int(behind[at])) for at in range(self._count))
            layers = (
                replace(layer, replay_bytes=max(layer.replay_bytes, more)) for layer, more in zip(usage.layers, again)
            )
            usage = replace(usage, layers=tuple(layers))
        moments = {
            (own, at): tuple(int(n - kept_by[own][at]) for n in found) for (own, at), found in self._found.items()
        }
        return Traced(usage, moments)

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients += parameter.grad.nbytes

    def _entering(self, at: int) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._now = FORWARD, at
            if at == 0:
                _behind(args, kwargs, self._turning(BEFORE))

        return enter

    def _leaving(self, at: int) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            _behind(output, {}, self._turning(at))
            if at == self._count - 1:
                self._now = FORWARD, self._count

        return leave

    def _turning(self, at: int) -> Any:
        def turn(gradient: Tensor) -> None:
            self._now, self._earlier = (BACKWARD, at), self._gradients

        return turn

    def begin_backward(self) -> None:
        """What follows the layers comes first."""
        self._now = BACKWARD, self._count


def _behind(args: Any, kwargs: Any, hook: Any) -> None:
    """Call the hook when the gradient of the first tensor of these that has one is there."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
            return


_META, _CPU = torch.device("meta"), torch.device("cpu")
_TEXT, _TOWER = "dhp_traced", "flash_dhp_traced"  # names of the attention functions, as those of a run
_AXES = 3  # of positions where rotary angles have sections: time, height, width


@dataclass(frozen=True)
class TraceSettings:
    """How a part is run. dtype: it computes in. tensor: ranks that cut its matrices. recompute: of each layer that
    runs. trains: by a parameter's name. receives_gradients: what sends to the decoder trains. kernels: asked for, by
    kind. layers: that run, the others hand on what enters them, and are in no report; None: all."""

    dtype: str
    tensor: int
    recompute: RecomputePolicies
    trains: Callable[[str], bool] = lambda name: True
    receives_gradients: bool = True
    adapters: Mapping[str, AdapterSettings] = field(default_factory=dict)
    mlp_chunks: int = 1
    sequence_sharded_norms: bool = False
    objective: str = "sft"
    kernels: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[int] | None = None


def trace_part(source: str, family: Family, name: str, rows: TracedRows, settings: TraceSettings) -> StageUsage:
    """Bytes of the whole part `name` of the model of `source`, as `dhp.parallel.recompute.meter` reports them of a step
    of one micro-batch. Seconds are without meaning.

    Raises ModelError where the part's code looks at values, as routers of experts do, or saves nothing."""
    return trace_moments(source, family, name, rows, settings, False).usage


def trace_moments(
    source: str, family: Family, name: str, rows: TracedRows, settings: TraceSettings, records: bool = True
) -> Traced:
    """The same, with what is live at each operation. records: False for no moments, in less time."""
    try:
        traced = _trace(source, family, name, rows, settings, records)
    except DhpError:
        raise
    except Exception as error:  # a family's own code may raise anything
        raise ModelError(
            f"what the {name} part of {source} keeps for backward is not known before it runs: its code asks for more "
            f"than shapes ({type(error).__name__}: {str(error)[:150]}). Measure it with memory.accounting=true"
        ) from error
    if traced is None:
        raise ModelError(f"the {name} part of {source} was traced without a layer; tell {rows} rows of it")
    return traced


def _trace(
    source: str, family: Family, name: str, rows: TracedRows, settings: TraceSettings, records: bool
) -> Traced | None:
    part, dtype = family.parts[name], getattr(torch, settings.dtype)
    model = empty_part(source, family, name, settings)
    _use_attention(model, part)
    if isinstance(part, Decoder):
        if part.by_sample:
            run_by_sample(model.get_submodule(part.path))
        else:
            run_by_segment(model, part.found_mixers(), _ranks_of_state(part, settings.tensor))
    replace_without_weights(model, dtype, settings.kernels)
    every = [model.get_submodule(f"{part.layers.path}.{layer}") for layer in range(len(part.layers.kinds))]
    runs = range(len(every)) if settings.layers is None else settings.layers
    for at, layer in enumerate(every):
        if at not in runs:
            wrap_forward(layer, unchanged, __name__)
    layers, kinds = [every[at] for at in runs], tuple(part.layers.kinds[at] for at in runs)
    if settings.mlp_chunks > 1:
        tile_mlps(layers, part.layers.mlp, settings.mlp_chunks)
    meter = ActivationMeter(model, _CPU, kinds)
    RecomputedLayers(layers, part.layers, settings.recompute, meter)
    moments = MomentsOfTrace(model, layers, meter) if records else None
    with shapes_alone(), moments or nullcontext():
        run = empty_run(model, family, name, rows, settings)
        with meter.forward(rows.patches if isinstance(part, Tower) else rows.tokens):
            output = run()
        if output.requires_grad:
            _drop_gradients(model)
            if moments is not None:
                moments.begin_backward()
            with meter.backward():
                output.backward(torch.ones((), dtype=output.dtype, device=_META))
    usage = meter.take(settings.recompute)
    if usage is None:
        return None
    if moments is None:
        return Traced(usage, {})
    return moments.taken(usage, settings.mlp_chunks > 1)


def empty_part(source: str, family: Family, name: str, settings: TraceSettings) -> Any:
    """The model of `source` with the part `name` alone, on the meta device, cut for a tensor rank, with what a rank
    puts into it but attention and kernels."""
    part, tensor = family.parts[name], settings.tensor
    shared = part.shared_heads(tensor)
    styles = with_fused(part.tensor_plan, part.fused)
    model = empty_slices(source, family.outside(name), tensor, tuple(shared), styles)
    if settings.sequence_sharded_norms and tensor > 1:
        local_plan(model, expand_plan(model, model.tp_plan | dict(styles)))  # names what is cut, and how
        shard_without_ranks(model, part, tensor)
    share_heads_without_ranks(model, expand_plan(model, dict(with_shared_heads({}, shared))), tensor)
    own = {of: asked for of, asked in settings.adapters.items() if of == name}
    adapt(model, family, own)
    sum_without_ranks(adapted_modules(model))
    scale_rows(adapted_modules(model), None)
    cast_reals(model, getattr(torch, settings.dtype))
    part.freeze_unused(model)
    freeze(model, settings.trains)
    part.split_heads(model, tensor)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # its row may be another rank's
    return model


def empty_run(model: Any, family: Family, name: str, rows: TracedRows, settings: TraceSettings) -> Callable[[], Tensor]:
    """A forward of what `empty_part` returns, on the meta device: its result is a scalar, through all of whose backward
    goes."""
    part = family.parts[name]
    if isinstance(part, Tower):
        pictures = _pictures(part, rows, settings.dtype)
        return lambda: _sum(part.encode(model, pictures))
    return _decoder(model, family, rows, settings, getattr(torch, settings.dtype))


def _use_attention(model: Any, part: Part) -> None:
    tower = isinstance(part, Tower)
    name, function = (_TOWER, segment_attention) if tower else (_TEXT, packed_attention)
    AttentionInterface.register(name, save_output(ATTENTION, function))
    part.use_attention(model, name)  # type: ignore[attr-defined]  # both kinds of part have it


def _ranks_of_state(decoder: Decoder, tensor: int) -> TensorRanks | None:
    """Those that take a part of the tokens each in layers that carry state along a row; None: each takes all."""
    heads = [0 if one is None else one.heads for one in decoder.found_mixers().values()]
    return TensorRanks(tensor) if tensor > 1 and heads and all(own and own % tensor == 0 for own in heads) else None


def _plan_of_row(decoder: Decoder, tokens: int, tensor: int) -> SegmentPlan:
    """One sample, as a rank has it."""
    plan, ranks = plan_segments([tokens], _CPU, True), _ranks_of_state(decoder, tensor)
    if None in (known := decoder.found_mixers().values()) or not known:
        return plan
    part = tokens if ranks is None else ranks.share(tokens)
    return replace(plan, row=plan_row(contiguous_plan([part], 1, 1), RowRanks(None, 0), _CPU, CHUNK))


def _pictures(tower: Tower, rows: TracedRows, dtype: str) -> TowerInputs:
    form = tower.dummy_form
    forms = () if form is None else (form,) * (rows.patches // form.rows)
    positions = _numbers(rows.patches, tower.position_columns)
    travels = torch.bfloat16 if dtype == "bfloat16" else torch.float32  # as a run's pictures do
    pixels = torch.empty(rows.patches, tower.patch_dim, dtype=travels, device=_META)
    windows = plan_segments([rows.patches // rows.windows] * rows.windows, _CPU)
    return TowerInputs(pixels, positions, windows, plan_segments([rows.patches], _CPU), forms, tower.calls(forms))


def _decoder(
    model: Any, family: Family, rows: TracedRows, settings: TraceSettings, dtype: torch.dtype
) -> Callable[[], Tensor]:
    decoder, text = family.decoder, family.config.get_text_config()
    features = {
        name: torch.empty(rows.features, text.hidden_size, dtype=dtype, device=_META)
        for name in (decoder.takes if rows.features else ())
    }
    for rows_of in features.values():
        rows_of.requires_grad_(settings.receives_gradients)
    # One storage, as numbers travel to a device: tokens, their positions and kinds, targets twice, places of features.
    axes = _AXES if "mrope_section" in (getattr(text, "rope_parameters", None) or {}) else 1
    sizes = (rows.tokens, axes * rows.tokens, rows.tokens, rows.targets, rows.targets, rows.features)
    tokens, positions, _, *chosen, places = _numbers(sum(sizes)).split(sizes)
    positions = positions.view(axes, 1, -1) if axes > 1 else positions[None]
    inputs = DecoderInputs(tokens[None], positions, features, places)
    plan, objective = _plan_of_row(decoder, rows.tokens, settings.tensor), find_objective(settings.objective)
    head = Head(decoder.head_of(model), decoder.logits)
    if objective.compares:  # all targets are of one side of one preference
        marks = torch.empty(2, len(Mark._fields), dtype=torch.float64, device=_META)
        head = head._replace(samples=MarkedSamples(_numbers(rows.targets), marks))

    def run() -> Tensor:
        states = decoder.run(model, decoder.whole, inputs, segments=plan)
        return objective.share(head, states.flatten(0, 1), tuple(chosen), 1.0)

    return run


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device=_META)


def _drop_gradients(model: Any) -> None:
    """Gradients in 16 bits are added to a rank's sums in 32 and are gone; others are the sums. Those that wait for
    their bucket, at most half of its bytes, are no activations."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize == 2:
            parameter.register_post_accumulate_grad_hook(_forget)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _sum(output: Mapping[str, Tensor]) -> Tensor:
    """A scalar of all that leaves a tower, whose backward goes through all of it."""
    return torch.stack([tensor.sum() for tensor in output.values()]).sum()


_TOKENS = 12


def check_draws(source: str, family: Family, name: str, asked: AdapterSettings) -> None:
    """Raises ConfigError where an adapter with dropout stands beside a matrix whose rows are not the part's tokens. One
    layer of each kind is looked at. Where the part's code asks for more than shapes, its first step says so."""
    part = family.parts[name]
    tower = part if isinstance(part, Tower) else None
    if not asked.dropout or (tower and tower.tile):
        return  # rows of pictures are numbered, however many they are
    unit = tower.merge_unit if tower else 1
    kinds = part.layers.kinds
    layers = sorted({kinds.index(kind) for kind in kinds})
    settings = TraceSettings("float32", 1, ("none",) * len(layers), adapters={name: asked}, layers=layers)
    rows = TracedRows(0, patches=_TOKENS * unit) if tower else TracedRows(_TOKENS)
    keys = torch.empty(_TOKENS * unit, dtype=torch.long, device="meta")
    with drawing(TokenKeys(keys, unit)):
        try:
            trace_part(source, family, name, rows, settings)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error
        except ModelError:
            return
