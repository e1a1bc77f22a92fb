"""Qwen3-Omni's thinker: a family by transformers' contract, and an audio tower as a part of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dhp.models.audio import AUDIO_EMBEDDINGS, AudioTower
from dhp.models.family import DecoderInputs, Family
from dhp.models.generic.decoder import ContractDecoder
from dhp.models.generic.processor import ContractProcessor
from dhp.models.hearing import Hearing
from dhp.models.slice import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from dhp.models.generic.contract import Contract

AUDIO = "audio"  # the part


def hears(config: Any) -> bool:
    """Whether the audio tower of a configuration can be trained here."""
    return config.model_type == "qwen3_omni_moe_thinker" and getattr(config, "audio_config", None) is not None


def with_audio(family: Family, contract: Contract, model_name: str) -> Family:
    """The family with its audio tower as a part."""
    return replace(
        family,
        processor=HearingProcessor(family.config, contract, model_name),
        decoder=HearingDecoder(family.config, contract),
        others={AUDIO: AudioTower(family.config)},
        idle=tuple(module for module in family.idle if module not in AudioTower.modules),
    )


class HearingProcessor(ContractProcessor):
    """Sound too."""

    def __init__(self, config: Any, contract: Contract, model_name: str):
        super().__init__(config, contract, model_name)
        self.hearing = Hearing(config, model_name)


class HearingDecoder(ContractDecoder):
    """Rows of sound go in by their places, among the embeddings that the base model is given."""

    @property
    def takes(self) -> Mapping[str, int]:
        """Sound at the first layer."""
        return {**super().takes, AUDIO_EMBEDDINGS: 0}

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """See `Decoder`."""
        if chunk.first and AUDIO_EMBEDDINGS in inputs.sounds:
            states = model.get_input_embeddings()(inputs.input_ids)
            sounds = inputs.sounds[AUDIO_EMBEDDINGS].to(states.dtype)
            # The base model takes both: pictures go in by the ids, into embeddings that hold the sound already.
            flat = states.flatten(0, 1).index_copy(0, inputs.sound_positions, sounds)
            extra["inputs_embeds"] = flat.view_as(states)
        return super().run(model, chunk, inputs, **extra)
