"""Finds a family's properties by running a small model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Split, WeightConverter

from dhp.core.errors import ModelError
from dhp.models.contract.clips import ClipTower, clip_form
from dhp.models.contract.contract import (
    Contract,
    Structure,
    find_structure,
    layers_path,
    unknown_layers,
    with_called,
    without_weights,
)
from dhp.models.contract.double import staying_double
from dhp.models.contract.generic_parts import ContractDecoder, WholeTower, run_layers
from dhp.models.contract.generic_processor import ContractProcessor
from dhp.models.contract.random_pictures import Picture, joined, pack, row_values
from dhp.models.contract.random_rows import block_rule, causal_types, generic_name, is_declared, kinds_for
from dhp.models.contract.shrink import shrink
from dhp.models.contract.twin import DUMMY_FRAMES, ProbeModel
from dhp.models.decoder import embed
from dhp.models.family import Family
from dhp.models.flops import AudioWork, TextWork, VisionWork, head_width
from dhp.models.types import Chunk, DecoderInputs, LayerParts

_EXPERTS = "experts"
_BEHIND = ("down_proj", "fc2", "w2", "linear_2")  # matrices behind the activation function


def find_vision_parts(model: nn.Module, structure: Structure) -> LayerParts:
    """The tower's layers, all of one kind. Attention in them is the library's own, and never saved."""
    path = structure.vision_layers
    if path is None:
        return LayerParts("", (), (), ())
    layers = list(model.get_submodule(path).children())
    return LayerParts(path, *_matrices(layers), ("image",) * structure.vision_depth)


def find_text_parts(model: nn.Module, structure: Structure, text: Any) -> LayerParts:
    """The decoder's layers; those of one kind attend alike, and all have experts or none."""
    layers = list(model.get_submodule(structure.layers).children())
    attention = getattr(text, "layer_types", None) or ["causal"] * len(layers)
    kinds = tuple(
        f"{kind} with experts" if any(map(_is_experts, dict(layer.named_modules()))) else kind
        for kind, layer in zip(attention, layers, strict=True)
    )
    return LayerParts(structure.layers, *_matrices(layers), kinds)


def experts_of(parts: LayerParts, model: nn.Module) -> tuple[str, ...]:
    """Paths of all modules of experts."""
    return tuple(
        f"{parts.path}.{name}" for name, _ in model.get_submodule(parts.path).named_modules() if _is_experts(name)
    )


def _matrices(layers: Sequence[nn.Module]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names inside a layer: of the matrices around attention, and of those before an activation function, with whole
    modules of experts. Each layer has some of both, or there are none."""
    found: list[tuple[list[str], list[str]]] = []
    for layer in layers:
        projections, gates = [], []
        for name, module in layer.named_modules():
            if _is_experts(name):
                gates.append(name)
            elif isinstance(module, nn.Linear) and f".{_EXPERTS}." not in f".{name}.":
                if "att" in name.partition(".")[0]:
                    projections.append(name)
                elif not name.removesuffix(".linear").endswith(_BEHIND):
                    gates.append(name)
        found.append((projections, gates))
    every = tuple(tuple(dict.fromkeys(name for names in of_kind for name in names)) for of_kind in zip(*found))
    complete = [all(of_kind) for of_kind in zip(*found)]
    projections, gates = (names if all_have else () for names, all_have in zip(every, complete, strict=True))
    return projections, gates


def _is_experts(name: str) -> bool:
    return name.rpartition(".")[2] == _EXPERTS


_STANDARD = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}
_HEAD_NORMS = ("q_norm", "k_norm")


def complete_plan(model: PreTrainedModel, structure: Structure, text: Any) -> dict[str, str] | None:
    """Styles to add: of norms of single heads, whose gradients are summed over the ranks, and all of a decoder of
    ordinary layers for which there is no plan. None where there is none and layers are of another kind.

    A norm as wide as several heads gets no style, so that cutting its heads is refused by name."""
    layers = f"{structure.layers}."
    given = {name for name in model.tp_plan if name.startswith(layers)}
    modules = {name: one for name, one in model.named_modules() if name.startswith(layers)}
    head_dim = head_width(text)
    added = {
        generic_name(name, layers): "replicated_with_grad_allreduce"
        for name, module in modules.items()
        if name.endswith(_HEAD_NORMS) and _width(module) == head_dim
    }
    added = {name: style for name, style in added.items() if name not in given}
    if given:
        return added
    matrices = {generic_name(name, layers) for name, module in modules.items() if isinstance(module, nn.Linear)}
    if not matrices or {name.rpartition(".")[2] for name in matrices} - _STANDARD.keys():
        return None
    return (
        {name: _STANDARD[name.rpartition(".")[2]] for name in matrices}
        | added
        | {structure.embedding: "embedding_rowwise"}
    )


def _width(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")


def count_vision(config: Any, model: PreTrainedModel, structure: Structure) -> VisionWork:
    """The layers' matrices once a patch, all others of the tower and its projector once a token."""
    vision = getattr(config, "vision_config", None) or config
    width = next((getattr(vision, n) for n in ("hidden_size", "embed_dim") if hasattr(vision, n)), 0)
    inside = structure.vision_layers or ""
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2]
    layers = sum(size for name, size in matrices if inside and name.startswith(f"{inside}."))
    modules = dict(model.named_modules())
    entering = rest = 0
    for name, size in matrices:
        if not any(name.startswith(f"{one}.") for one in structure.vision) or name.startswith(f"{inside}."):
            continue
        owner = modules[name.rpartition(".")[0]]
        if isinstance(owner, nn.Conv2d | nn.Conv3d):
            entering += size
        elif isinstance(owner, nn.Linear):
            rest += size
    return VisionWork(entering, layers, 0, structure.vision_depth * 2 * width, rest)


