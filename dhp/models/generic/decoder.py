"""A decoder run by the family's own base model, to which pictures come by transformers' contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dhp.models.decoder import Decoder
from dhp.models.family import DecoderInputs, LayerParts
from dhp.models.generic.contract import Contract
from dhp.models.generic.declared import block_rule
from dhp.models.generic.rows import kinds_for
from dhp.models.slice import Chunk
from dhp.models.tower import EMBEDDINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ContractDecoder(Decoder):
    """Whatever the base model does with what the encoder hands over, it does here."""

    def __init__(self, config: Any, contract: Contract):
        structure = contract.structure
        self._contract = contract
        self.modules, self.path = structure.text, structure.decoder
        self.embedding, self.norm, self.head = structure.embedding, structure.norm, structure.head
        super().__init__(config)
        self.mixers, self.block_rule = structure.mixers, block_rule(config)
        self.layers = LayerParts(structure.layers, (), (), self.layers.kinds)
        self.work = contract.text_work

    @property
    def takes(self) -> Mapping[str, int]:
        """All of it at the first layer."""
        return dict.fromkeys(self._contract.handover.names, 0)

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """See `Decoder`."""
        base = model.get_submodule(self._contract.structure.base)
        output = base(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            mm_encoder_outputs=self._encoded(inputs),
            use_cache=False,
            **kinds_for(base.forward, inputs.kinds),
            **extra,
        )
        return output.last_hidden_state

    def _encoded(self, inputs: DecoderInputs) -> dict[str, Any] | None:
        """Rows in the order of their placeholders, as the model takes them."""
        if EMBEDDINGS not in inputs.images:
            return None
        order = inputs.image_positions.argsort()
        return {"image": self._contract.handover.give({name: rows[order] for name, rows in inputs.images.items()})}
