"""Parts of a family without code, by transformers' contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp.config.model_rules import shares_sequence
from dhp.config.parts import resolved
from dhp.config.schema import PartConfig
from dhp.core.batch import VIDEO, Grid, ProcessorOutput
from dhp.core.draws import current_keys, drawing
from dhp.core.errors import ConfigError, ModelError
from dhp.models.audio import AUDIO_EMBEDDINGS
from dhp.models.contract.contract import Contract, Structure, states_of
from dhp.models.contract.random_pictures import joined, unpack
from dhp.models.contract.random_rows import (
    block_rule,
    generic_name,
    joins_images,
    kinds_for,
    mlps_need_rows,
    sees_prefix,
)
from dhp.models.contract.videos import is_video
from dhp.models.decoder import Decoder, embed, having, unchanged
from dhp.models.flops import TextWork, VisionWork
from dhp.models.tower import EMBEDDINGS, Tower, TowerInputs, project_as_products
from dhp.models.types import Chunk, DecoderInputs, ImageLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp.models.contract.contract import Contract


class WholeTower(Tower):
    """Each picture is encoded by one rank. The family's properties are in its contract."""

    part, sees = "vision", "images"
    position_columns = 0
    takes_attention, shares_whole = False, True
    tile = 1  # a picture has one key, and its layers see what they make of it

    def __init__(self, config: Any, contract: Contract):
        super().__init__(config)
        structure = contract.structure
        self._contract = contract
        self.modules, self.tensors = structure.vision, contract.handover.names
        self.projector = tuple(name for name in structure.vision if not _holds(name, structure.vision_layers))
        self.heads = 1
        self.patch_dim, self.dummy_patches = contract.values, contract.dummy.rows
        self.work: VisionWork = contract.vision_work
        self.layers = contract.vision_layers

    @property
    def dummy_form(self) -> ProcessorOutput:
        return self._contract.dummy

    def uneven_axes(self, asked: PartConfig) -> tuple[str, ...]:
        return ()  # pictures are shared out, not heads

    def check(self, asked: PartConfig) -> None:
        self.check_stages(self.part, asked)
        self.check_cut(resolved(asked.tensor))
        ring = resolved(asked.ring)
        if ring > 1:
            raise ConfigError(
                f"{self.part}.ring={ring} with a {self.config.model_type} model: its tower takes {self.sees} whole, so "
                f"that no sequence is divided. Set {self.part}.ring=1 and "
                f"{self.part}.ulysses={ring * resolved(asked.ulysses)}, whose actors share the {self.sees}"
            )
        self.check_backend(self.part, asked)

    def calls(
        self, forms: Sequence[ProcessorOutput], even: bool = False, alone: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """Pictures of one shape together, or each by itself."""
        if alone or not self._contract.batches or (even and self._contract.loops):
            return tuple((number,) for number in range(len(forms)))
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, form in enumerate(forms):
            alike = (form.pixels, tuple(shape for _, _, shape, _ in form.arrays))
            groups[(*alike, number) if is_video(form) else alike].append(number)  # which is known of pictures alone
        return tuple(map(tuple, groups.values()))

    def image_layout(self, grid: Grid | ProcessorOutput) -> ImageLayout:
        if not isinstance(grid, ProcessorOutput):
            raise TypeError(f"a picture of {self.config.model_type} is described by its form, not by a grid {grid}")
        rows, tokens = grid.rows, grid.tokens
        nowhere = torch.zeros(rows, 0, dtype=torch.long)
        return ImageLayout(torch.arange(tokens), 1, (rows,), (rows,), nowhere, (tokens,), grid)

    def encode(self, model: PreTrainedModel, inputs: TowerInputs) -> dict[str, Tensor]:
        forms = inputs.forms
        split_pixels = inputs.pixels.split([form.rows for form in forms])
        pictures = [unpack(form, rows, model.dtype) for form, rows in zip(forms, split_pixels, strict=True)]
        found: list[Mapping[str, Tensor]] = [{}] * len(forms)
        keys = current_keys()
        for numbers in inputs.calls:
            own, of_own = [pictures[n] for n in numbers], [forms[n] for n in numbers]
            if not numbers:
                own = [unpack(self.dummy_form, self.dummy_pixels(inputs.pixels), model.dtype)]
                of_own = [self.dummy_form]
            with drawing(keys and keys.of_call(numbers)):
                encoded = self._encode_together(model, own, of_own)
            if not numbers:
                found += encoded
                continue
            for n, rows in zip(numbers, encoded, strict=True):
                found[n] = rows
        return {name: torch.cat([one[name] for one in found]) for name in self.tensors}

    def _encode_together(
        self, model: PreTrainedModel, pictures: Sequence[dict[str, Tensor]], forms: Sequence[ProcessorOutput]
    ) -> list[Mapping[str, Tensor]]:
        """Each picture's rows by name, of pictures that one call takes."""
        base, tokens = model.get_submodule(self._contract.structure.base), [form.tokens for form in forms]
        encode = base.get_video_features if is_video(forms[0]) else base.get_image_features
        output = encode(**joined(pictures), return_dict=True)
        rows = self._contract.handover.take(output, tokens)
        check_rows(self.config.model_type, len(rows[EMBEDDINGS]), tokens)
        split = [tensor.split(tokens) for tensor in rows.values()]
        return [dict(zip(rows, of_picture, strict=True)) for of_picture in zip(*split, strict=True)]

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        # Attention stays the library's: a tower that takes images whole needs no other.
        project_as_products(model)

    def freeze_unused(self, model: PreTrainedModel) -> None:
        unused = set(self._contract.unused)
        for name, parameter in model.named_parameters():
            if name in unused:
                parameter.requires_grad_(False)


def _holds(name: str, path: str | None) -> bool:
    return path is not None and (path == name or path.startswith(f"{name}."))


def check_rows(model_type: str, found: int, tokens: Sequence[int]) -> None:
    if found != sum(tokens):
        raise ModelError(
            f"{model_type}: the encoder made {found} rows of {len(tokens)} images that have {sum(tokens)} placeholders "
            "in the prompt. The processor and the model of this directory do not belong together"
        )


def run_layers(
    model: PreTrainedModel,
    structure: Structure,
    chunk: Chunk,
    inputs: DecoderInputs,
    encoded: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Tensor:
    """The output states of a chunk: from tokens and pictures by the base model, or from states, where there are some,
    by the decoder. encoded: pictures as the base model takes them."""
    base, decoder = model.get_submodule(structure.base), model.get_submodule(structure.decoder)
    named = {"position_ids": inputs.position_ids, "use_cache": False, **extra}
    with having(decoder, **_replaced(decoder, structure, chunk)):
        if inputs.hidden is None:
            kinds = kinds_for(base.forward, inputs.kinds)
            named |= (
                dict.fromkeys(("input_features", "input_features_mask"), inputs.input_ids)
                if any(inputs.others.values())
                else {}
            )
            return states_of(model, structure, input_ids=inputs.input_ids, mm_encoder_outputs=encoded, **kinds, **named)
        output = decoder(inputs_embeds=inputs.hidden, **kinds_for(decoder.forward, inputs.kinds), **named)
    return output.last_hidden_state


def _replaced(decoder: nn.Module, structure: Structure, chunk: Chunk) -> dict[str, Any]:
    """Replacements of the layers that the chunk does not have, and of the norm before the last chunk."""
    if chunk.layers == range(structure.depth):
        return {}
    own = decoder.get_submodule(_own(structure.layers))
    layers = [own.get_submodule(str(n)) if n in chunk.layers else unchanged for n in range(structure.depth)]
    return {_own(structure.layers): layers} | ({} if chunk.last else {_own(structure.norm or ""): unchanged})


def _own(name: str) -> str:
    return name.rpartition(".")[2]


class ContractDecoder(Decoder):
    """Runs the base model's own code on the encoder's output."""

    def __init__(self, config: Any, contract: Contract):
        structure = contract.structure
        self.config, self._contract = config, contract
        self.modules, self.path = structure.text, structure.decoder
        self.embedding, self.norm, self.head = structure.embedding, structure.norm, structure.head
        self.entrance = contract.entrance
        self.projections = tuple(f"{structure.layers}.*.self_attn.{p}_proj" for p in "qkvo")
        super().__init__(config)
        self.tensor_plan = dict(contract.tensor_plan or {})
        self.mixers, self.by_sample = (*structure.mixers, *contract.unknown), bool(contract.unknown)
        self.block_rule, self.logits = block_rule(config), contract.logits
        self.sees_prefix, self.joins_images = sees_prefix(config), joins_images(config)
        self.layers, self.shared = contract.text_layers, contract.experts

    def count_work(self, text: Any) -> TextWork:
        return self._contract.text_work

    @property
    def takes(self) -> Mapping[str, int]:
        """All of it at the first layer."""
        sound = (AUDIO_EMBEDDINGS,) if self._contract.clip else ()
        return dict.fromkeys((*self._contract.handover.names, *sound), 0)

    def check(self, asked: PartConfig) -> None:
        super().check(asked)
        if asked.parallelism == "autotp":
            raise ConfigError(
                f"text.parallelism=autotp with a {self.config.model_type} model: what DeepSpeed makes of this family's "
                "layers is not known here. Set text.parallelism=tensor"
            )
        if asked.sequence_sharded_norms and self._contract.handover.more and not self._contract.embeds:
            raise ConfigError(
                f"text.sequence_sharded_norms=true with a {self.config.model_type} model: its own code adds features "
                "of pictures to the states between layers, of all tokens. Leave text.sequence_sharded_norms out"
            )
        if asked.mlp_chunks > 1 and mlps_need_rows(self.config):
            raise ConfigError(
                f"text.mlp_chunks={asked.mlp_chunks} with a {self.config.model_type} model: its MLPs take, for "
                "all tokens of a row, which are an image's. Set text.mlp_chunks=1"
            )
        if shares_sequence(asked) and self._contract.handover.shared:
            raise ConfigError(
                f"text.ulysses={asked.ulysses} and text.ring={asked.ring} with a {self.config.model_type} model: "
                "tokens around an image take features that come with the image's rows, and an actor may have the one "
                "without the other. Set both to 1; text.tensor and text.data divide the work."
            )
        if resolved(asked.tensor) > 1 and self._contract.tensor_plan is None:
            raise ConfigError(
                f"text.tensor={asked.tensor} with a {self.config.model_type} model: transformers has no "
                "tensor-parallel plan of its decoder, and its layers are of no kind for which one is known here. Set "
                "text.parallelism=data, or deepspeed with a zero_stage"
            )
        if resolved(asked.tensor) > 1 and self._contract.fused:
            raise ConfigError(
                f"text.tensor={asked.tensor} with a {self.config.model_type} model: its files hold "
                f"{self._contract.fused} as one matrix, of which each actor would read a slice before it is split. Set "
                "text.parallelism=data, or deepspeed with a zero_stage"
            )
        text, ranks = self.config.get_text_config(), resolved(asked.tensor)
        if getattr(text, "hidden_size_per_layer_input", 0) and (text.pad_token_id or 0) >= text.vocab_size // ranks:
            raise ConfigError(
                f"text.tensor={ranks} with a {self.config.model_type} model of pad_token_id={text.pad_token_id}: its "
                f"code takes that row from the embedding itself, of which each rank has {text.vocab_size // ranks} of "
                f"{text.vocab_size}. Set text.tensor=1, with text.data or text.ulysses instead"
            )
        if resolved(asked.pipeline) > 1 and not self._contract.cuts:
            ways = "data" if self._contract.tensor_plan is None else "data or tensor"
            raise ConfigError(
                f"text.pipeline={asked.pipeline} with a {self.config.model_type} model: its decoder's layers need more "
                "than the states of the layer before (features of the encoder, tokens, or one another's keys), which "
                "do not travel from stage to stage. Set text.pipeline=1, and "
                f"text.parallelism={ways}"
            )

    def freeze_unused(self, model: PreTrainedModel) -> None:
        unused, layers = set(self._contract.unused), f"{self._contract.structure.layers}."
        for name, parameter in model.named_parameters():
            if generic_name(name, layers) in unused:
                parameter.requires_grad_(False)

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        if self.by_sample:
            return  # attention stays the library's, which sees one sample alone
        super().use_attention(model, name)
        if self.block_rule is not None:
            for module in model.get_submodule(self.path).modules():
                if getattr(module, "is_causal", True) is False:
                    module.is_causal = True  # but for its blocks, which the plan of segments knows

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        structure = self._contract.structure
        if chunk.first and self._contract.embeds:
            states = run_layers(model, structure, chunk, replace(inputs, hidden=embed(model, inputs)), **extra)
        else:
            base = model.get_submodule(structure.base)
            with (
                having(base, **self._sound_rows(inputs))
                if chunk.first and any(inputs.others.values())
                else nullcontext()
            ):
                states = run_layers(model, structure, chunk, inputs, self._encoded(inputs), **extra)
        head = self.head_of(model).weight if chunk.last and structure.head else states
        # Some heads stay in float32, and their models bring states to it.
        return states if isinstance(head, DTensor) else states.to(head.dtype)

    def _sound_rows(self, inputs: DecoderInputs) -> dict[str, Any]:
        """What the base model calls in the place of its audio tower: rows in the order of their placeholders."""
        ((part, tensors),) = inputs.others.items()
        rows = tensors[AUDIO_EMBEDDINGS][inputs.other_positions[part].argsort()][None]
        mask = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        return {"get_audio_features": lambda *_, **__: SimpleNamespace(pooler_output=rows, attention_mask=mask)}

    def _encoded(self, inputs: DecoderInputs) -> dict[str, Any] | None:
        """Rows in the order of their placeholders, as the model takes them."""
        if EMBEDDINGS not in inputs.images:
            return None
        places, order = inputs.image_positions.sort()
        seen = {"image": order}
        if self._contract.videos and inputs.kinds is not None:
            moving = inputs.kinds.flatten()[places] == VIDEO
            seen = {"image": order[~moving], "video": order[moving]}
        give = self._contract.handover.give
        return {
            kind: give({name: rows[own] for name, rows in inputs.images.items()})
            for kind, own in seen.items()
            if len(own)
        }
