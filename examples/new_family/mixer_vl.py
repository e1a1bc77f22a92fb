"""MixerVL: an MLP-Mixer for a tower (Tolstikhin et al. 2021), a Qwen2 decoder. transformers does not have it, nor dhp.

Four things make it a family that dhp can train:

1. `get_image_features` encodes pictures alone, and gives their rows as `pooler_output`;
2. `forward` takes such an output as `mm_encoder_outputs["image"]`, in the place of pixels;
3. `get_input_embeddings`, `get_decoder` and `get_output_embeddings` find the decoder's embedding, layers and head;
4. transformers' Auto classes know all of it: the last three lines.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationMixin,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast


class MixerVisionConfig(PreTrainedConfig):
    model_type = "mixer_vl_vision"
    base_config_key = "vision_config"

    image_size: int = 28
    patch_size: int = 7
    num_channels: int = 3
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2


class MixerVlConfig(PreTrainedConfig):
    model_type = "mixer_vl"
    sub_configs = {"vision_config": MixerVisionConfig, "text_config": AutoConfig}

    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = MixerVisionConfig(**(self.vision_config or {}))
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = AutoConfig.for_model(**{"model_type": "qwen2", **(self.text_config or {})})
        super().__post_init__(**kwargs)


class MixerLayer(nn.Module):
    """Mixes the patches of each channel, then the channels of each patch."""

    def __init__(self, config: MixerVisionConfig):
        super().__init__()
        patches, width, inner = (
            (config.image_size // config.patch_size) ** 2,
            config.hidden_size,
            config.intermediate_size,
        )
        self.patch_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, inner), nn.GELU(), nn.Linear(inner, patches))
        self.channels = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, states: Tensor) -> Tensor:  # [images, patches, width]
        states = states + self.patches(self.patch_norm(states).transpose(1, 2)).transpose(1, 2)
        return states + self.channels(self.channel_norm(states))


class MixerTower(nn.Module):
    """Pixels of pictures of one size → a row for each patch."""

    def __init__(self, config: MixerVisionConfig):
        super().__init__()
        self.embed = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.layers = nn.ModuleList(MixerLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, pixel_values: Tensor) -> Tensor:  # [images, channels, side, side] → [images, patches, width]
        states = self.embed(pixel_values.to(self.embed.weight.dtype)).flatten(2).transpose(1, 2)
        for layer in self.layers:
            states = layer(states)
        return states


class MixerVlPreTrainedModel(PreTrainedModel):
    config_class = MixerVlConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class MixerVlModel(MixerVlPreTrainedModel):
    """The tower, a projector, and the decoder without its head."""

    def __init__(self, config: MixerVlConfig):
        super().__init__(config)
        self.vision_tower = MixerTower(config.vision_config)
        self.projector = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        states = self.vision_tower(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=self.projector(states))

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **of_decoder: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        pictures = (mm_encoder_outputs or {}).get("image")
        if pictures is None and pixel_values is not None:
            pictures = self.get_image_features(pixel_values)
        if pictures is not None:
            rows = pictures.pooler_output.flatten(0, -2).to(inputs_embeds)  # [tokens, width]
            inputs_embeds = inputs_embeds.masked_scatter((input_ids == self.config.image_token_id)[..., None], rows)
        return self.language_model(inputs_embeds=inputs_embeds, **of_decoder)


class MixerVlForConditionalGeneration(MixerVlPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}  # the decoder brings a plan of its own

    def __init__(self, config: MixerVlConfig):
        super().__init__(config)
        self.model = MixerVlModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **of_decoder: Any,
    ) -> CausalLMOutputWithPast:
        pictures = {"pixel_values": pixel_values, "mm_encoder_outputs": mm_encoder_outputs}
        output = self.model(input_ids, **pictures, **of_decoder)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=output.cache)


AutoConfig.register("mixer_vl", MixerVlConfig)
AutoModelForImageTextToText.register(MixerVlConfig, MixerVlForConditionalGeneration)
AutoProcessor.register(MixerVlConfig, LlavaProcessor)  # pictures of one size: an existing processor says what it needs
