"""The text part of a family: tokens and the tower's tensors in, hidden states out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dhp.models.family import DecoderInputs, LayerParts
from dhp.models.flops import TextWork, text_work
from dhp.models.tower import EMBEDDINGS

PATH = "model.language_model"


class Decoder:
    """A decoder with gated MLPs and grouped keys, as those of Qwen and Llama, and its head."""

    modules: tuple[str, ...] = (PATH, "lm_head")  # all that belongs to it: what the vision part drops
    kv_projections: tuple[str, ...] = tuple(f"{PATH}.layers.*.self_attn.{p}_proj" for p in "kv")
    tensor_plan: Mapping[str, str] = {}  # styles by module, where transformers has none
    enters: Mapping[str, int] = {}  # the layer after which a tensor of the tower is added to the states

    def __init__(self, config: Any):
        text = config.get_text_config()
        self.heads: int = text.num_attention_heads
        self.kv_heads: int = text.num_key_value_heads
        self.work: TextWork = text_work(text)
        self.layers = LayerParts(
            f"{PATH}.layers",
            tuple(f"self_attn.{p}_proj" for p in "qkvo"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("causal",) * text.num_hidden_layers,
        )

    def share_kv_heads(self, model: PreTrainedModel, ranks: int) -> None:
        """Tell attention that a rank has one key/value head, where several ranks share one."""
        for layer in model.model.language_model.layers:
            layer.self_attn.num_key_value_groups = self.heads // ranks

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Make it call the registered attention function `name`, and build no mask."""
        model.model.language_model.config._attn_implementation_internal = name

    def hidden_states(self, model: PreTrainedModel, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """Last hidden states, [rows, tokens, hidden]. `extra` reaches the attention function as it is.

        Pictures go in by their positions. The model's own way looks for placeholders among the tokens on the device,
        and waits for the answer.
        """
        states = model.get_input_embeddings()(inputs.input_ids)
        if inputs.images:
            images = inputs.images[EMBEDDINGS].to(states.dtype)
            states = states.flatten(0, 1).index_copy(0, inputs.image_positions, images).view_as(states)
        output = model.model(inputs_embeds=states, position_ids=inputs.position_ids, use_cache=False, **extra)
        return output.last_hidden_state
