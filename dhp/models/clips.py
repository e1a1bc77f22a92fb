"""Clips of sound as Qwen3-Omni takes them: mel spectrograms of those of a sample, and their forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dhp.core.batch import ProcessorOutput
from dhp.core.errors import ModelError

FEATURES, CHUNK = "input_features", "chunk"


class AudioProcessor:
    """Qwen3-Omni's audio preprocessing, by the feature extractor of its directory."""

    def __init__(self, config: Any, model_name: str):
        self._config, self._model_name = config, model_name
        self.token_id: int = config.audio_token_id

    def load(self) -> None:
        """Raises ModelError where the directory's feature extractor cannot be used."""
        _ = self._extractor

    @property
    def rate(self) -> int:
        """Samples a second."""
        return self._extractor.sampling_rate

    def features(self, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Spectrograms [frames, bins], float32, of the clips of one sample, float32 [samples] each.

        They go through the extractor together, as in the library's processor, which pads them to the longest: a shorter
        clip ends in the silence behind it.
        """
        output = self._extractor(
            list(waves),
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        counts = output["attention_mask"].sum(-1)
        pairs = zip(output["input_features"], counts, strict=True)
        return [np.ascontiguousarray(bins[:, :count].T, dtype=np.float32) for bins, count in pairs]

    def forms(self, samples: Sequence[int]) -> list[ProcessorOutput]:
        """The forms of one sample's clips, of so many samples of sound each: frames as `features` gives them."""
        hop = self._extractor.hop_length
        most = max(samples, default=0) // hop
        return clip_forms([min(-(-count // hop), most) for count in samples], self._config)

    @property
    def shortest(self) -> int:
        """Samples of sound of the shortest clip: those of one Fourier transform."""
        return self._extractor.n_fft

    def about(self) -> list[Any]:
        """All that decides the number of a clip's tokens, except its file."""
        return [self.token_id, self._extractor.to_json_string(), self._config.audio_config.n_window]

    @cached_property
    def _extractor(self) -> Any:
        from transformers import AutoFeatureExtractor

        try:
            extractor = AutoFeatureExtractor.from_pretrained(self._model_name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._model_name}: no usable feature extractor: {error}") from error
        if extractor.feature_size != self._config.audio_config.num_mel_bins:
            raise ModelError(
                f"{self._model_name}: its feature extractor makes {extractor.feature_size} bins, but the audio tower "
                f"reads num_mel_bins({self._config.audio_config.num_mel_bins}). Use the one saved with the model"
            )
        return extractor


def count_tokens(frames: int, config: Any) -> int:
    """Placeholders of a clip of so many frames, by the model's own formula."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(frames, config.audio_config.n_window))


def clip_forms(frames: Sequence[int], config: Any) -> list[ProcessorOutput]:
    """The forms of one sample's clips, of so many frames each."""
    audio = config.audio_config
    longest = min(max(frames, default=0), 2 * audio.n_window)
    chunk = (CHUNK, "int64", (1,), np.int64(longest).tobytes())
    return [
        ProcessorOutput(((FEATURES, (count, audio.num_mel_bins)),), (chunk,), count, count_tokens(count, config))
        for count in frames
    ]