def count_text(config: Any, model: PreTrainedModel, structure: Structure) -> TextWork:
    """The layers' matrices once a token, those of experts as often as a token visits one."""
    text = config.get_text_config()
    chosen = next((getattr(text, name) for name in _CHOSEN if isinstance(getattr(text, name, None), int)), 1)
    token = 0.0
    for name, parameter in model.named_parameters():
        if name.startswith(f"{structure.layers}.") and parameter.ndim >= 2:
            share = chosen / parameter.shape[0] if parameter.ndim == 3 and "expert" in name else 1
            token += share * parameter.numel()
    head_dim = head_width(text)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * structure.depth
    attending = sum("attention" in kind and "linear" not in kind for kind in kinds)
    pair = attending * 2 * text.num_attention_heads * head_dim
    return TextWork(round(token), pair, text.hidden_size * text.vocab_size)


_found: dict[str, Contract] = {}


def find_contract(config: PreTrainedConfig) -> Contract:
    """The contract of a configuration; a second's work, once a process. Raises ModelError for a family that cannot be
    run without code of its own, and says what is missing."""
    key = config.to_json_string(use_diff=False)
    if key not in _found:
        try:
            _found[key] = _find_exactly(config)
        except ModelError:
            raise
        except Exception as error:  # a family that no rule here knows may fail anyhow
            raise ModelError(
                f"model_type {config.model_type!r}: a small model of this configuration does not run "
                f"({type(error).__name__}: {str(error).strip()[:300]}), so that nothing is known of the family here"
            ) from error
    return _found[key]


def _find_exactly(config: PreTrainedConfig) -> Contract:
    try:
        return _find(config)
    except ModelError:
        raise
    except Exception:  # a model that computes some of it in float32 fails where its weights are float64
        with staying_double():
            return _find(config)


def _find(config: PreTrainedConfig) -> Contract:
    model = without_weights(config)
    whole = find_structure(model)
    if whole.vision_layers is None:
        raise ModelError(
            f"model_type {config.model_type!r}: its encoder is a projection of patches without layers, of which a part "
            "by itself has nothing to divide or to cut. Take a family with a tower"
        )
    _refuse_uneven_heads(config)
    twin = small_twin(config)
    structure = with_called(whole, twin.called)
    values = row_values(config)
    text_layers = find_text_parts(model, structure, config.get_text_config())
    picture = {name: tensor.numpy() for name, tensor in twin.picture(0).items() if tensor is not None}
    dummy = pack(picture, twin.tokens(0), values)[1]
    return Contract(
        structure=structure,
        base=type(model.get_submodule(structure.base)),
        handover=twin.handover,
        dummy=dummy,
        values=values,
        arguments=tuple(signature(twin.base.get_image_features).parameters),
        batches=_batches(twin),
        embeds=_embeds(twin),
        cuts=_cuts(twin),
        logits=twin.logits,
        tensor_plan=complete_plan(model, structure, config.get_text_config()),
        unused=_unused(twin, structure),
        vision_work=count_vision(config, model, structure),
        text_work=count_text(config, model, structure),
        vision_layers=find_vision_parts(model, structure),
        text_layers=text_layers,
        experts=experts_of(text_layers, model),
        loops=_loops(twin),
        unknown=unknown_layers(config, structure),
        entrance=twin.called,
        fused=_fused(model),
        videos=twin.videos,
        **_find_sound(twin, model, structure),
    )


