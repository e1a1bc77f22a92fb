"""Properties of a family without code, and its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dhp.core.batch import LogitRule, ProcessorOutput
from dhp.core.errors import ModelError
from dhp.core.transformers_private import class_of
from dhp.models.decoder import having
from dhp.models.flops import AudioWork, TextWork, VisionWork
from dhp.models.mixers import KINDS
from dhp.models.tower import EMBEDDINGS
from dhp.models.types import LayerParts

_MAKES_TOKENS, _PIXELS = "get_image_tokens", "pixel_values"
CONTRACT = "mm_encoder_outputs"  # the argument by which a model takes what its encoders made
# Of transformers' families for image, text to text, those without it.
WITHOUT_CONTRACT = frozenset({
    "blip", "evolla", "florence2", "git", "idefics", "kosmos-2", "kosmos-2.5", "mistral4", "mllama", "pi0",
    "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder",
})  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """Names of modules and bare parameters.

    base: the module that encodes pictures and runs the decoder; "" for the model itself. decoder: below it, with
    `layers` (its list of layers), `embedding` and, before its output, `norm` (None: not found).

    head: None where the decoder's output is not brought to a vocabulary by one matrix.

    mixers: classes of the decoder's modules that carry state along a row, as far as they are known here.

    text, vision: modules of each part, which the other drops. vision_layers: the tower's largest list of layers. audio:
    the audio encoder's name; no picture passes it."""

    base: str
    decoder: str
    layers: str
    depth: int
    embedding: str
    norm: str | None
    head: str | None
    mixers: tuple[str, ...]
    text: tuple[str, ...]
    vision: tuple[str, ...]
    vision_layers: str | None
    vision_depth: int
    audio: tuple[str, ...] = ()


def family_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class for image, text to text. Raises ModelError where there is none, or one without the contract
    by which an encoder's output enters; it names the nearest family that has it."""
    try:
        kind = class_of(AutoModelForImageTextToText, type(config))
    except KeyError:
        raise ModelError(
            f"model_type {config.model_type!r} is no vision-language model that transformers can load by "
            f"AutoModelForImageTextToText. Give the directory of one that is: {_like(config.model_type)}"
        ) from None
    if CONTRACT not in signature(kind.forward).parameters:
        raise ModelError(
            f"model_type {config.model_type!r}: {kind.__name__}.forward takes no {CONTRACT}, so what an encoder makes "
            f"cannot enter from elsewhere. Take a family that has it: {_like(config.model_type)}"
        )
    pixels = signature(kind.forward).parameters.get(_PIXELS)
    if pixels is not None and pixels.default is Parameter.empty:
        raise ModelError(
            f"model_type {config.model_type!r}: {kind.__name__}.forward asks for {_PIXELS} in every call, so that rows "
            f"without a picture cannot be run. Take a family that has such rows: {_like(config.model_type)}"
        )
    return kind


def _like(model_type: str) -> str:
    """A family with the contract, as near by name as there is one."""
    names = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - WITHOUT_CONTRACT
    (near,) = get_close_matches(model_type, sorted(names), n=1, cutoff=0.0)
    return f"the nearest by name is {near}; all are in docs/reference/families.md"


def find_structure(model: PreTrainedModel) -> Structure:
    """Of a model, which may be on the meta device. Raises ModelError for one whose parts cannot be distinguished."""
    names = {id(module): name for name, module in model.named_modules()}
    base = _base(model)
    if hasattr(base, _MAKES_TOKENS):
        raise ModelError(
            f"model_type {model.config.model_type!r}: its {_MAKES_TOKENS} makes tokens of the vocabulary of a picture, "
            "which its decoder's embedding looks up, so that an encoder's output is nothing to train apart from it. "
            "Take a family whose encoder makes embeddings; all are in docs/reference/families.md"
        )
    decoder, head = _decoder(model), _head(model)
    layers = _longest_list(decoder)
    if layers is None:
        raise ModelError(f"{type(model).__name__}: its decoder {type(decoder).__name__} has no list of layers")
    text, others = _divide(model, {id(decoder), id(head)})
    audio = tuple(name for name in others if "audio" in name.rpartition(".")[2])
    vision = tuple(name for name in others if name not in audio)
    tower = _longest_of(model, vision)
    return Structure(
        base=names[id(base)],
        decoder=names[id(decoder)],
        layers=names[id(layers)],
        depth=len(layers),
        embedding=names[id(model.get_input_embeddings())],
        norm=next((names[id(child)] for name, child in decoder.named_children() if name in _NORMS), None),
        head=None if head is None else names[id(head)],
        mixers=tuple(sorted({type(one).__name__ for one in layers.modules() if type(one).__name__.endswith(_MIXERS)})),
        text=text,
        vision=vision,
        vision_layers=None if tower is None else names[id(tower)],
        vision_depth=0 if tower is None else len(tower),
        audio=audio,
    )


