"""Sound of families without code: clips that an audio tower takes whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dhp.core.batch import ProcessorOutput
from dhp.core.errors import ModelError
from dhp.models.audio import AUDIO_EMBEDDINGS
from dhp.models.contract.generic_parts import WholeTower, check_rows
from dhp.models.flops import AudioWork
from dhp.models.processor import FEATURES, AudioProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp.models.contract.contract import Contract


class ClipTower(WholeTower):
    """Each clip is encoded by one rank, alone."""

    part, sees = "audio", "clips"

    def __init__(self, config: Any, contract: Contract):
        super().__init__(config, contract)
        assert contract.clip is not None
        self.modules, self.tensors = contract.structure.audio, (AUDIO_EMBEDDINGS,)
        self.layers = contract.audio_layers
        inside = self.layers.path
        self.projector = tuple(name for name in self.modules if not f"{inside}.".startswith(f"{name}."))
        ((_, (self.dummy_patches, self.patch_dim)),) = contract.clip.pixels
        self.work: AudioWork = contract.audio_work

    @property
    def dummy_form(self) -> ProcessorOutput:
        assert self._contract.clip is not None
        return self._contract.clip

    def calls(
        self, forms: Sequence[ProcessorOutput], even: bool = False, alone: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        return tuple((number,) for number in range(len(forms)))

    def _encode_together(
        self, model: PreTrainedModel, pictures: Sequence[dict[str, Tensor]], forms: Sequence[ProcessorOutput]
    ) -> list[Mapping[str, Tensor]]:
        base = model.get_submodule(self._contract.structure.base)
        output = base.get_audio_features(**clip_arguments(base, pictures[0][FEATURES]), return_dict=True)
        rows = output.pooler_output.flatten(0, -2)
        check_rows(self.config.model_type, len(rows), [forms[0].tokens])
        return [{AUDIO_EMBEDDINGS: rows}]

    def use_attention(self, model: PreTrainedModel, name: str) -> None:
        """Keeps the library's attention."""


_BY_BINS, _BY_FRAMES = "feature_attention_mask", "input_features_mask"  # arguments beside [bins, frames] and its turn


def mask_name(base: Any) -> str | None:
    """The argument of a model's `get_audio_features` that says which frames are sound; None: it takes no frames."""
    asked = signature(base.get_audio_features).parameters if hasattr(base, "get_audio_features") else {}
    return next((name for name in (_BY_BINS, _BY_FRAMES) if name in asked), None)


def clip_arguments(base: Any, frames: Tensor) -> dict[str, Tensor]:
    """One clip, [frames, bins], as the arguments of `get_audio_features`."""
    mask = torch.ones(1, len(frames), dtype=torch.long, device=frames.device)
    return as_asked(base, {FEATURES: frames.T[None], _BY_BINS: mask})


def as_asked(base: Any, sounds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Features [clips, bins, frames] and their mask as a model takes them; other arguments stay."""
    if mask_name(base) != _BY_FRAMES or _BY_BINS not in sounds:
        return sounds
    others = {name: one for name, one in sounds.items() if name not in (FEATURES, _BY_BINS)}
    return {**others, FEATURES: sounds[FEATURES].transpose(1, 2), _BY_FRAMES: sounds[_BY_BINS].bool()}


class ClipProcessor(AudioProcessor):
    """Sound as the library's processor of the model's directory makes it, each clip alone."""

    def __init__(self, config: Any, model_name: str, bins: int, library: Callable[[], Any]):
        super().__init__(config, model_name)
        self._bins, self._library = bins, library

    def load(self) -> None:
        super().load()
        try:
            self.forms([self.rate])
        except Exception as error:  # a processor may fail anyhow for a directory that lacks what it needs
            raise ModelError(
                f"{self._model_name}: {type(self._library()).__name__} cannot say what a prompt has in sound's place "
                f"({type(error).__name__}: {error}), so sound of {self._config.model_type} is not read. Leave it out"
            ) from error

    def features(self, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = []
        for wave, form in zip(waves, self.forms([len(wave) for wave in waves]), strict=True):
            silent = np.pad(wave, (0, getattr(self._extractor, "n_fft", 0)))  # for the library fills up to its longest
            output = self._extractor([silent], sampling_rate=self.rate, padding=True, return_tensors="np")
            frames = output[FEATURES][0] if _BY_FRAMES in output else output[FEATURES][0].T
            found.append(np.ascontiguousarray(frames[: form.rows], dtype=np.float32))
        return found

    def forms(self, samples: Sequence[int]) -> list[ProcessorOutput]:
        library, found = self._library(), list[ProcessorOutput]()
        library.feature_extractor = self._extractor
        counts = library._get_num_multimodal_tokens(audio_lengths=list(samples))["num_audio_tokens"]
        for frames, tokens in zip(map(self._frames, samples), counts, strict=True):
            seen = {"num_audio_tokens": [tokens], _BY_FRAMES: [np.ones(frames, dtype=bool)]}
            found.append(clip_form(frames, self._bins, tokens, library.replace_audio_token(seen, 0)))
        return found

    def _frames(self, samples: int) -> int:
        own = self._extractor
        if hasattr(own, "n_fft"):
            return -(-samples // own.hop_length)
        return (samples + own.frame_length // 2 - own.frame_length - 1) // own.hop_length + 1

    @property
    def longest(self) -> int:
        """Samples of the longest clip that is not cut."""
        return int(getattr(self._extractor, "n_samples", 480_000))

    @property
    def shortest(self) -> int:
        return int(getattr(self._extractor, "n_fft", 4 * getattr(self._extractor, "frame_length", 0)))

    def about(self) -> list[Any]:
        return [self.token_id, self._extractor.to_json_string(), "whole clips"]

    @cached_property
    def _extractor(self) -> Any:
        return self.load_extractor(self._bins)


def clip_form(frames: int, bins: int, tokens: int, written: str = "") -> ProcessorOutput:
    """The form of a clip of so many frames."""
    return ProcessorOutput(((FEATURES, (frames, bins)),), (), frames, int(tokens), written)
