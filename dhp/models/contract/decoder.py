"""A decoder run by the family's own base model, which takes pictures by transformers' contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dhp.config.model_rules import shares_sequence
from dhp.config.part import PartConfig
from dhp.config.parts import resolved
from dhp.core.errors import ConfigError
from dhp.models.contract.rows import block_rule, generic_name, kinds_for, mlps_need_rows, sees_prefix
from dhp.models.contract.structure import Structure
from dhp.models.decoder import Decoder, embed, having, unchanged
from dhp.models.flops import TextWork
from dhp.models.tower import EMBEDDINGS
from dhp.models.types import Chunk, DecoderInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp.models.contract.contract import Contract


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
            output = base(input_ids=inputs.input_ids, mm_encoder_outputs=encoded, **kinds, **named)
        else:
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
        self.kv_projections = tuple(f"{structure.layers}.*.self_attn.{p}_proj" for p in "kv")
        super().__init__(config)
        self.tensor_plan = dict(contract.tensor_plan or {})
        self.mixers, self.block_rule, self.logits = structure.mixers, block_rule(config), contract.logits
        self.sees_prefix = sees_prefix(config)
        self.layers, self.shared = contract.text_layers, contract.experts

    def count_work(self, text: Any) -> TextWork:
        return self._contract.text_work

    @property
    def takes(self) -> Mapping[str, int]:
        """All of it at the first layer."""
        return dict.fromkeys(self._contract.handover.names, 0)

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
        super().use_attention(model, name)
        if self.block_rule is not None:
            for module in model.get_submodule(self.path).modules():
                if getattr(module, "is_causal", True) is False:
                    module.is_causal = True  # but for its blocks, which the plan of segments knows

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        structure = self._contract.structure
        if chunk.first and self._contract.embeds:
            return run_layers(model, structure, chunk, replace(inputs, hidden=embed(model, inputs)), **extra)
        return run_layers(model, structure, chunk, inputs, self._encoded(inputs), **extra)

    def _encoded(self, inputs: DecoderInputs) -> dict[str, Any] | None:
        """Rows in the order of their placeholders, as the model takes them."""
        if EMBEDDINGS not in inputs.images:
            return None
        order = inputs.image_positions.argsort()
        return {"image": self._contract.handover.give({name: rows[order] for name, rows in inputs.images.items()})}