_MIXERS = ("GatedDeltaNet", "ShortConv")
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def unknown_layers(config: PreTrainedConfig, structure: Structure) -> tuple[str, ...]:
    """Kinds of layers whose state, or whose choice of keys, could run from sample to sample in a packed row without an
    error, so that each sample has to run through the decoder alone."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    return tuple(sorted(kinds - _ATTENTION - (KINDS if structure.mixers else frozenset())))


_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


def _base(model: PreTrainedModel) -> nn.Module:
    base = getattr(model, "model", None)
    if base is not None and hasattr(base, "get_image_features"):
        return base
    if hasattr(model, "get_image_features"):
        return model
    raise ModelError(f"{type(model).__name__} has no get_image_features, so nobody encodes an image by itself")


def _head(model: PreTrainedModel) -> nn.Module | None:
    """The model's, or, where it names none, that of the decoder which it holds as a whole model."""
    head = model.get_output_embeddings()
    inner = getattr(model, "language_model", None)
    return inner.get_output_embeddings() if head is None and isinstance(inner, PreTrainedModel) else head


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder = model.get_decoder()
    inner = getattr(decoder, "model", None)  # of a decoder with a head, the decoder
    return inner if isinstance(inner, nn.Module) and hasattr(inner, "layers") else decoder


def _longest_list(module: nn.Module) -> nn.ModuleList | None:
    lists = [found for found in module.modules() if isinstance(found, nn.ModuleList) and len(found)]
    return max(lists, key=_size, default=None)


def _size(modules: nn.ModuleList) -> tuple[int, int]:
    return len(modules), sum(parameter.numel() for parameter in modules.parameters())


def _longest_of(model: nn.Module, names: tuple[str, ...]) -> nn.ModuleList | None:
    modules = dict(model.named_modules())
    found = [_longest_list(modules[name]) for name in names if name in modules]
    return max((one for one in found if one is not None), key=_size, default=None)


