"""Builds a stage: trained parameters, sharding, kernels."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from dhp.checkpoint.shard_reader import stored_formats
from dhp.checkpoint.shard_writer import NAMES
from dhp.core.parameters import ADAFACTOR, EXACT_STATES, FORMS, MUON, ParameterGroup
from dhp.core.reports import KernelUse
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.begin_adapters import weight_reader
from dhp.models.decoder import Decoder
from dhp.models.empty import stored_dtype
from dhp.models.family import Family
from dhp.models.load import ReadPlan
from dhp.models.lora import adapted_modules, add_adapters, find_targets
from dhp.models.shape import hidden_matrices
from dhp.models.tower import Tower
from dhp.models.types import Chunk, LayerParts, Part
from dhp.parallel.attention.attention_kernels import segment_kernel
from dhp.parallel.comm import replicas_mesh
from dhp.parallel.expert.expert_modules import GATE_UP, takes_groups
from dhp.parallel.kernels.padded import pad_gated_mlps
from dhp.parallel.kernels.replace import left_to_compiler, replace_kernels
from dhp.parallel.optim.adafactor import make_adafactor
from dhp.parallel.optim.base import Frozen, StageOptimizer, TiedOptimizer, exact_dtype, make_adamw
from dhp.parallel.optim.chunked_adamw import make_chunked_adamw
from dhp.parallel.optim.fsdp import FrozenShards, FullySharded
from dhp.parallel.optim.learning_rates import RateCurve, learning_rate_at
from dhp.parallel.optim.muon import make_muon
from dhp.parallel.optim.replicated import MakeOptimizer, Replicated
from dhp.parallel.optim.zero import ZeroSharded
from dhp.parallel.tensor.row_norms import scale_rows
from dhp.parallel.tensor.sequence_norms import SequenceNorms, TensorRanks
from dhp.parallel.tensor.slices import cut_adapters
from dhp.parallel.tensor.tensor_plan import local_plan

DEEPSPEED = "deepspeed"  # a zero_engine; the other is fsdp


def freeze(model: nn.Module, trains: Callable[[str], bool]) -> None:
    """Set requires_grad to False on parameters that are not to be trained, by name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and trains(name))


def put_adapters(model: nn.Module, part: Part, settings: StageSettings, mesh: DeviceMesh) -> None:
    """Add adapters to the matrices of the stage that are to have some, cut over tensor ranks as those are."""
    asked = settings.adapters
    if asked is None:
        return
    folder = settings.part.lora.begin_from if settings.resume_from is None else None  # a checkpoint has its own
    begin = None if folder is None else weight_reader(Path(folder))
    add_adapters(model, find_targets(model, part, asked), asked, settings.config.seed, begin)
    if settings.spec.degrees.tensor > 1:
        cut_adapters(adapted_modules(model), mesh["tensor"])
    scale_rows(adapted_modules(model), mesh.get_group("tensor"), begun=begin is not None)


def quantize_frozen(
    model: nn.Module, layers: LayerParts, settings: StageSettings, dtype: torch.dtype, device: torch.device
) -> None:
    """Keep matrices of the layers that are not trained in fewer bits, where the adapters' settings ask for it. They are
    on the device then."""
    asked = settings.adapters
    if asked is None or asked.quantization is None:
        return
    from dhp.models.quantized import quantize

    quantize(model, layers, asked, settings.rules.trains, dtype, device, f"{settings.spec.part}.lora.quantization")


def cuts_first(settings: StageSettings) -> bool:
    """Whether the stage's weights are cut on the host, before they are moved: FSDP2 takes a layer at a time to the
    device. Whole, 32 billion weights in float32 have no place on any. Where nothing is trained, stage 3 alone cuts."""
    stage = settings.part.zero_stage
    return (stage > 0 if settings.spec.trains else stage == 3) and settings.part.zero_engine != DEEPSPEED


def dtype_to_load(settings: StageSettings, dtype: torch.dtype) -> torch.dtype:
    """The format in which the stage's weights are read: the files' where they have what the stage computes in.
    Master weights are `exact_dtype(dtype)`, widened on the device or behind the cut; what is not widened on the host is
    not copied there either, so ranks of a host share the pages of the model's files. Adapters' first values are no
    file's and need the wide format."""
    as_stored = settings.adapters is None and stored_dtype(settings.part.model_name) is dtype
    if as_stored and settings.resume_from is not None:  # whose weights take their place, and may not be rounded
        as_stored = NAMES[dtype] in stored_formats(Path(settings.resume_from))
    return dtype if as_stored else exact_dtype(dtype)


