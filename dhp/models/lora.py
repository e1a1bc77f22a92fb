"""Adds peft's adapters to a part, alike in every layout."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.draws import TokenKeys, column_bits, current_keys, draw_dropped, draw_key
from dhp.core.errors import ConfigError
from dhp.core.parameters import ADAPTER, EXPERTS, AdapterSettings, is_inside, names_experts, plain_name
from dhp.core.text import did_you_mean, nearest
from dhp.models.pretrained import name_accelerator
from dhp.models.types import Part


class TokenDropout(nn.Module):
    """As torch's dropout (Srivastava et al. 2014, section 4): in training each element is 0 with a chance of `share`,
    and the others are divided by 1 - share.

    What it drops follows from the tokens' keys (`dhp.core.draws.drawing`), the name of the module that it stands
    before, and the column. first_column: of the states given here, in those of the whole module."""

    def __init__(self, share: float, name: str):
        super().__init__()
        self.share, self.first_column = share, 0
        self._name, self._module = name, draw_key(name)
        self._columns: Tensor | None = None

    def extra_repr(self) -> str:
        return f"share={self.share}"

    def forward(self, states: Tensor) -> Tensor:
        """[…, columns] → as many. Raises RuntimeError where nobody has said which tokens are computed, ConfigError
        where the states are not of those."""
        if not self.training:
            return states
        return states.masked_fill(self._dropped(states), 0.0).mul_(1 / (1 - self.share))

    def _dropped(self, states: Tensor) -> Tensor:
        keys = current_keys()
        if states.is_meta:  # what it keeps is counted, and has no values
            if keys is not None:
                self._rows(states, keys)
            return torch.empty(states.shape, dtype=torch.bool, device=states.device)
        if keys is None:
            raise RuntimeError(
                "an adapter with dropout was called for tokens of which nothing is known. Call its model inside of "
                "dhp.core.draws.drawing, or dhp.models.lora.without_dropout"
            )
        width = states.shape[-1]
        if self._columns is None or len(self._columns) != width or self._columns.device != states.device:
            self._columns = column_bits(self.first_column, width, states.device)
        rows = self._rows(states, keys)
        return draw_dropped(rows, self._module, self._columns, self.share).view(states.shape)

    def _rows(self, states: Tensor, keys: TokenKeys) -> Tensor:
        count = states.shape[:-1].numel()
        rows = keys.of_rows(count)
        if rows is None:
            raise ConfigError(
                f"lora.dropout={self.share} of {self._name}: it is given {count} rows where the part has "
                f"{keys.said()}. Which token a row is of is not known, "
                "so another layout would leave out others. Leave the module out of lora.targets, or set lora.dropout=0"
            )
        return rows


_ROUTERS = {"router", "gate", "shared_expert_gate"}  # names of modules that choose experts
FIRST_OUT = 0.0  # initial values of B, relative to those of A: the first output is the model's own


def find_targets(model: nn.Module, part: Part, asked: AdapterSettings) -> tuple[str, ...]:
    """Names of the part's modules that get an adapter, of those that this model holds, in its order, and behind them of
    the matrices of experts, where targets name these. What the part's outputs do not depend on gets none."""
    unused, chosen = _unused(model, part), asked.selectors()
    linear = [name for name in _linear_modules(model, part) if name not in unused]
    experts = [name for name in _expert_matrices(model, part) if name not in unused]
    if not chosen:
        return tuple(name for name in linear if is_inside(name, [part.layers.path]) and not is_router(name))
    found = [name for name in linear if any(selector.fits(f"{name}.weight") for selector in chosen)]
    named = [selector for selector in chosen if names_experts(selector.said)]
    return (*found, *(name for name in experts if any(selector.fits(name) for selector in named)))


def check_targets(model: nn.Module, part: Part, key: str, asked: AdapterSettings) -> None:
    """Raises ConfigError for targets that the part of a whole model does not have, or that cannot have an adapter, and
    where none are named and there are none. key: of the part's adapters in the configuration."""
    if not asked.targets and not find_targets(model, part, asked):
        raise ConfigError(_tell_none(model, part, key))
    linear, unused = list(_linear_modules(model, part)), _unused(model, part)
    for selector in asked.selectors():
        fitting = [name for name in linear if selector.fits(f"{name}.weight")]
        if names_experts(selector.said):
            fitting += [name for name in _expert_matrices(model, part) if selector.fits(name)]
        if fitting and unused.issuperset(fitting):
            raise ConfigError(
                f"{key}.targets: {selector.said} selects {fitting[0]}, on which nothing depends that leaves this part: "
                "an adapter there would learn nothing. Leave it out"
            )
        if fitting:
            continue
        others = (name for name, _ in model.named_parameters() if is_inside(name, part.modules))
        other = next(filter(selector.fits, others), None)
        if other is not None:
            owner = other.rpartition(".")[0]
            kind = type(model.get_submodule(owner)).__name__
            raise ConfigError(
                f"{key}.targets: {selector.said} selects {owner}, of the kind {kind}: adapters stand beside "
                "linear layers alone, not beside heads, embeddings, convolutions or norms; those of experts are named "
                "as experts.down_proj. Leave it out, or train it whole by training.trainable"
            )
        pieces = dict.fromkeys(piece for name in linear for piece in name.split(".") if not piece.isdigit())
        hint = did_you_mean([nearest(selector.said.strip("*."), pieces)])
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise ConfigError(f"{key}.targets: {selector.said} is no matrix of this part{hint}. There are {known}")