def _find_sound(twin: ProbeModel, model: PreTrainedModel, structure: Structure) -> dict[str, Any]:
    """What a contract says of sound; empty where none is read."""
    path = layers_path(model, structure.audio)
    if not twin.hears or path is None:
        return {}
    layers = list(model.get_submodule(path).children())
    inside = sum(p.numel() for p in model.get_submodule(path).parameters() if p.ndim >= 2)
    every = sum(p.numel() for name in structure.audio for p in model.get_submodule(name).parameters() if p.ndim >= 2)
    return {
        "clip": clip_form(DUMMY_FRAMES, twin.bins, twin.clip_tokens(DUMMY_FRAMES)),
        "audio_layers": LayerParts(path, *_matrices(layers), ("audio",) * len(layers)),
        "audio_work": AudioWork(0, 0, every - inside, inside, 0, 0, 1),
    }


def _refuse_uneven_heads(config: PreTrainedConfig) -> None:
    """Raises ModelError for a decoder whose layers have heads of different widths or numbers each."""
    text = config.get_text_config()
    try:
        head_width(text), text.num_attention_heads
    except RuntimeError as error:  # a configuration with numbers of single layers answers no question about all
        raise ModelError(
            f"model_type {config.model_type!r}: its decoder's layers differ in heads ({str(error).strip()[:200]}), "
            "and shares of heads and work are counted for layers that are alike"
        ) from error


def small_twin(config: PreTrainedConfig) -> ProbeModel:
    """A small model of the family, whose tower has few layers where these say all of the others."""
    chosen = getattr(config, "vision_feature_layer", None)
    chosen = [chosen] if isinstance(chosen, int) else chosen or []
    if all(layer < 0 for layer in chosen):  # from the end, not by its number
        try:
            return ProbeModel(shrink(config, towers=True))
        except Exception:  # a tower whose layers cannot be cut anyhow is run with all of them
            pass
    return ProbeModel(shrink(config))


def _fused(model: PreTrainedModel) -> str:
    """Projections that the files of such a model hold as one matrix of unequal parts; "": none."""
    splits = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    named = [one.target_patterns for one in splits if any(isinstance(each, Split) for each in one.operations)]
    return "; ".join(", ".join(patterns) for patterns in named)


def _batches(twin: ProbeModel) -> bool:
    """Whether two pictures of one shape encoded together equal each encoded alone."""
    pair = [twin.picture(0), twin.picture(3)]
    with torch.no_grad():
        alone = [twin.handover.take(twin.encode(picture)) for picture in pair]
        try:
            together = twin.handover.take(twin.encode(joined(pair)), [twin.tokens(0)] * 2)
        except Exception:  # an encoder of single pictures may fail anyhow
            return False
    for name, rows in together.items():
        wanted = torch.cat([one[name] for one in alone])
        if rows.shape != wanted.shape or not torch.allclose(rows, wanted, rtol=1e-9, atol=1e-9):
            return False
    return True


def _loops(twin: ProbeModel) -> bool:
    """Whether some module is called once for each picture of a call, as a merger of pictures of many sizes may be."""
    try:
        alone, together = twin.picture(0), joined([twin.picture(0), twin.picture(3)])
        return _count_calls(twin, alone) != _count_calls(twin, together)
    except Exception:  # an encoder of single pictures may fail anyhow
        return True


def _count_calls(twin: ProbeModel, pictures: Picture) -> Counter[str]:
    """How often an encoding calls each module that has parameters of its own."""
    calls = Counter[str]()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        for name, module in twin.model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad():
            twin.encode(pictures)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _embeds(twin: ProbeModel) -> bool:
    """Whether the decoder's output from such embeddings equals the base model's from tokens and pictures."""
    structure, handover = twin.structure, twin.handover
    if handover.more or handover.shared or block_rule(twin.config) is not None:
        return False
    sample = twin.sample([0], seed=5)
    places = sample.kinds.flatten().nonzero()[:, 0]
    inputs = DecoderInputs(sample.ids, torch.arange(sample.ids.shape[1])[None], kinds=sample.kinds)
    with torch.no_grad():
        rows = handover.take(twin.encode(twin.picture(0)), [twin.tokens(0)])
        whole = Chunk(range(structure.depth), True, True)
        wanted = run_layers(twin.model, structure, whole, inputs, {"image": handover.give(rows)})
        given = replace(inputs, images=rows, image_positions=places)
        try:
            found = run_layers(twin.model, structure, whole, replace(given, hidden=embed(twin.model, given)))
        except Exception:  # a decoder that wants what only the base model has may fail anyhow
            return False
    return bool((found - wanted).abs().max() <= 1e-5 * wanted.abs().max())


