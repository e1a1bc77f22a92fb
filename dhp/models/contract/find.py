"""The properties of a family without code of its own, found from its configuration by running its small twin."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from inspect import signature

import torch
from transformers import PreTrainedConfig

from dhp.core.errors import ModelError
from dhp.models.contract.contract import Contract
from dhp.models.contract.decoder import run_layers
from dhp.models.contract.layers import (
    complete_plan,
    count_text,
    count_vision,
    experts_of,
    find_text_parts,
    find_vision_parts,
)
from dhp.models.contract.pictures import Picture, joined, pack, row_values
from dhp.models.contract.rows import block_rule, causal_types, generic_name, kinds_for
from dhp.models.contract.structure import Structure, find_structure, refuse_unknown_layers, without_weights
from dhp.models.contract.twin import shrink
from dhp.models.contract.twin_model import ProbeModel
from dhp.models.decoder import embed
from dhp.models.types import Chunk, DecoderInputs

_found: dict[str, Contract] = {}


def find_contract(config: PreTrainedConfig) -> Contract:
    """The contract of a configuration; a second's work, once a process. Raises ModelError for a family that cannot be
    run without code of its own, and says what is missing."""
    key = config.to_json_string(use_diff=False)
    if key not in _found:
        try:
            _found[key] = _find(config)
        except ModelError:
            raise
        except Exception as error:  # a family that no rule here knows may fail anyhow
            raise ModelError(
                f"model_type {config.model_type!r}: a small model of this configuration does not run "
                f"({type(error).__name__}: {str(error).strip()[:300]}), so that nothing is known of the family here"
            ) from error
    return _found[key]


def _find(config: PreTrainedConfig) -> Contract:
    model = without_weights(config)
    structure = find_structure(model)
    refuse_unknown_layers(config, structure)
    twin = small_twin(config)
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
    )


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