def add_adapters(
    model: nn.Module,
    targets: Sequence[str],
    asked: AdapterSettings,
    seed: int,
    begin: Callable[[str], Tensor] | None = None,
) -> None:
    """Add adapters to the modules of these names. Which other parameters are trained stays as it was.

    begin: what a weight of theirs of that name begins with; None: as without adapters."""
    if not targets:
        return
    name_accelerator()
    from peft import LoraConfig, inject_adapter_in_model

    trained = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    config = LoraConfig(
        r=asked.rank,
        lora_alpha=asked.alpha,
        lora_dropout=asked.dropout,
        **split_targets(targets),
        use_rslora=asked.rslora,
        bias="none",
    )
    inject_adapter_in_model(config, _Nameless(model), ADAPTER)
    for parameter in model.parameters():
        parameter.requires_grad_(trained.get(id(parameter), True))
    adapted = set(targets)
    for name, layer in adapted_modules(model):
        if target_of(name, layer) not in adapted:
            continue
        if asked.dora:
            _add_norms(layer)
        if asked.dropout:
            layer.lora_dropout[ADAPTER] = TokenDropout(asked.dropout, name)
        with torch.no_grad():
            for own, weight in layer.named_parameters(prefix=name):
                piece = own.removesuffix(f".{ADAPTER}.weight")
                if weight.is_meta or not own.startswith(f"{name}.lora_"):
                    continue  # or it is of a layer inside, which comes by itself
                if begin is not None:
                    weight.copy_(begin(own))
                elif piece.endswith(("lora_A", "lora_B")):
                    weight.copy_(first_values(piece, weight.shape, seed))


def _add_norms(layer: Any) -> None:
    """What peft's own DoRA adds to a layer. Where its matrix is a slice, norms come as many and without values: they
    are those of whole rows (`dhp.parallel.tensor.row_norms`)."""
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.variants import DoraLinearVariant

    weight, rows = layer.base_layer.weight.detach(), len(layer.lora_B[ADAPTER].weight)
    norms = DoraLinearLayer(fan_in_fan_out=False)
    norms.weight = nn.Parameter(weight.norm(dim=1) if len(weight) == rows else weight.new_ones(rows))
    layer.lora_magnitude_vector[ADAPTER], layer.lora_variant[ADAPTER] = norms, DoraLinearVariant()
    layer.use_dora[ADAPTER] = True
    layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_magnitude_vector")


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Initial values of an adapter's matrix, whatever else is in the model and on any device: A as torch initializes
    linear layers (uniform, by its inputs), B with zeros."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    bound = shape[1] ** -0.5
    values = torch.empty(tuple(shape), dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    return values * FIRST_OUT if name.endswith("lora_B") else values


def split_targets(targets: Sequence[str]) -> dict[str, list[str] | None]:
    """peft's settings for such targets: modules, and parameters in modules of experts."""
    modules = [name for name in targets if not _is_expert_matrix(name)]
    return {"target_modules": modules, "target_parameters": [name for name in targets if name not in modules] or None}


def target_of(name: str, layer: Any) -> str:
    """The target that peft put the layer of that name in the place of: a module, or its parameter."""
    parameter = getattr(layer, "parameter_name", None)
    return name if parameter is None else f"{plain_name(name)}.{parameter}"


def pattern_value(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """What peft's rank_pattern or alpha_pattern says for a module; `otherwise` where it says nothing."""
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(list(patterns), name), otherwise)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers by which peft replaced linear modules, by their names."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and ADAPTER in module.lora_A:
            yield name, module


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout in the block: among modules that compute otherwise in training, adapters alone draw numbers
    here."""
    drawing = [module for module in model.modules() if isinstance(module, TokenDropout)]
    for module in drawing:
        module.eval()
    try:
        yield
    finally:
        for module in drawing:
            module.train()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute as the model does without its adapters, in the block."""
    layers = [module for _, module in adapted_modules(model)]
    trained = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, asked in trained:  # which peft sets as it thinks fit
            parameter.requires_grad_(asked)


class _Nameless(nn.Module):
    """The modules of a model under a root without its configuration."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._modules = model._modules  # the same, so that what is put in here is put into the model


def _linear_modules(model: nn.Module, part: Part) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_inside(name, part.modules) and name != getattr(part, "head", None):
            yield name


def _expert_matrices(model: nn.Module, part: Part) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and is_inside(name, part.modules) and _is_expert_matrix(name):
            yield name


def _is_expert_matrix(name: str) -> bool:
    return name.split(".")[-2:-1] == [EXPERTS]


def is_router(name: str) -> bool:
    """Whether the module is a router, or inside one."""
    return not _ROUTERS.isdisjoint(name.split("."))


def _unused(model: nn.Module, part: Part) -> set[str]:
    """Names of modules that none of the part's outputs depends on. Which parameters are trained stays as it was."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(True)
    part.freeze_unused(model)
    found = {name for name in _linear_modules(model, part) if not model.get_submodule(name).weight.requires_grad}
    found |= {name for name in _expert_matrices(model, part) if not model.get_parameter(name).requires_grad}
    for parameter, before in trained:
        parameter.requires_grad_(before)
    return found


def _tell_none(model: nn.Module, part: Part, key: str) -> str:
    """The error that no matrix of the part's layers can have an adapter, and which there are."""
    layers = model.get_submodule(part.layers.path)
    matrices = lambda module: [one for one in module.parameters(recurse=False) if one.ndim > 1]
    named = layers.named_modules()
    held = {name.rpartition(".")[2]: type(module).__name__ for name, module in named if matrices(module)}
    known = ", ".join(f"{name} ({kind})" for name, kind in held.items())
    return (
        f"{key}.rank without {key}.targets: no layer of this part has a linear module beside which an adapter could "
        f"stand. What its layers have is {known}. Set {key}.rank=0, and train the part, or some of these by "
        "training.trainable"
    )
