"""A model's inputs: patches, grids, placeholders, positions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dhp.core.batch import Grid, ProcessorOutput, frame_patches
from dhp.core.errors import ModelError
from dhp.models.contract.random_rows import positions

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
        clip ends in the silence behind it."""
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
    def longest(self) -> int | None:
        """Samples of the longest clip of which nothing is cut; None: any."""
        return None

    @property
    def shortest(self) -> int:
        """Samples of sound of the shortest clip: those of one Fourier transform."""
        return self._extractor.n_fft

    def about(self) -> list[Any]:
        """All that decides the number of a clip's tokens, except its file."""
        return [self.token_id, self._extractor.to_json_string(), self._config.audio_config.n_window]

    @cached_property
    def _extractor(self) -> Any:
        return self.load_extractor(self._config.audio_config.num_mel_bins)

    def load_extractor(self, bins: int) -> Any:
        """The directory's own, of so many bins. Raises ModelError."""
        from transformers import AutoFeatureExtractor

        try:
            extractor = AutoFeatureExtractor.from_pretrained(self._model_name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._model_name}: no usable feature extractor: {error}") from error
        if extractor.feature_size != bins:
            raise ModelError(
                f"{self._model_name}: its feature extractor makes {extractor.feature_size} bins, but the audio tower "
                f"reads num_mel_bins({bins}). Use the one saved with the model"
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


class Processor(ABC):
    """The processor of one family; it has no weights."""

    image_token_id: int
    video_token_id: int | None = None  # None: the model sees no videos
    frames_per_patch: int = 1  # frames of a video that are one step in time
    takes_both_ends: bool = False  # frames are taken from the very first of a video to the very last
    # Tokens around the placeholders of each step in time, where they are separate in the prompt; None: one run a video.
    step_tokens: tuple[int, int] | None = None
    patch_dim: int  # values in one patch
    merge_unit: int = 1  # patches that become one token of the text part
    hearing: AudioProcessor | None = None  # None: the model takes no audio
    video_kind: str = ""  # class of the library's video processor, where the model's directory says nothing of it
    videos: Any = None  # of frames that go through the tower as pictures do: `dhp.models.contract.videos.WholeVideos`
    published_positions: bool = True  # False: those of the installed library, where these differ

    def __init__(self, config: Any):
        self.config = config
        self.image_token_id = config.image_token_id

    def model(self) -> type[nn.Module] | None:
        """The model class that computes positions; None: tokens are counted through. Imported here, as modeling code
        takes a second, and a driver runs no model."""
        return None

    @property
    def sees_videos(self) -> bool:
        """Whether videos of the family are read, where its directory has all that this takes."""
        return self.video_token_id is not None

    @property
    def no_videos(self) -> str:
        """Why videos cannot be read; "": they can."""
        return "this model sees images only" if self.video_token_id is None else ""

    def load(self) -> None:
        """Import what samples need, so that a broken installation shows before a run begins."""

    @abstractmethod
    def patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid | ProcessorOutput]:
        """The image processor's output for one image, as rows [patches, values], float32, and its grid or form."""

    def video_patches(self, output: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid]:
        """The image processor's output for `frames_per_patch` frames of a video, as rows [patches, values], float32,
        and their grid, one step in time. A video is a sequence of such steps."""
        raise NotImplementedError(f"{type(self).__name__}: the model sees no videos")

    def frames(self, pixels: np.ndarray, grid: Grid | ProcessorOutput, moving: bool = False) -> np.ndarray | None:
        """The inverse of `patches`, for a picture or each step of a video (`moving`): float32 [frames or tiles, height,
        width, channels], as the image processor normalised it. None where the form does not determine it."""
        return None

    def from_patches(self, grid: Grid | ProcessorOutput) -> bool:
        """Whether `frames` assumes an order of patches that an image processor might not follow."""
        return not isinstance(grid, ProcessorOutput)

    def step_text(self, middle: float, first: float) -> tuple[str, str]:
        """The prompt's text before and behind a separate step in time: its time. middle, first: seconds
        from the video's beginning to the middle of the step, and to its first frame."""
        return "", ""

    def plain_inputs(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Padded rows and patches [patches, values] as the arguments of the plain model."""
        return dict(named)

    def image_tokens(self, grid: Grid | ProcessorOutput) -> int:
        """Placeholder tokens of an image or video."""
        return grid.tokens if isinstance(grid, ProcessorOutput) else prod(grid) // self.merge_unit

    def frame_patches(self, grid: Grid | ProcessorOutput) -> tuple[int, ...]:
        """Patches of each frame or tile of an image or video, as the tower attends to them; from (1, 1, n) in place of
        an image's grid too."""
        return frame_patches(grid)

    @property
    def placeholder(self) -> str | None:
        """The text of an image in a prompt from the chat template, where `written` replaces it."""
        return None

    @property
    def pictures_apart(self) -> bool:
        """Whether positions are counted from runs of placeholders, so that pictures need a token between them."""
        return hasattr(self.model(), "get_rope_index")

    @property
    def image_arguments(self) -> Mapping[str, Any]:
        """Arguments of the image processor, besides the images."""
        return {}

    def written(self, grid: Grid | ProcessorOutput) -> str:
        """The prompt's text for an image's one placeholder, where that is not the placeholder repeated."""
        return ""

    def about(self) -> list[Any]:
        """All that decides the number of tokens of a picture, except its file and the image processor."""
        return [self.image_token_id, self.image_tokens((2, 12, 12))]

    def position_ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        grids: Tensor | None,
        lengths: Tensor,
        video_grids: Tensor | None = None,
        video_seconds: Tensor | None = None,
        forms: Sequence[ProcessorOutput] = (),
        **more: Tensor,
    ) -> Tensor:
        """Rotary positions of right-padded rows, as the model's makers have them (`published_positions`); int64 [rows,
        tokens], or [3, rows, tokens] with three axes, where padding has zeros.

        grids: of the images; video_grids: of the videos, and video_seconds: of a step in time of each. forms: of
        pictures that are no grids. more: `audio_seqlens` where there are clips, frames of each, for a model with audio.
        """
        inside = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [rows, tokens]
        given = {"image_grid_thw": grids, "video_grid_thw": video_grids, **more}
        given |= dict.fromkeys(("second_per_grid_ts", "second_per_grids"), video_seconds)  # names that models give it
        rule = self.published_positions
        return positions(self.model(), self.config, input_ids, mm_token_type_ids, inside, given, forms, rule)
