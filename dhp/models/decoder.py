"""The text part's own call of the model: embeddings with those of pictures in their places, then the decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dhp.models.family import DecoderInputs


def last_hidden_states(model: PreTrainedModel, inputs: DecoderInputs, **extra: Any) -> Tensor:
    """[rows, tokens, hidden]. `extra` reaches the attention function as it is.

    Pictures go in by their positions. The model's own way looks for placeholders among the tokens on the device, and
    waits for the answer.
    """
    embedded = model.get_input_embeddings()(inputs.input_ids)
    if inputs.images is not None:
        images = inputs.images.to(embedded.dtype)
        embedded = embedded.flatten(0, 1).index_copy(0, inputs.image_positions, images).view_as(embedded)
    output = model.model(inputs_embeds=embedded, position_ids=inputs.position_ids, use_cache=False, **extra)
    return output.last_hidden_state