def make_optimizer(
    model: nn.Module, layers: Sequence[nn.Module], settings: StageSettings, mesh: DeviceMesh, family: Family
) -> StageOptimizer:
    """The optimizer of the stage, with as much of its states on this rank as zero_stage leaves there."""
    dtype, form = getattr(torch, settings.part.dtype), FORMS[settings.part.state_bytes]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    make = optimizer_maker(settings, hidden_matrices(shapes, family))
    if not settings.spec.trains:
        passes = any(settings.graph.goes_back(node) for node in settings.spec.nodes)
        if cuts_first(settings):
            return FrozenShards(model, layers, replicas_mesh(mesh), mesh.get_local_rank("tensor"), dtype, passes)
        return Frozen(model, dtype, passes)
    if not settings.part.zero_stage:
        group = replicas_mesh(mesh).get_group()
        return Replicated(model, make, group, dtype, exclusive=settings.exclusive_sums, form=form)
    if settings.part.zero_engine == DEEPSPEED:
        return ZeroSharded(model, make, settings.part.zero_stage, dtype, saves_frozen=settings.adapters is None)
    tensor_rank = mesh.get_local_rank("tensor")
    return FullySharded(model, layers, make, replicas_mesh(mesh), tensor_rank, settings.part.zero_stage, dtype, form)


def tie_weight(optimizer: StageOptimizer, model: PreTrainedModel, settings: StageSettings) -> None:
    """Tie the weight that this stage shares with another, where there is one: the embedding, which
    is the head too."""
    for tie in settings.graph.ties:
        if settings.spec.name in (tie.owner, tie.other):
            weight = model.get_input_embeddings().weight
            name = next(name for name, parameter in model.named_parameters() if parameter is weight)
            cast(TiedOptimizer, optimizer).tie(name, owns=settings.spec.name == tie.owner)


def optimizer_maker(settings: StageSettings, matrices: Collection[str] = ()) -> MakeOptimizer:
    """The configured optimizer, for whatever parameters it is handed. matrices: names of those of hidden layers."""
    update, group = settings.update, partial(settings.rules.group, default=default_group(settings))
    if update.optimizer == ADAFACTOR:
        return partial(make_adafactor, group=group)
    if update.optimizer == MUON:
        muon = partial(make_muon, matrices=matrices, momentum=update.momentum, adjust=update.adjust_lr)
        return partial(muon, group=group, betas=update.betas, eps=update.eps)
    if settings.part.state_bytes == EXACT_STATES and not settings.part.host_moments:
        return partial(make_adamw, group=group, betas=update.betas, eps=update.eps)
    form, seed, host = FORMS[settings.part.state_bytes], settings.config.seed, settings.part.host_moments
    chunked = partial(make_chunked_adamw, form=form, seed=seed, host=host)
    return partial(chunked, group=group, betas=update.betas, eps=update.eps)


def trained_groups(model: nn.Module, settings: StageSettings) -> tuple[ParameterGroup, ...]:
    """The groups of the parameters that this stage trains."""
    default = default_group(settings)
    named = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return tuple(dict.fromkeys(settings.rules.group(name, default) for name in named))


def default_group(settings: StageSettings) -> ParameterGroup:
    """The group of parameters that no rule is about."""
    update = settings.update
    return ParameterGroup(
        settings.rules.default_name(settings.spec.part), update.learning_rate, update.weight_decay, update.warmup_steps
    )


def rates_at(step: int, groups: Sequence[ParameterGroup], update: OptimizerSettings) -> dict[ParameterGroup, float]:
    """The learning rate of each group at a step."""
    # One share for all groups, as transformers has it: a group of another rate falls to that share of its own.
    lowest = update.min_lr / update.learning_rate if update.min_lr else 0.0
    shape = (update.cycles, update.decay_steps, update.decay_type)
    curve = RateCurve(update.lr_scheduler_type, update.total_steps, lowest, *shape)
    return {of: learning_rate_at(step, of.learning_rate, of.warmup_steps, curve) for of in groups}


