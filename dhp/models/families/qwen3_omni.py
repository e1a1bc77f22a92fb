"""Qwen3-Omni's thinker: vision as in Qwen3-VL, and audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dhp.models.audio import AUDIO_EMBEDDINGS, AudioTower
from dhp.models.contract.find import find_contract
from dhp.models.contract.generic_parts import ContractDecoder
from dhp.models.contract.random_rows import kinds_for
from dhp.models.decoder import Decoder
from dhp.models.families.grid import GridProcessor
from dhp.models.families.qwen3_vl import Qwen3VlTower, deepstack_names
from dhp.models.family import Family
from dhp.models.processor import AudioProcessor
from dhp.models.tower import EMBEDDINGS
from dhp.models.types import Chunk, DecoderInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp.models.contract.contract import Contract

AUDIO = "audio"  # the part


def qwen3_omni(config: Any) -> Family:
    """Qwen3-Omni's thinker of that configuration, whose directory has the feature extractor too."""
    contract = find_contract(config)
    # The twin does not test this: features enter after layers, as with Qwen3-VL, so that these can be cut.
    decoder = OmniDecoder(config, replace(contract, embeds=True, cuts=True))
    processor = OmniProcessor(config, contract)
    others = {AUDIO: AudioTower(config)} if has_audio(config) else {}
    idle = tuple(module for module in contract.structure.audio if not (others and module in AudioTower.modules))
    return Family(config, processor, OmniTower(config), decoder, others=others, idle=idle)


def has_audio(config: Any) -> bool:
    """Whether a configuration has an audio tower."""
    return getattr(config, "audio_config", None) is not None


class OmniProcessor(GridProcessor):
    """Takes audio too. A video is one run of placeholders; its temporal positions depend on seconds."""

    paced = True

    def __init__(self, config: Any, contract: Contract):
        super().__init__(config, contract.base)
        self._forward = contract.base.forward
        if has_audio(config):
            self.hearing = AudioProcessor(config, config.name_or_path)

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = super().plain_inputs(named)
        kinds, seconds = (kept.pop(name, None) for name in ("mm_token_type_ids", "second_per_grid_ts"))
        kept |= {} if kinds is None else kinds_for(self._forward, kinds)
        kept.setdefault("attention_mask", torch.ones_like(kept["input_ids"]))  # without one it counts tokens through
        return kept | ({} if seconds is None else {"video_second_per_grid": seconds})


class OmniTower(Qwen3VlTower):
    """Its mergers have other names."""

    mergers = ("merger", "merger_list")
    merger_plan = {"ln_q": "dhp_whole", "mlp.0": "colwise", "mlp.2": "rowwise"}


class OmniDecoder(ContractDecoder):
    """Features of the tower are added after its first layers; rows of audio are scattered to their positions."""

    def __init__(self, config: Any, contract: Contract):
        super().__init__(config, contract)
        self.enters = {name: layer for layer, name in enumerate(deepstack_names(config))}

    @property
    def takes(self) -> Mapping[str, int]:
        """Pictures and audio at the first layer, features after the first ones."""
        return {EMBEDDINGS: 0, **self.enters, **({AUDIO_EMBEDDINGS: 0} if has_audio(self.config) else {})}

    def run(self, model: PreTrainedModel, chunk: Chunk, inputs: DecoderInputs, **extra: Any) -> Tensor:
        """See `Decoder`, which adds features after a layer."""
        return Decoder.run(self, model, chunk, inputs, **extra)