def layers_path(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """The largest list of layers in these modules; None: there is none."""
    layers = _longest_of(model, names)
    return next((name for name, module in model.named_modules() if module is layers), None)


def _divide(model: nn.Module, text: set[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found: tuple[list[str], list[str]] = ([], [])
    for name, of_text in _walk(model, "", text):
        found[not of_text].append(name)
    return tuple(found[0]), tuple(found[1])


def _walk(module: nn.Module, prefix: str, text: set[int]) -> Iterator[tuple[str, bool]]:
    for name, child in module.named_children():
        if id(child) in text:
            yield prefix + name, True
        elif any(id(inner) in text for inner in child.modules()):
            yield from _walk(child, f"{prefix}{name}.", text)
        elif any(True for _ in child.parameters()):
            yield prefix + name, False
    for name, _ in module.named_parameters(recurse=False):
        yield prefix + name, False


def with_called(structure: Structure, called: Sequence[str]) -> Structure:
    """The structure, whose decoder's part has these modules: what stands between a tower and its decoder may be run by
    either."""
    vision = tuple(name for name in structure.vision if name not in called)
    return replace(structure, text=(*structure.text, *called), vision=vision)


def without_weights(config: PreTrainedConfig, **named: Any) -> PreTrainedModel:
    """The family's model on the meta device. Raises ModelError as `family_class`, and for what the class refuses."""
    kind = family_class(config)
    try:
        with torch.device("meta"):
            return kind._from_config(config, **named)
    except Exception as error:  # a constructor may raise anything for what it does not know
        raise ModelError(
            f"{kind.__name__} cannot be made from this configuration: {type(error).__name__}: {str(error).strip()}"
        ) from error


def states_of(model: PreTrainedModel, structure: Structure, **named: Any) -> Tensor:
    """The decoder's output states from the arguments of the module that encodes pictures and runs the decoder. A model
    that does so itself is run without its head."""
    base = model.get_submodule(structure.base)
    if structure.base:
        return base(**named).last_hidden_state
    path, _, name = (structure.head or "").rpartition(".")
    handed: list[Tensor] = []

    def head(states: Tensor) -> Tensor:
        handed.append(states)  # before the library brings them, for logits, to another format
        return states

    with having(model.get_submodule(path), **{name: head}):
        base(**named)
    (states,) = handed
    return states


@dataclass(frozen=True)
class Contract:
    """The properties of one configuration's family.

    structure: the modules of each part. base: the class of the module that encodes pictures and runs the decoder.
    handover: the tensors between them.

    dummy: the form of the picture of a rank without work; values: numbers in a row of pixels.

    arguments: of the encoder, that an image processor may give. videos: the same of its function for videos; empty: it
    has none, or one that takes others than frames.

    batches: several pictures of one shape may go through the encoder together. loops: some module in it is called once
    for each of them then.

    embeds: the decoder needs nothing but embeddings, in which the encoder's rows replace those of placeholders.

    cuts: the decoder may be cut by layers: a layer needs nothing but the states of the one before.

    logits: how logits are computed from the head's output.

    tensor_plan: styles of the decoder's modules that transformers' plan leaves out; None: it has no plan that could be
    completed here.

    clip: the form of the clip of a rank without work; None: sound is not read. audio_layers, audio_work: of its tower.

    vision_layers, text_layers: modules of their layers. experts: modules of experts among the latter.

    unused: the tower's parameters that no output depends on; those of the decoder, with `*` for a layer's number.

    unknown: see `unknown_layers`. entrance: modules between a tower and its decoder, which the latter runs. fused: what
    the files hold as one matrix of unequal parts."""

    structure: Structure
    base: type[nn.Module]
    handover: Handover
    dummy: ProcessorOutput
    values: int
    arguments: tuple[str, ...]
    batches: bool
    embeds: bool
    cuts: bool
    logits: LogitRule
    tensor_plan: Mapping[str, str] | None
    unused: tuple[str, ...]
    vision_work: VisionWork
    text_work: TextWork
    vision_layers: LayerParts
    text_layers: LayerParts
    experts: tuple[str, ...]
    loops: bool = False
    unknown: tuple[str, ...] = ()
    entrance: tuple[str, ...] = ()
    fused: str = ""
    videos: tuple[str, ...] = ()
    clip: ProcessorOutput | None = None
    audio_layers: LayerParts = LayerParts("", (), (), ())
    audio_work: AudioWork = AudioWork(0, 0, 0, 0, 0, 0, 1)


POOLED, LAST = "pooler_output", "last_hidden_state"


@dataclass(frozen=True)
class Handover:
    """The fields that the decoder reads, each with a row for every placeholder.

    main: the field whose rows replace the placeholders'. more: other fields, and how many levels each has. listed:
    the decoder takes a list of tensors, one an image, not one tensor. stacked: it takes that one with a dimension for
    images before the tokens.

    shared: fields with a few rows that all pictures have in common (Ovis2's indicators): how many rows, and in how many
    tensors they travel. Each picture's first rows carry them, and the decoder takes those of its first picture, so that
    their gradient is the sum over all decoders."""

    main: str = POOLED
    more: tuple[tuple[str, int], ...] = ()
    listed: bool = True
    shared: tuple[tuple[str, int, int], ...] = ()
    stacked: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that `take` gives."""
        more = (*self.more, *((field, tensors) for field, _, tensors in self.shared))
        return (EMBEDDINGS, *(f"{field}.{level}" for field, levels in more for level in range(levels)))

    def take(self, output: Mapping[str, Any], tokens: Sequence[int] = ()) -> dict[str, Tensor]:
        """Rows [tokens, width] by name, from the encoder's output for some images, in their order. tokens: of each,
        where they share rows."""
        fields = [_rows(output[self.main])]
        for field, levels in self.more:
            fields += [_rows(output[field][level]) for level in range(levels)]
        for field, count, tensors in self.shared:
            each = -(-count // tensors)
            fields += [_spread(part, tokens or [len(fields[0])]) for part in output[field].split(each)]
        return dict(zip(self.names, fields, strict=True))

    def give(self, rows: Mapping[str, Tensor]) -> Encoded:
        """The inverse of `take`: the encoder's output as the decoder takes it."""
        wrap = (lambda tensor: (tensor,)) if self.listed else (lambda tensor: tensor)
        fields = {self.main: rows[EMBEDDINGS][None] if self.stacked else wrap(rows[EMBEDDINGS])}
        for field, levels in self.more:
            fields[field] = [(rows[f"{field}.{level}"],) for level in range(levels)]
        for field, count, tensors in self.shared:
            each = -(-count // tensors)
            parts = [rows[f"{field}.{part}"][: min(each, count - part * each)] for part in range(tensors)]
            fields[field] = torch.cat(parts)
        return Encoded(fields)


class Encoded:
    """A stand-in for an encoder's output: its fields, and which of them were read."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """None for a field that it has not, as an output of the library answers."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.read.append(name)
        return self._fields.get(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self._fields


def _rows(field: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(field, Tensor):
        return field.reshape(-1, field.shape[-1])
    return torch.cat([_rows(one) for one in field])


def _spread(part: Tensor, tokens: Sequence[int]) -> Tensor:
    """`part` in the first rows of each picture, zeros in the others."""
    return torch.cat([torch.cat([part, part.new_zeros(count - len(part), part.shape[1])]) for count in tokens])