def place_kernels(
    model: nn.Module, settings: StageSettings, dtype: torch.dtype, ours: bool, mixers: Collection[str] = ()
) -> tuple[KernelUse, ...]:
    """Put the kernels for norms, rotary positions and gates in, and name all that the stage computes with.

    ours: whether its attention is this project's. mixers: classes of modules that carry state along a row. All ranks of
    the stage together. Raises PartFailed where a kernel that was asked for does not serve."""
    device = torch.device(settings.device)
    backend = segment_kernel(settings.part.attention_backend, device, dtype) if ours else "the library's"
    wanted = left_to_compiler(settings.kernels) if settings.part.compile else settings.kernels
    padded = pad_gated_mlps(model, device, dtype, settings.kernels)
    elementwise = replace_kernels(model, device, dtype, dist.group.WORLD, wanted)
    return (
        KernelUse("attention", backend, len(settings.spec.layers)),
        *_experts(model, dtype),
        *_mixers(model, mixers),
        *padded,
        *elementwise,
        *_patches(model),
    )


def _experts(model: nn.Module, dtype: torch.dtype) -> tuple[KernelUse, ...]:
    weights = [
        getattr(module, GATE_UP)
        for module in model.modules()
        if isinstance(getattr(module, GATE_UP, None), nn.Parameter)
    ]
    if not weights:
        return ()
    return (
        KernelUse(
            "experts", "grouped product" if takes_groups(weights[0], dtype) else "expert by expert", len(weights)
        ),
    )


def _mixers(model: nn.Module, classes: Collection[str]) -> tuple[KernelUse, ...]:
    """The library takes kernels for them from packages of its own choice, where these are installed."""
    count = sum(type(module).__name__ in classes for module in model.modules())
    if not count:
        return ()
    lacking = [package for package in ("fla", "causal_conv1d") if find_spec(package) is None]
    if not lacking:
        return (KernelUse("delta net", "fla", count),)
    faster = f"delta net by {' and '.join(lacking)} on GPUs, which the library uses where it is installed"
    return (KernelUse("delta net", "the library's", count, faster),)


def _patches(model: nn.Module) -> tuple[KernelUse, ...]:
    count = sum(isinstance(module, nn.Conv2d | nn.Conv3d) and "forward" in vars(module) for module in model.modules())
    return (KernelUse("patches", "product", count),) if count else ()


def shard_decoder(model: nn.Module, decoder: Decoder, chunks: Sequence[Chunk], ranks: TensorRanks) -> SequenceNorms:
    """Shard the layers of these chunks of a decoder, whose projections are cut, and the norm behind the last one."""
    norms, layers = SequenceNorms(ranks), _held(model, decoder.layers.path, chunks)
    norms.install(list(layers.values()))
    for chunk in chunks:
        norms.begin_at(layers[chunk.layers[0]])
        behind = chunk.last and bool(decoder.norm)
        norms.end_at(model.get_submodule(decoder.norm) if behind else layers[chunk.layers[-1]], behind)
    return norms


def shard_tower(model: nn.Module, tower: Tower, chunk: Chunk, ranks: TensorRanks) -> None:
    """Shard the layers of a chunk of a tower, whose projections are cut. What else the tower has, as mergers of inner
    layers' features, is given whole states."""
    norms, layers = SequenceNorms(ranks), _held(model, tower.layers.path, (chunk,))
    norms.install(list(layers.values()))
    holder, _, own = tower.layers.path.rpartition(".")
    for name, child in model.get_submodule(holder).named_children():
        if name != own:
            for module in child if isinstance(child, nn.ModuleList) else (child,):
                norms.whole_for(module)
    norms.begin_at(layers[chunk.layers[0]])
    norms.end_at(layers[chunk.layers[-1]], False)


def check_norms(part: Part, tensor: int) -> ReadPlan:
    """What reads a tensor-parallel plan as `local_plan` does, and raises ModelError where the part's layers are not
    known to allow that their states are cut by tokens."""

    def read(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
        ours = local_plan(model, plan)
        shard_without_ranks(model, part, tensor)
        return ours

    return read


def shard_without_ranks(model: nn.Module, part: Part, tensor: int) -> None:
    """The same on the meta device, of all the part's layers."""
    if isinstance(part, Tower):
        shard_tower(model, part, part.whole, TensorRanks(tensor))
    elif isinstance(part, Decoder):
        shard_decoder(model, part, (part.whole,), TensorRanks(tensor))


def _held(model: nn.Module, path: str, chunks: Sequence[Chunk]) -> dict[int, nn.Module]:
    return {at: model.get_submodule(f"{path}.{at}") for chunk in chunks for at in chunk.layers}