def _cuts(twin: ProbeModel) -> bool:
    """Whether two halves of the decoder, one after the other, equal the whole."""
    structure = twin.structure
    if twin.handover.more or structure.norm is None or structure.depth < 2:
        return False
    middle = structure.depth // 2
    sample = twin.sample([0], seed=3)
    # Blocks reach our attention by a plan, in each stage; the library's mask of them would be made in the first alone.
    # So all is causal: of no image, and, where a prefix is seen both ways, behind it.
    ids, kinds = (
        sample.ids,
        sample.kinds if block_rule(twin.config) is None else causal_types(twin.config, sample.kinds),
    )
    inputs = DecoderInputs(ids, torch.arange(ids.shape[1])[None], kinds=kinds)
    with torch.no_grad():
        try:
            whole = run_layers(twin.model, structure, Chunk(range(structure.depth), True, True), inputs)
            states = run_layers(twin.model, structure, Chunk(range(middle), True, False), inputs)
            last = replace(inputs, hidden=states)
            found = run_layers(twin.model, structure, Chunk(range(middle, structure.depth), False, True), last)
        except Exception:  # layers that need more than a stage has may fail anyhow
            return False
    return bool((found - whole).abs().max() <= 1e-5 * whole.abs().max())  # rounding aside, which norms in float32 do


def _unused(twin: ProbeModel, structure: Structure) -> tuple[str, ...]:
    """Parameters that no logit depends on: of the decoder in all layers alike, as the twin has fewer; of a tower's last
    layers by their place from the end. structure: of the model itself."""
    sample = twin.sample([0], seed=4)
    picture = {name: value for name, value in twin.picture(0).items() if value is not None}
    clips = [DUMMY_FRAMES] if twin.hears else []
    sample = twin.sample([0], seed=4, clips=clips)
    picture |= twin.clip(DUMMY_FRAMES) if clips else {}
    logits = twin.model(
        input_ids=sample.ids, use_cache=False, **picture, **kinds_for(twin.model.forward, sample.kinds)
    ).logits
    named = {name: parameter for name, parameter in twin.model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(logits.sum(), list(named.values()), allow_unused=True)
    unused = [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]
    unused += [name for name, parameter in twin.model.named_parameters() if not parameter.requires_grad]
    layers, more = f"{structure.layers}.", structure.vision_depth - twin.structure.vision_depth
    renamed = (_moved(generic_name(name, layers), f"{structure.vision_layers}.", more) for name in unused)
    return tuple(dict.fromkeys(renamed))


def _moved(name: str, layers: str, more: int) -> str:
    """The name of a parameter in a tower with so many layers more."""
    if not name.startswith(layers):
        return name
    number, _, own = name.removeprefix(layers).partition(".")
    return f"{layers}{int(number) + more}.{own}"


NOTE = (
    "note: {family} runs by transformers' contract, and no test here holds it to the plain model; "
    "`python -m dhp doctor model {source}` does"
)


BY_SAMPLE = (
    "note: layers of {family}'s decoder ({kinds}) are of kinds that are not known here, so each sample of a row runs "
    "through it alone: packed rows are exact, and take as long as their samples one by one"
)


def generic(config: Any, model_name: str = "") -> Family:
    """The family of that configuration. model_name: the directory in which its processor is found, when samples are
    read. Raises ModelError with what is missing."""
    contract = find_contract(config)
    source, own = model_name or "PATH", type(config).__module__
    source += "" if own.startswith("transformers.") else f" --plugin {own}"
    note = "" if is_declared(config) else NOTE.format(family=config.model_type, source=source)
    if contract.unknown:
        alone = BY_SAMPLE.format(family=config.model_type, kinds=", ".join(contract.unknown))
        note = f"{note}\n{alone}" if note else alone
    try:
        decoder = ContractDecoder(config, contract)
    except AttributeError as error:
        raise ModelError(
            f"model_type {config.model_type!r}: its decoder's configuration lacks what all others have ({error})"
        ) from error
    processor, tower = ContractProcessor(config, contract, model_name), WholeTower(config, contract)
    others = {} if contract.clip is None else {"audio": ClipTower(config, contract)}
    idle = () if others else contract.structure.audio
    return Family(config, processor, tower, decoder, others=others, idle=idle, note=note)
